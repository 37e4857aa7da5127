"""In-memory transport with the contract of the data plane, for tests: no network, configurable rates and faults."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

from hearth.transport.base import Buffer, Received


class MemoryHub:
    """Connects the ranks of one test. `bytes_per_second` limits each sender's outgoing rate; None: no limit."""

    def __init__(self, num_ranks: int, bytes_per_second: float | None = None, latency_seconds: float = 0.0) -> None:
        self.num_ranks = num_ranks
        self._rate = bytes_per_second
        self.latency_seconds = latency_seconds
        self._transports = [MemoryTransport(self, rank) for rank in range(num_ranks)]
        self._free_at = [0.0] * num_ranks  # time at which each sender's link is free again
        self._cut: set[tuple[int, int]] = set()
        # As if connections broke again and again: each message comes a second time, after its successor.
        self.repeats = False
        self._last: dict[tuple[int, int], Received] = {}
        self._due: list[tuple[float, int, int, Received]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._timer = threading.Thread(target=self._deliver_loop, name="memory-hub", daemon=True)
        self._timer.start()

    def transport(self, rank: int) -> MemoryTransport:
        return self._transports[rank]

    def cut(self, source: int, target: int) -> None:
        """Drop all further messages from `source` to `target`."""
        self._cut.add((source, target))

    def mend(self) -> None:
        """Undo all cuts."""
        self._cut.clear()

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._timer.join(timeout=5)

    def _send(self, source: int, target: int, frames: Sequence[Buffer]) -> None:
        if (source, target) in self._cut:
            return
        copies = [memoryview(bytes(frame)).toreadonly() for frame in frames]
        received = Received(source, copies)
        if self._rate is None and not self.latency_seconds:
            self._transports[target]._put(received)
            if self.repeats and (last := self._last.get((source, target))) is not None:
                self._transports[target]._put(last)
            self._last[source, target] = received
            return
        num_bytes = sum(len(frame) for frame in copies)
        with self._changed:
            start = max(time.monotonic(), self._free_at[source])
            self._free_at[source] = start + (num_bytes / self._rate if self._rate else 0.0)
            due = self._free_at[source] + self.latency_seconds
            heapq.heappush(self._due, (due, next(self._order), target, received))
            self._changed.notify()

    def _deliver_loop(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._due:
                    self._changed.wait()
                    continue
                remaining = self._due[0][0] - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                    continue
                _, _, target, received = heapq.heappop(self._due)
                self._transports[target]._put(received)


class MemoryTransport:
    """One rank's end of a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, rank: int) -> None:
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self._hub = hub
        self._arrived: deque[Received] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._interrupted = False

    def send(self, target: int, frames: Sequence[Buffer], background: bool = False) -> None:
        self._hub._send(self.rank, target, frames)

    def receive(self, timeout_seconds: float) -> Received | None:
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._closed or self._interrupted, timeout_seconds)
            interrupted, self._interrupted = self._interrupted, False
            return self._arrived.popleft() if self._arrived and not self._closed and not interrupted else None

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, received: Received) -> None:
        with self._changed:
            self._arrived.append(received)
            self._changed.notify_all()
