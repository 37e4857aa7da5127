"""The memory of the client port's process: above its limit, the connections end that receive most.

The limits of keys apply to complete messages. What ZeroMQ holds of others has no limit: messages without an end, those of a
connection that it does not read, large frames of a stranger's handshake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hearth.platform.connections import end_connection, received_bytes
from hearth.platform.machine import give_back_freed_buffers

# Interval of looks at the memory; the loop turns at least every 0.5 s. A fast network brings 0.1 GB in 0.1 s.
_LOOK_SECONDS = 0.1
# Above this, freed memory is given back to the kernel, so often: a flood leaves as much as had been received and not read.
_TIDY_BYTES = 64 << 20
_TIDY_SECONDS = 2.0
# Received by a connection between two looks: below this, none is the cause of the growth, but one that was so earlier.
_CAUSE_BYTES = 1 << 20


def heaviest(before: Mapping[int, int], received: Mapping[int, int]) -> list[int]:
    """The connections that have received most since the last look, or in all if none has received much since."""
    amounts = {descriptor: total - before.get(descriptor, 0) for descriptor, total in received.items()}
    if max(amounts.values(), default=0) < _CAUSE_BYTES:
        amounts = dict(received)
    most = max(amounts.values(), default=0)
    return [descriptor for descriptor, amount in amounts.items() if amount > most // 2]


def resident_bytes() -> int:
    """Memory that this process takes; 0 on a system without /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class MemoryGuard:
    """Ends connections while the process takes more than `limit_bytes`."""

    def __init__(
        self,
        limit_bytes: int,
        resident: Callable[[], int] = resident_bytes,
        received: Callable[[], Mapping[int, int]] = received_bytes,
        end: Callable[[int], None] = end_connection,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._resident = resident
        self._received = received
        self._end = end
        self._next_look = self._next_tidy = 0.0
        self._before: Mapping[int, int] = {}  # bytes that each connection had received at the last look

    def look(self, now: float) -> int:
        """Look at the memory, if it is time for that. Returns the number of connections that were ended."""
        if now < self._next_look:
            return 0
        self._next_look = now + _LOOK_SECONDS
        resident = self._resident()
        if resident > self._limit_bytes or (resident > _TIDY_BYTES and now >= self._next_tidy):
            self._next_tidy = now + _TIDY_SECONDS
            give_back_freed_buffers()
            resident = self._resident()
        if resident <= self._limit_bytes // 2:
            return 0
        received = self._received()
        before, self._before = self._before, received
        if resident <= self._limit_bytes:
            return 0
        causes = heaviest(before, received)
        for descriptor in causes:
            self._end(descriptor)
        return len(causes)
