"""What one key may use of a server at once: requests, memory, and starts per second. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from hearth.errors import FrameTooLarge, QueueFull
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES, MAX_PAYLOAD_FRAMES

# Bytes of a message that cost as much as one request does without them: both take about 0.1 ms to decode.
_BYTES_PER_TOKEN = 64 << 10


MAX_REQUESTS_PER_CALLER = 256  # in progress, which bounds the memory; a further one is answered with QueueFull


class Limits(NamedTuple):
    """The limits of one key. Without arguments: those of a peer that is trusted with the home key."""

    requests: int = MAX_REQUESTS_PER_CALLER  # in progress
    total_bytes: int = MAX_PAYLOAD_FRAMES * MAX_PAYLOAD_FRAME_BYTES  # of all requests in progress
    request_bytes: int = MAX_PAYLOAD_FRAMES * MAX_PAYLOAD_FRAME_BYTES  # of one request
    per_second: float = math.inf  # requests that may start, in the long run
    burst: float = 1.0  # requests that may start at once


class Quota:
    """What one key uses at present: a token bucket, and the requests in progress with their bytes."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_bytes = 0
        self._tokens = math.inf  # below 0: requests that wait for their start
        self._counted_at = 0.0

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
        gained = (now - self._counted_at) * limits.per_second
        self._tokens = min(limits.burst, self._tokens + gained) - 1 - message_bytes / _BYTES_PER_TOKEN
        self._counted_at = now
        return max(0.0, -self._tokens / limits.per_second)

    def leave(self, num_bytes: int) -> None:
        """A request has ended."""
        self.num_requests -= 1
        self.num_bytes -= num_bytes
