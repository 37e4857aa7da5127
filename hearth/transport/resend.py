"""The newest messages on one link of the data plane, which are sent again after its connection broke. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hearth.transport.base import Buffer

# Lost with a TCP connection: what its buffers in both kernels hold, up to a few MiB on a link that is slower than its sender,
# and the message of which they hold a part. Larger messages are kept apart (`LargeMessages`).
MAX_BYTES = 4 << 20
# The same for background messages, which take at most a tenth of a link's capacity: twice their part of those buffers.
MAX_BACKGROUND_BYTES = 1 << 20
MAX_SECONDS = 10.0  # an older message has arrived, or the step that waits for it has failed
# Of messages above `MAX_BYTES`: the one that is being sent, and the one before it if it is not much larger than the buffers.
MAX_LARGE_BYTES = 16 << 20
# A large message has arrived after twice the time that the link takes for all that was sent, and this: sending it again would
# delay those that follow.
_LARGE_FACTOR = 2.0
_LARGE_MARGIN_SECONDS = 0.5


class RecentMessages:
    """The newest messages, at most `max_bytes` of them. A larger message is not kept. Their frames must never change."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[tuple[float, int, Sequence[Buffer]]] = deque()  # time, size and frames; oldest first
        self._num_bytes = 0

    def add(self, frames: Sequence[Buffer], now: float) -> None:
        """Keep a message that is sent now."""
        num_bytes = sum(map(len, frames))
        if num_bytes > self._max_bytes:
            return
        self._messages.append((now, num_bytes, frames))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest, _ = self._messages.popleft()
            self._num_bytes -= oldest

    def sent_between(self, now: float, broken_at: float) -> list[Sequence[Buffer]]:
        """The messages that may be lost, oldest first, if the connection broke at `broken_at`.

        Later ones wait in ZeroMQ's queue for the new connection.
        """
        return [frames for at, _, frames in self._messages if now - MAX_SECONDS <= at <= broken_at]


class _Large(NamedTuple):
    sent_at: float
    arrived_at: float  # at the latest
    num_bytes: int
    frames: Sequence[Buffer]


class LargeMessages:
    """The newest messages above `MAX_BYTES`, until they must have arrived: `MAX_LARGE_BYTES`, and always the newest one.

    Their frames, which are not copied, must never change.
    """

    def __init__(self, bytes_per_second: float) -> None:
        """`bytes_per_second`: the measured rate of the link."""
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0  # when the link has sent all of them, at its measured rate
        self._messages: deque[_Large] = deque()  # oldest first

    def add(self, frames: Sequence[Buffer], now: float) -> None:
        """Keep a message that is sent now."""
        num_bytes = sum(map(len, frames))
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
        patience = min(_LARGE_FACTOR * (self._free_at - now) + _LARGE_MARGIN_SECONDS, MAX_SECONDS)
        self._messages.append(_Large(now, now + patience, num_bytes, frames))
        while len(self._messages) > 1 and sum(each.num_bytes for each in self._messages) > MAX_LARGE_BYTES:
            self._messages.popleft()

    def free(self, now: float) -> None:
        """Forget those that have arrived."""
        while self._messages and self._messages[0].arrived_at < now:
            self._messages.popleft()

    def take_lost(self, broken_at: float) -> list[Sequence[Buffer]]:
        """As `RecentMessages.sent_between`, but forgets them: `add` those that are sent again."""
        lost = [each for each in self._messages if each.sent_at <= broken_at <= each.arrived_at]
        self._messages = deque(each for each in self._messages if each.sent_at > broken_at)
        return [each.frames for each in lost]
