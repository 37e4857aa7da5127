"""A malicious worker of a plan: damaged copies of its messages, sent to its peers over connections of its own.

They are sent by a thread, so that the worker's own messages wait for them no more than for anything else that uses its
processor. The order is a file that `malicious_worker.py` writes.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import zmq

from hearth.platform.curve import KeyPair, harden, secure_client
from hearth.platform.ports import bracketed
from hearth.transport.base import Buffer, PeerAddress
from tools.bench.mutations import with_changed_bytes

_PERIOD_SECONDS = 0.02
_BURST_SECONDS = 0.1  # most of the time without the processor that is made up for afterwards
_REPORT_SECONDS = 0.25
_SEEN = 16  # newest messages, of which copies are made
_QUEUED = 1000  # messages per peer: then the peer does not read as fast as this, and none is added
_MOST_PER_PERIOD = 1000  # without a limit of the rate
# Most messages keep no more than this of a frame: whole tensors at thousands a second would fill the links.
_MOST_BYTES = 4 << 10
_WHOLE = 0.1  # share of the messages that are not cut


class Order(NamedTuple):
    """What the worker does: damaged copies at `rate` a second (0: any), or, with `cores`, only use of the processor."""

    rate: float = 0.0
    cores: float = 0.0


class DamagedCopies:
    """The thread of one worker and one plan. It ends with `stop`, or with the process."""

    def __init__(
        self, order: Path, report: int, rank: int, keypair: KeyPair | None, peers: Sequence[PeerAddress]
    ) -> None:
        """`report`: descriptor of a file to which a JSON object with counts is added four times a second."""
        self._order, self._report = order, report
        self._rank, self._keypair, self._peers = rank, keypair, peers
        self._seen: deque[tuple[int, list[Buffer]]] = deque(maxlen=_SEEN)
        self._attacks = False
        self._stopped = threading.Event()
        self._chance = random.Random(rank)
        self._thread = threading.Thread(target=self._run, name="damaged copies", daemon=True)
        self._thread.start()

    def see(self, target: int, frames: Sequence[Buffer]) -> None:
        """Take note of a message that the worker sends. It is not copied: if it changes, that is damage, too."""
        if self._attacks:
            self._seen.append((target, list(frames)))

    def stop(self) -> None:
        """End the thread, which takes a moment."""
        self._stopped.set()

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        others = _threads()
        sockets = {peer.rank: self._connected(context, peer) for peer in self._peers}
        # Also ZeroMQ's threads for these sockets.
        meter = _Meter({threading.get_native_id(), *(_threads() - others)}, self._report)
        looked, budget, before = time.monotonic(), 0.0, None
        while not self._stopped.wait(_PERIOD_SECONDS):
            now = time.monotonic()
            elapsed, looked = min(now - looked, _BURST_SECONDS), now
            order = read_order(self._order)
            self._attacks = order is not None and not order.cores
            if order != before:
                if before is not None:
                    meter.report()
                meter.begin()
                self._seen.clear()
                before = order
            if order is None:
                continue
            if order.cores:
                _spin(order.cores * elapsed)
            elif self._seen:
                budget = (
                    min(budget, order.rate * _BURST_SECONDS) + order.rate * elapsed if order.rate else _MOST_PER_PERIOD
                )
                sent = self._send(sockets, int(budget))
                budget -= sent
                meter.frames += sent
            meter.report_if_due(now)
        for socket in sockets.values():
            socket.close(linger=0)
        context.term()

    def _connected(self, context: zmq.Context[Any], peer: PeerAddress) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = context.socket(zmq.PUSH)
        if self._keypair is not None:
            secure_client(socket, self._keypair, peer.public_key)
        else:
            harden(socket)
        socket.sndhwm = _QUEUED
        socket.connect(f"tcp://{bracketed(peer.host)}:{peer.port}")
        return socket

    def _send(self, sockets: Mapping[int, zmq.Socket[Any]], most: int) -> int:
        """Send damaged copies of the newest messages. Returns how many the sockets took."""
        for sent in range(most):
            target, frames = self._chance.choice(self._seen)
            with suppress(zmq.Again):
                sockets[target].send_multipart(self._damaged(frames), zmq.NOBLOCK)
                continue
            return sent
        return most

    def _damaged(self, frames: Sequence[Buffer]) -> list[bytes]:
        """A copy with changed bytes, often without its last frames, sometimes with one more."""
        most = None if self._chance.random() < _WHOLE else _MOST_BYTES
        damaged = [with_changed_bytes(bytes(frame)[:most], self._chance) for frame in frames]
        damaged = damaged[: self._chance.randrange(1, len(damaged) + 1)] + damaged[: self._chance.randrange(2)]
        return damaged if self._keypair is not None else [bytes([self._rank]), *damaged]


class _Meter:
    """Reports the messages sent, and the processor time of some threads of this process, since the last report."""

    def __init__(self, threads: set[int], file: int) -> None:
        self.frames = 0
        self._threads, self._file = threads, file
        self._cpu_seconds = self._reported = 0.0

    def begin(self) -> None:
        self.frames, self._cpu_seconds = 0, self._used()

    def report_if_due(self, now: float) -> None:
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self.report()

    def report(self) -> None:
        line = json.dumps({"frames": self.frames, "cpu_seconds": round(self._used() - self._cpu_seconds, 6)})
        os.write(self._file, f"{line}\n".encode())
        self.begin()

    def _used(self) -> float:
        return sum(map(_cpu_seconds, self._threads))


def read_order(path: Path) -> Order | None:
    """The order of a file; None if there is no file."""
    try:
        return Order(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _threads() -> set[int]:
    return {each.id for each in psutil.Process().threads()}


def _cpu_seconds(thread: int) -> float:
    """Processor time of a thread of this process, by its own clock: /proc counts in ticks and misses short turns.

    The clock's number is the kernel's, as clock_getcpuclockid(3) makes it: thread, scheduler's clock of one thread.
    """
    return time.clock_gettime((~thread << 3) | 6)


def _spin(cpu_seconds: float) -> None:
    until = time.thread_time() + cpu_seconds
    while time.thread_time() < until:
        pass
