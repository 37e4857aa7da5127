"""The requests of all clients between the port and the coordinator: what is refused, waits, runs, or is answered. Pure.

`ClientRequests` gets each message with the time, and returns what to send. Frames are opaque, except for a request's head: they
need a length, and `bytes` and `buffer` as those of ZeroMQ have.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgpack

from coordinator.port import protocol
from coordinator.port.access import Access, MessageRule
from hearth.errors import AppRevoked, BadMessage, HearthError, QueueFull, UnknownMessage
from hearth.protocol import MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION
from hearth.wire.envelope import NOT_MSGPACK, message_tag
from hearth.wire.quota import EndedConnections, Quota

_REQUEST_ID_BYTES = 8  # as in `hearth.wire.rpc`
_MAX_CANCEL_BYTES = 64  # of a `Cancel`, which holds a request id and a flag


class Forward(NamedTuple):
    """Send these frames to the coordinator."""

    frames: Sequence[Any]


class Send(NamedTuple):
    """Send these frames to a client."""

    identity: bytes  # of the connection
    frames: Sequence[Any]
    public_key: str = ""
    num_bytes: int = 0  # that count until they have left; 0: a small answer
    number: bytes | None = None  # of the stream that goes on once they have left


class Disconnect(NamedTuple):
    """End the connection on which this frame came."""

    frame: Any


Action: TypeAlias = Forward | Send | Disconnect


@dataclass(eq=False)
class _Request:
    """A request that waits or runs."""

    identity: bytes
    request_id: bytes
    public_key: str
    rule: MessageRule
    num_bytes: int
    waiting: Sequence[Any] | None = None  # its frames, until its start


class ClientRequests:
    """All requests. `note_refusal(reason, public_key)` is called for each message that is refused."""

    def __init__(
        self, rules: Mapping[str, MessageRule], access: Access, note_refusal: Callable[[str, str], None]
    ) -> None:
        self.access = access
        self._rules = rules
        self._any_version = frozenset(tag for tag, rule in rules.items() if rule.any_version)
        self._note_refusal = note_refusal
        self._requests: dict[bytes, _Request] = {}  # keyed by number
        self._numbers: dict[tuple[bytes, bytes], bytes] = {}  # keyed by connection and request id
        self._starts: list[tuple[float, bytes]] = []  # a heap of times and numbers; some have been dropped
        self._quotas: defaultdict[str, Quota] = defaultdict(Quota)  # keyed by public key; only admitted ones get here
        self._ended = EndedConnections()
        self._last_number = 0

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests)

    @property
    def next_start(self) -> float | None:
        """The time of the next start of a request; None if none waits."""
        return self._starts[0][0] if self._starts else None

    def receive(self, frames: Sequence[Any], public_key: str, now: float) -> list[Action]:
        """A message of a client: `[connection, request id, body, payload...]`."""
        if frames and self._ended.has(frames[0].bytes, now):
            return []
        if len(frames) < 3 or len(frames[1]) != _REQUEST_ID_BYTES:
            return self._refuse("a message that is no request", frames, public_key, now)
        identity, request_id = frames[0].bytes, frames[1].bytes
        if (app := self.access.revoked.get(public_key)) is not None:
            return self._refuse(AppRevoked(app=app), frames, public_key, now)
        try:
            if len(frames) - 3 > MAX_PAYLOAD_FRAMES:
                raise BadMessage(reason=f"{len(frames) - 3} payload frames, at most {MAX_PAYLOAD_FRAMES} are allowed")
            tag = message_tag(frames[2].buffer, self._any_version)
            if tag == "cancel":
                cancelled, is_final = _cancelled(frames[2].buffer)
                number = self._numbers.get((identity, cancelled))
                if number is not None:
                    return self._drop(number, protocol.GIVE_UP if is_final else protocol.CANCEL)
                return self._end_flood(frames, public_key, now)  # it was answered meanwhile, or there never was one
            if (rule := self._rules.get(tag)) is None:
                raise UnknownMessage(tag=tag[:64])
            self.access.authorise(public_key, rule)
            num_bytes = sum(map(len, frames))
            quota = self._quotas[public_key]
            if not self._has_room(public_key, num_bytes):
                raise QueueFull(limit=quota.num_requests)
            delay = quota.enter(self.access.limits(public_key), num_bytes, len(frames[2]), now)
        except HearthError as error:
            return self._refuse(error, frames, public_key, now)
        self._last_number += 1
        number = self._last_number.to_bytes(protocol.NUMBER_BYTES, "big")
        request = self._requests[number] = _Request(identity, request_id, public_key, rule, num_bytes)
        self._numbers[identity, request_id] = number
        if not delay:
            return [_forward(number, public_key, frames[2:])]
        request.waiting = frames[2:]
        heapq.heappush(self._starts, (now + delay, number))
        return []

    def start_due(self, now: float) -> list[Action]:
        """Start the requests that have waited long enough."""
        actions: list[Action] = []
        while self._starts and self._starts[0][0] <= now:
            number = heapq.heappop(self._starts)[1]
            request = self._requests.get(number)
            if request is not None and request.waiting is not None:
                actions.append(_forward(number, request.public_key, request.waiting))
                request.waiting = None
        return actions

    def answer(self, frames: Sequence[Any]) -> list[Action]:
        """A message of the coordinator about a request: an answer, or `END`."""
        kind, number = frames[0].bytes, frames[1].bytes
        request = self._requests.get(number)
        if request is None:
            return []  # the caller no longer waits
        is_last = kind in (protocol.LAST_ANSWER, protocol.END)
        if is_last:
            self._remove(number)
        if kind == protocol.END:
            return []
        head = [request.identity, request.request_id]
        num_bytes = sum(map(len, frames))
        if kind == protocol.ANSWER or (is_last and num_bytes < protocol.LARGE_ANSWER_BYTES):
            return [Send(request.identity, [*head, *frames[2:]])]
        quota = self._quotas[request.public_key]
        if not self._has_room(request.public_key, num_bytes):
            self._note_refusal("an answer while too many are unread", request.public_key)
            failure = encode_failed(QueueFull(limit=quota.num_requests))
            return [Send(request.identity, [*head, failure]), *([] if is_last else self._drop(number))]
        quota.hold(num_bytes)
        next_number = None if is_last else number
        return [Send(request.identity, [*head, *frames[2:]], request.public_key, num_bytes, next_number)]

    def left(self, sent: Send) -> list[Action]:
        """A large answer has left, or was dropped."""
        self._quotas[sent.public_key].release(sent.num_bytes)
        return [Forward([protocol.LEFT, sent.number])] if sent.number in self._requests else []

    def gone(self, identity: bytes) -> list[Action]:
        """A connection has ended, or its client no longer reads."""
        numbers = [number for number, request in self._requests.items() if request.identity == identity]
        return [action for number in numbers for action in self._drop(number)]

    def change_access(self, access: Access) -> list[Action]:
        """Replace the rules. Requests that wait are refused if they are no longer allowed; the coordinator ends the others."""
        self.access = access
        actions: list[Action] = []
        for number, request in list(self._requests.items()):
            if request.waiting is None:
                continue
            try:
                access.authorise(request.public_key, request.rule)
            except HearthError as error:
                self._note_refusal(error.code, request.public_key)
                self._remove(number)
                actions.append(Send(request.identity, [request.identity, request.request_id, encode_failed(error)]))
        return actions

    def _refuse(self, reason: HearthError | str, frames: Sequence[Any], public_key: str, now: float) -> list[Action]:
        """Answer a message with an error, or leave it unanswered if the reason is a text. In a flood, end its connection."""
        self._note_refusal(reason if isinstance(reason, str) else reason.code, public_key)
        ending = self._end_flood(frames, public_key, now)
        if ending or isinstance(reason, str):
            return ending
        identity = frames[0].bytes
        return [Send(identity, [identity, frames[1].bytes, encode_failed(reason)])]

    def _end_flood(self, frames: Sequence[Any], public_key: str, now: float) -> list[Action]:
        """Count a message that no request comes of. Ends its connection if the key has sent too many of them."""
        if self._quotas[public_key].answers_refusal(now, public_key in self.access.revoked):
            return []
        identity = frames[0].bytes
        self._ended.add(identity, now)
        return [Disconnect(frames[-1]), *self.gone(identity)]

    def _has_room(self, public_key: str, num_bytes: int) -> bool:
        """Whether there is room for these bytes: of an administrator's answers, or of an app's requests and answers.

        Half of the apps' memory is divided equally among them, so that others cannot use up an app's part; the rest is for all.
        """
        own = self._quotas[public_key]
        if public_key in self.access.admins:
            return own.unread_bytes + num_bytes <= self.access.admin_limits.total_bytes
        half = self.access.app_bytes // 2
        share = half // max(len(self.access.apps), 1)
        others = sum(
            max(quota.num_bytes + quota.unread_bytes - share, 0)
            for key, quota in self._quotas.items()
            if key != public_key and key not in self.access.admins
        )
        return others + max(own.num_bytes + own.unread_bytes + num_bytes - share, 0) <= half

    def _drop(self, number: bytes, kind: bytes = protocol.CANCEL) -> list[Action]:
        """Forget a request whose caller no longer waits."""
        request = self._remove(number)
        return [] if request.waiting is not None else [Forward([kind, number])]

    def _remove(self, number: bytes) -> _Request:
        request = self._requests.pop(number)
        key = (request.identity, request.request_id)
        if self._numbers.get(key) == number:  # not a later request with the same id
            del self._numbers[key]
        self._quotas[request.public_key].leave(request.num_bytes)
        return request


def encode_failed(error: HearthError) -> bytes:
    """The answer `Failed`, as `hearth.wire.messages` encodes it."""
    fields = {"v": PROTOCOL_VERSION, "t": "failed", "code": error.code, "details": error.details()}
    data: bytes = msgpack.packb({**fields, "scope": error.scope}, use_bin_type=True)
    return data


def _forward(number: bytes, public_key: str, frames: Sequence[Any]) -> Forward:
    return Forward([protocol.REQUEST, number, public_key.encode(), *frames])


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
