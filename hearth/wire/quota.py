"""What one key may use of a server at once: requests, memory, and starts per second. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from hearth.errors import FrameTooLarge, QueueFull
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES, MAX_PAYLOAD_FRAMES

# Bytes of a message that cost as much as one request does without them: both take about 0.1 ms to decode.
_BYTES_PER_TOKEN = 64 << 10
# Refused requests of one key that are answered: all of a program that sends a few thousand at once. In a flood, the answers
# would cost as much time as the requests.
_REFUSALS_PER_SECOND = 200.0
_REFUSAL_BURST = 4096.0
# The same for a key that may do nothing: enough for the threads of a program to learn why.
_REVOKED_PER_SECOND = 5.0
_REVOKED_BURST = 50.0
MAX_REQUESTS_PER_CALLER = 256  # in progress, which bounds the memory; a further one is answered with QueueFull
# Messages of a connection that was ended are dropped for this long: ZeroMQ hands over those that it had received within
# milliseconds.
_ENDED_SECONDS = 1.0


class Limits(NamedTuple):
    """The limits of one key. Without arguments: those of a peer that is trusted with the home key."""

    requests: int = MAX_REQUESTS_PER_CALLER  # in progress
    total_bytes: int = MAX_PAYLOAD_FRAMES * MAX_PAYLOAD_FRAME_BYTES  # of all requests in progress
    request_bytes: int = MAX_PAYLOAD_FRAMES * MAX_PAYLOAD_FRAME_BYTES  # of one request
    per_second: float = math.inf  # requests that may start, in the long run
    burst: float = 1.0  # requests that may start at once


class _Bucket:
    """A token bucket: tokens come at a rate, up to `burst`. Below 0, takers wait."""

    def __init__(self) -> None:
        self._tokens = math.inf
        self._counted_at = 0.0

    def take(self, num_tokens: float, per_second: float, burst: float, now: float) -> float:
        """Take tokens. Returns the seconds until all of them are there."""
        gained = (now - self._counted_at) * per_second
        self._tokens = min(burst, self._tokens + gained) - num_tokens
        self._counted_at = now
        return max(0.0, -self._tokens / per_second)

    def give_back(self, num_tokens: float) -> None:
        """Return tokens that were taken."""
        self._tokens += num_tokens


class Quota:
    """What one key uses at present: the requests in progress with their bytes, and two token buckets."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_bytes = 0
        self.unread_bytes = 0  # of answers; limited by servers that count them
        self._starts = _Bucket()
        self._refusals = _Bucket()

    def enter(self, limits: Limits, num_bytes: int, message_bytes: int, now: float) -> float:
        """Count a request of `num_bytes`, of which `message_bytes` must be decoded. Returns the seconds until it may start.

        Raises FrameTooLarge or QueueFull, and counts nothing then.
        """
        if num_bytes > limits.request_bytes:
            raise FrameTooLarge(num_bytes=num_bytes, cap_bytes=limits.request_bytes)
        if self.num_requests >= limits.requests:
            raise QueueFull(limit=limits.requests)
        if self.num_requests and self.num_bytes + num_bytes > limits.total_bytes:
            raise QueueFull(limit=self.num_requests)
        self.num_requests += 1
        self.num_bytes += num_bytes
        if limits.per_second == math.inf:
            return 0.0
        return self._starts.take(1 + message_bytes / _BYTES_PER_TOKEN, limits.per_second, limits.burst, now)

    def answers_refusal(self, now: float, is_revoked: bool = False) -> bool:
        """Whether one more refusal of this key is answered; in a flood, it is not."""
        rate, burst = (_REVOKED_PER_SECOND, _REVOKED_BURST) if is_revoked else (_REFUSALS_PER_SECOND, _REFUSAL_BURST)
        if self._refusals.take(1, rate, burst, now) == 0.0:
            return True
        self._refusals.give_back(1)
        return False

    def hold(self, num_bytes: int) -> None:
        """Count the bytes of an answer that has not left yet."""
        self.unread_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Such an answer has left."""
        self.unread_bytes -= num_bytes

    def leave(self, num_bytes: int) -> None:
        """A request has ended."""
        self.num_requests -= 1
        self.num_bytes -= num_bytes


class EndedConnections:
    """Connections that were ended lately. What had been received of them is dropped, since reading it would cost as before."""

    def __init__(self) -> None:
        self._ended: dict[bytes, float] = {}  # by identity; the latest last

    def add(self, identity: bytes, now: float) -> None:
        """A connection is ended."""
        while self._ended and next(iter(self._ended.values())) < now - _ENDED_SECONDS:
            del self._ended[next(iter(self._ended))]
        self._ended[identity] = now

    def has(self, identity: bytes, now: float) -> bool:
        """Whether this connection was ended lately."""
        return now - self._ended.get(identity, -math.inf) < _ENDED_SECONDS
