"""The requests of all clients between the port and the coordinator: what is refused, waits, runs, or is answered. Pure.

`ClientRequests` gets each message with the time, and returns what to send. Of frames it reads only what `Intake` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgpack

from coordinator.port import protocol
from coordinator.port.access import Access, MessageRule, PortRules
from hearth.errors import HearthError, QueueFull
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire.intake import Begin, End, Intake, Refuse


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
    tag: str
    num_bytes: int
    waiting: Sequence[Any] | None = None  # its frames, until its start


class ClientRequests:
    """All requests. `note_refusal(reason, public_key)` is called for each message that is refused."""

    def __init__(
        self, rules: Mapping[str, MessageRule], access: Access, note_refusal: Callable[[str, str], None]
    ) -> None:
        self._note_refusal = note_refusal
        self._requests: dict[bytes, _Request] = {}  # keyed by number
        self._numbers: dict[tuple[bytes, bytes], bytes] = {}  # keyed by connection and request id
        self._rules = PortRules(rules, access)
        self._intake = Intake(self._rules, self._numbers)
        self._starts: list[tuple[float, bytes]] = []  # a heap of times and numbers; some have been dropped
        self._last_number = 0

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests)

    @property
    def next_start(self) -> float | None:
        """The time of the next start of a request; None if none waits."""
        return self._starts[0][0] if self._starts else None

    def admits(self, public_key: str) -> bool:
        """Whether a key passes the handshake now."""
        return self._rules.access.admits(public_key)

    def receive(self, frames: Sequence[Any], public_key: str, now: float) -> list[Action]:
        """A message of a client: `[connection, request id, body, payload...]`."""
        match self._intake.receive(frames, public_key, now):
            case Begin(identity, request_id, tag, num_bytes, delay_seconds):
                self._last_number += 1
                number = self._last_number.to_bytes(protocol.NUMBER_BYTES, "big")
                request = _Request(identity, request_id, public_key, tag, num_bytes)
                self._requests[number] = request
                self._numbers[identity, request_id] = number
                if not delay_seconds:
                    return [_forward(number, public_key, frames[2:])]
                request.waiting = frames[2:]
                heapq.heappush(self._starts, (now + delay_seconds, number))
            case End(identity, request_id, is_final):
                number = self._numbers[identity, request_id]
                return self._drop(number, protocol.GIVE_UP if is_final else protocol.CANCEL)
            case Refuse(reason, error, ends_connection):
                if reason:
                    self._note_refusal(reason, public_key)
                identity = frames[0].bytes
                if ends_connection:
                    return [Disconnect(frames[-1]), *self.gone(identity)]
                if error is not None:
                    return [Send(identity, [identity, frames[1].bytes, encode_failed(error)])]
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
        try:
            self._intake.hold(request.public_key, num_bytes)
        except QueueFull as error:
            self._note_refusal("an answer while too many are unread", request.public_key)
            failure = Send(request.identity, [*head, encode_failed(error)])
            return [failure, *([] if is_last else self._drop(number))]
        next_number = None if is_last else number
        return [Send(request.identity, [*head, *frames[2:]], request.public_key, num_bytes, next_number)]

    def left(self, sent: Send) -> list[Action]:
        """A large answer has left, or was dropped."""
        self._intake.release(sent.public_key, sent.num_bytes)
        return [Forward([protocol.LEFT, sent.number])] if sent.number in self._requests else []

    def gone(self, identity: bytes) -> list[Action]:
        """A connection has ended, or its client no longer reads."""
        numbers = [number for number, request in self._requests.items() if request.identity == identity]
        return [action for number in numbers for action in self._drop(number)]

    def change_access(self, access: Access) -> list[Action]:
        """Replace the rules. Requests that wait are refused if they are no longer allowed; the coordinator ends the others."""
        self._rules.access = access
        actions: list[Action] = []
        for number, request in list(self._requests.items()):
            if request.waiting is None:
                continue
            try:
                self._rules.check(request.public_key, request.tag)
            except HearthError as error:
                self._note_refusal(error.code, request.public_key)
                self._remove(number)
                actions.append(Send(request.identity, [request.identity, request.request_id, encode_failed(error)]))
        return actions

    def _drop(self, number: bytes, kind: bytes = protocol.CANCEL) -> list[Action]:
        """Forget a request whose caller no longer waits."""
        request = self._remove(number)
        return [] if request.waiting is not None else [Forward([kind, number])]

    def _remove(self, number: bytes) -> _Request:
        request = self._requests.pop(number)
        key = (request.identity, request.request_id)
        if self._numbers.get(key) == number:  # not a later request with the same id
            del self._numbers[key]
        self._intake.leave(request.public_key, request.num_bytes)
        return request


def encode_failed(error: HearthError) -> bytes:
    """The answer `Failed`, as `hearth.wire.messages` encodes it."""
    fields = {"v": PROTOCOL_VERSION, "t": "failed", "code": error.code, "details": error.details()}
    data: bytes = msgpack.packb({**fields, "scope": error.scope}, use_bin_type=True)
    return data


def _forward(number: bytes, public_key: str, frames: Sequence[Any]) -> Forward:
    return Forward([protocol.REQUEST, number, public_key.encode(), *frames])
