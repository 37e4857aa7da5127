"""The newest messages on one link of the data plane, which are sent again after its connection broke. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hearth.transport.base import Buffer

# Lost with a TCP connection: what its buffers in both kernels hold, up to a few MiB on a link that is slower than its sender.
MAX_BYTES = 4 << 20
# The same for background messages, which take at most a tenth of a link's capacity: twice their part of those buffers.
MAX_BACKGROUND_BYTES = 1 << 20
MAX_SECONDS = 10.0  # an older message has arrived, or the step that waits for it has failed


class RecentMessages:
    """Copies of the newest messages, at most `max_bytes` of them. A larger message is not kept."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[tuple[float, int, list[bytes]]] = deque()  # time, size and frames; oldest first
        self._num_bytes = 0

    def add(self, frames: Sequence[Buffer], now: float) -> None:
        """Keep a message that is sent now."""
        num_bytes = sum(map(len, frames))
        if num_bytes > self._max_bytes:
            return
        self._messages.append((now, num_bytes, [bytes(frame) for frame in frames]))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest, _ = self._messages.popleft()
            self._num_bytes -= oldest

    def sent_between(self, now: float, broken_at: float) -> list[list[bytes]]:
        """The messages that may be lost, oldest first, if the connection broke at `broken_at`.

        Later ones wait in ZeroMQ's queue for the new connection.
        """
        return [frames for at, _, frames in self._messages if now - MAX_SECONDS <= at <= broken_at]
