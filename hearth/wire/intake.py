"""The admission of requests: which messages of a caller begin or cancel one, and which are refused. Pure.

All limits of a server's callers are here: requests and bytes in progress, starts per second, memory that several keys share,
and floods of messages that no request comes of. Frames are opaque, except for a request's head: they need a length, and
`bytes` and `buffer` as those of ZeroMQ have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import msgpack

from hearth.errors import BadMessage, FrameTooLarge, HearthError, QueueFull
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES, MAX_PAYLOAD_FRAMES
from hearth.wire.envelope import NOT_MSGPACK, message_tag

ID_BYTES = 8  # length of a request id, a counter from 1 on that never wraps
_MAX_CANCEL_BYTES = 64  # of a `Cancel`, which holds a request id and a flag

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


class Pool(NamedTuple):
    """Memory that several keys share: one half is divided equally among them, the other half is for all."""

    total_bytes: int
    num_keys: int


class Rules(ABC):
    """Who may send what to a server, and how much of it."""

    any_version: Container[str] = ()  # tags of the messages that a peer of another protocol version may send

    @abstractmethod
    def check(self, public_key: str, tag: str) -> None:
        """Raise the error that answers a message which this key may not send."""

    @abstractmethod
    def limits_of(self, public_key: str) -> Limits:
        """The limits of a key."""

    def revocation(self, public_key: str) -> HearthError | None:
        """The error that answers each message of a key that may do nothing."""
        return None

    def pool_of(self, public_key: str) -> Pool | None:
        """The memory that this key shares with others; None: it has its own (`Limits.total_bytes`)."""
        return None


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


class _Quota:
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

    def leave(self, num_bytes: int) -> None:
        """A request has ended."""
        self.num_requests -= 1
        self.num_bytes -= num_bytes


class _EndedConnections:
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


class Begin(NamedTuple):
    """Begin a request, `delay_seconds` from now. `Intake.leave` must be called once it has ended."""

    identity: bytes  # of the connection
    request_id: bytes
    tag: str
    num_bytes: int
    delay_seconds: float


class End(NamedTuple):
    """End a request that is in progress, because its caller has cancelled it. `is_final`: as in `Cancel`."""

    identity: bytes
    request_id: bytes
    is_final: bool


class Refuse(NamedTuple):
    """Answer a message with the error, or end its connection with all requests of that."""

    reason: str  # for the log; empty: a cancellation of nothing
    error: HearthError | None  # None: a message that cannot be answered
    ends_connection: bool


class Intake:
    """Decides about each message `[connection, request id, body, payload...]` of all callers of a server.

    `in_progress` holds the connection and the id of each request that has begun and not ended.
    """

    def __init__(self, rules: Rules, in_progress: Container[tuple[bytes, bytes]]) -> None:
        self.rules = rules
        self._in_progress = in_progress
        self._quotas: defaultdict[str, _Quota] = defaultdict(_Quota)  # by public key; only admitted ones get here
        self._ended = _EndedConnections()

    def receive(self, frames: Sequence[Any], public_key: str, now: float) -> Begin | End | Refuse | None:
        """What to do about a message; None: nothing."""
        if not frames or self._ended.has(frames[0].bytes, now):
            return None
        if len(frames) < 3 or len(frames[1]) != ID_BYTES:
            return self._refuse("a message that is no request", None, frames, public_key, now)
        identity, request_id = frames[0].bytes, frames[1].bytes
        try:
            if (revoked := self.rules.revocation(public_key)) is not None:
                raise revoked
            if len(frames) - 3 > MAX_PAYLOAD_FRAMES:
                raise BadMessage(reason=f"{len(frames) - 3} payload frames, at most {MAX_PAYLOAD_FRAMES} are allowed")
            tag = message_tag(frames[2].buffer, self.rules.any_version)
            if tag == "cancel":
                cancelled, is_final = _cancelled(frames[2].buffer)
                if (identity, cancelled) in self._in_progress:
                    return End(identity, cancelled, is_final)
                refusal = self._refuse("", None, frames, public_key, now)  # answered meanwhile, or never asked
                return refusal if refusal.ends_connection else None
            self.rules.check(public_key, tag)
            num_bytes = sum(map(len, frames))
            quota, limits = self._quotas[public_key], self.rules.limits_of(public_key)
            if num_bytes <= limits.request_bytes and not self.has_room(public_key, num_bytes):
                raise QueueFull(limit=quota.num_requests)
            delay_seconds = quota.enter(limits, num_bytes, len(frames[2]), now)
        except HearthError as error:
            return self._refuse(error.code, error, frames, public_key, now)
        return Begin(identity, request_id, tag, num_bytes, delay_seconds)

    def leave(self, public_key: str, num_bytes: int) -> None:
        """A request of this key has ended."""
        self._quotas[public_key].leave(num_bytes)

    def hold(self, public_key: str, num_bytes: int) -> None:
        """Count an answer until it has left. Raises QueueFull, and counts nothing then."""
        quota = self._quotas[public_key]
        if not self.has_room(public_key, num_bytes):
            raise QueueFull(limit=quota.num_requests)
        quota.unread_bytes += num_bytes

    def release(self, public_key: str, num_bytes: int) -> None:
        """An answer that was counted has left."""
        self._quotas[public_key].unread_bytes -= num_bytes

    def has_room(self, public_key: str, num_bytes: int) -> bool:
        """Whether there is room for these bytes: in the pool of the key, so that others cannot use up its part.

        Without a pool, only the unread answers of the key are counted here.
        """
        own, pool = self._quotas[public_key], self.rules.pool_of(public_key)
        if pool is None:
            return own.unread_bytes + num_bytes <= self.rules.limits_of(public_key).total_bytes
        half = pool.total_bytes // 2
        share = half // max(pool.num_keys, 1)
        others = sum(
            max(quota.num_bytes + quota.unread_bytes - share, 0)
            for key, quota in self._quotas.items()
            if key != public_key and self.rules.pool_of(key) is not None
        )
        return others + max(own.num_bytes + own.unread_bytes + num_bytes - share, 0) <= half

    def _refuse(
        self, reason: str, error: HearthError | None, frames: Sequence[Any], public_key: str, now: float
    ) -> Refuse:
        """Count a message that no request comes of. It ends its connection if the key has sent too many of them."""
        is_revoked = self.rules.revocation(public_key) is not None
        if self._quotas[public_key].answers_refusal(now, is_revoked):
            return Refuse(reason, error, ends_connection=False)
        # ZeroMQ would hold all that we do not read in time.
        self._ended.add(frames[0].bytes, now)
        return Refuse(reason, error, ends_connection=True)


def _cancelled(data: memoryview) -> tuple[bytes, bool]:
    """The request id in a `Cancel`, and whether it is final. Raises BadMessage."""
    if len(data) <= _MAX_CANCEL_BYTES:
        try:
            fields = msgpack.unpackb(data)
            if isinstance(fields, dict) and isinstance(request := fields.get("request"), bytes):
                return request, fields.get("final") is True
        except NOT_MSGPACK:
            pass
    raise BadMessage(reason="a cancellation that names no request")
