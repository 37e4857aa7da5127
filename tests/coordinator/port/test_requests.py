"""Requests of clients at the client port: roles, limits, starts, answers, cancellation and changes of access."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from coordinator.port import protocol
from coordinator.port.access import Access, MessageRule
from coordinator.port.requests import Action, ClientRequests, Disconnect, Forward, Send, encode_failed
from hearth import errors
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire.intake import Limits
from hearth.wire.messages import AddApp, Cancel, Failed, GetReadiness, decode, encode

ADMIN, APP, OTHER = "admin", "app", "other"
RULES = {
    "get_readiness": MessageRule("GetReadiness", roles=["app"], any_version=False),
    "add_app": MessageRule("AddApp", roles=[], any_version=False),
}
LIMITS = Limits(requests=4, total_bytes=100_000, request_bytes=50_000)
ACCESS = Access(
    admins=[ADMIN], apps={APP: "lamp", OTHER: "door"}, revoked={}, roles={}, app_limits=LIMITS,
    admin_limits=LIMITS._replace(total_bytes=400_000), app_bytes=120_000,
)  # fmt: skip
READINESS = encode(GetReadiness())


class Plane(ClientRequests):
    """The requests of a port that notes refusals."""

    def __init__(self, access: Access = ACCESS) -> None:
        self.refused: list[str] = []
        super().__init__(RULES, access, lambda reason, public_key: self.refused.append(f"{reason} {public_key}"))

    def ask(
        self, key: str = APP, number: int = 1, body: bytes = READINESS, payload: Sequence[bytes] = (), now: float = 0.0
    ) -> list[Action]:
        identity = key.encode()
        return self.receive(frames(identity, request_id(number), body, *payload), key, now)

    def reply(self, kind: bytes, number: bytes, *rest: bytes) -> list[Action]:
        return self.answer(frames(kind, number, *rest))


def frames(*parts: bytes) -> list[zmq.Frame]:
    return [zmq.Frame(part) for part in parts]


def request_id(number: int) -> bytes:
    return number.to_bytes(8, "little")


def content(part: object) -> bytes:
    return part.bytes if isinstance(part, zmq.Frame) else bytes(part)  # type: ignore[call-overload,no-any-return]


def number_of(actions: list[Action]) -> bytes:
    """The number of the one request that was forwarded."""
    (forward,) = actions
    assert isinstance(forward, Forward)
    assert forward.frames[0] == protocol.REQUEST
    return content(forward.frames[1])


def failure(actions: list[Action]) -> errors.HearthError:
    """The error of the one answer."""
    (sent,) = actions
    assert isinstance(sent, Send)
    message = decode(content(sent.frames[-1]))
    assert isinstance(message, Failed)
    return message.error()


def test_request_is_forwarded_with_the_key_and_its_answer_goes_back() -> None:
    plane = Plane()
    (forward,) = plane.ask(payload=[b"x"])
    assert isinstance(forward, Forward)
    assert [content(part) for part in forward.frames] == [
        protocol.REQUEST, content(forward.frames[1]), b"app", READINESS, b"x"
    ]  # fmt: skip
    number = content(forward.frames[1])
    (first,) = plane.reply(protocol.ANSWER, number, b"one")
    (last,) = plane.reply(protocol.LAST_ANSWER, number, b"two", b"y")
    assert isinstance(first, Send)
    assert isinstance(last, Send)
    assert [content(part) for part in first.frames] == [b"app", request_id(1), b"one"]
    assert [content(part) for part in last.frames] == [b"app", request_id(1), b"two", b"y"]
    assert plane.num_requests == 0
    assert plane.reply(protocol.LAST_ANSWER, number, b"late") == []


def test_messages_of_a_revoked_app_are_not_read_and_many_end_its_connection() -> None:
    plane = Plane(ACCESS._replace(apps={}, revoked={APP: "lamp"}))
    answers = [plane.ask(number=number, body=b"\xc1") for number in range(60)]
    assert isinstance(failure(answers[0]), errors.AppRevoked)
    assert [[type(action) for action in actions] for actions in answers] == [[Send]] * 50 + [[Disconnect]] + [[]] * 9
    assert isinstance(failure(plane.receive(frames(b"new", request_id(1), READINESS), APP, 1.0)), errors.AppRevoked)
    assert len(plane.refused) == 52


def test_flood_ends_its_connection_with_all_requests_of_that() -> None:
    plane = Plane()
    running = number_of(plane.ask())
    other = number_of(plane.ask(OTHER))
    floods = [plane.ask(number=number, body=b"\xc1", now=10.0) for number in range(2, 5000)]
    end = next(actions for actions in floods if not isinstance(actions[0], Send))
    assert [type(action) for action in end] == [Disconnect, Forward]
    assert isinstance(cancel := end[1], Forward)
    assert [content(part) for part in cancel.frames] == [protocol.CANCEL, running]
    assert floods[-1] == []  # what had been received already
    assert plane.num_requests == 1
    (answer,) = plane.reply(protocol.LAST_ANSWER, other, b"x")
    assert isinstance(answer, Send)
    number_of(plane.receive(frames(b"new connection", request_id(1), READINESS), APP, 10.0))
    number_of(plane.ask(now=12.0))  # a client that chose its connection's name may use it again


def test_flood_of_messages_that_are_no_requests_ends_its_connection() -> None:
    plane = Plane()
    floods = [plane.receive(frames(b"a", b"1"), APP, 0.0) for _ in range(5000)]
    assert [type(action) for actions in floods for action in actions] == [Disconnect]


def test_flood_of_cancellations_of_nothing_ends_its_connection() -> None:
    plane = Plane()
    cancel = encode(Cancel(request=request_id(1)))
    assert plane.ask(number=2, body=cancel) == []  # its request was answered meanwhile
    floods = [plane.ask(number=number, body=cancel) for number in range(3, 5000)]
    assert [type(action) for actions in floods for action in actions] == [Disconnect]
    assert plane.refused == []


@pytest.mark.parametrize(
    ("key", "body", "expected"),
    [
        (APP, encode(AddApp(name="x", public_key="0" * 40)), errors.NotAuthorised),
        ("stranger", READINESS, errors.NotAuthorised),
        ("former", READINESS, errors.AppRevoked),
        (APP, encode(Cancel(request=b"12345678")).replace(b"cancel", b"foobar"), errors.UnknownMessage),
        (APP, b"\xc1", errors.BadMessage),
        (APP, READINESS.replace(b"\xa1v" + bytes([PROTOCOL_VERSION]), b"\xa1v\x7f"), errors.ProtocolMismatch),
    ],
)
def test_refused_messages_are_answered_and_not_forwarded(
    key: str, body: bytes, expected: type[errors.HearthError]
) -> None:
    plane = Plane(ACCESS._replace(revoked={"former": "old lamp"}))
    assert isinstance(failure(plane.ask(key, body=body)), expected)
    assert len(plane.refused) == 1
    assert plane.num_requests == 0


def test_malformed_messages_get_no_answer() -> None:
    plane = Plane()
    assert plane.receive(frames(b"a", b"12345678"), APP, 0.0) == []
    assert plane.receive(frames(b"a", b"1", READINESS), APP, 0.0) == []
    assert len(plane.refused) == 2


def test_requests_of_a_key_are_limited_in_number_and_size() -> None:
    plane = Plane()
    for number in range(4):
        number_of(plane.ask(number=number))
    assert isinstance(failure(plane.ask(number=4)), errors.QueueFull)
    number_of(plane.ask(OTHER, number=4))
    assert isinstance(failure(plane.ask(OTHER, number=5, payload=[bytes(60_000)])), errors.FrameTooLarge)


def test_one_app_leaves_the_others_their_part_of_the_memory() -> None:
    """60,000 of the 120,000 bytes are for all, and 30,000 for each app."""
    plane = Plane()
    for number in range(2):
        number_of(plane.ask(number=number, payload=[bytes(44_000)]))
    assert isinstance(failure(plane.ask(number=2, payload=[bytes(10_000)])), errors.QueueFull)
    number_of(plane.ask(OTHER, number=3, payload=[bytes(29_000)]))
    assert isinstance(failure(plane.ask(OTHER, number=4, payload=[bytes(10_000)])), errors.QueueFull)
    number_of(plane.ask(ADMIN, number=5, payload=[bytes(49_000)]))


def test_unread_answers_count_until_they_have_left() -> None:
    plane = Plane()
    streams = [number_of(plane.ask(number=number)) for number in range(3)]
    held = [plane.reply(protocol.LARGE_ANSWER, number, bytes(44_000))[0] for number in streams[:2]]
    assert isinstance(held[0], Send)
    assert isinstance(held[1], Send)
    assert held[0].num_bytes > 44_000
    refused, cancelled = plane.reply(protocol.LARGE_ANSWER, streams[2], bytes(44_000))
    assert isinstance(failure([refused]), errors.QueueFull)
    assert cancelled == Forward([protocol.CANCEL, streams[2]])
    assert plane.left(held[0]) == [Forward([protocol.LEFT, streams[0]])]
    plane.reply(protocol.END, streams[1])
    assert plane.left(held[1]) == []  # its stream has ended
    (more,) = plane.reply(protocol.LARGE_ANSWER, streams[0], bytes(44_000))
    assert isinstance(more, Send)


def test_requests_beyond_the_rate_start_later_and_in_order() -> None:
    plane = Plane(ACCESS._replace(app_limits=LIMITS._replace(per_second=10.0, burst=1.5)))
    number_of(plane.ask(number=1))
    assert plane.ask(number=2) == plane.ask(number=3) == []
    start = plane.next_start
    assert start is not None
    assert 0.04 < start < 0.06
    assert plane.start_due(0.0) == []
    first = plane.start_due(start)
    second = plane.start_due(1.0)
    assert number_of(first) < number_of(second)
    assert plane.next_start is None


def test_cancelled_request_is_forgotten_at_both_ends() -> None:
    plane = Plane(ACCESS._replace(app_limits=LIMITS._replace(per_second=10.0, burst=1.5)))
    running = number_of(plane.ask(number=1))
    plane.ask(number=2)
    assert plane.ask(number=8, body=encode(Cancel(request=request_id(2)))) == []  # it had not started
    assert plane.ask(number=9, body=encode(Cancel(request=request_id(1)))) == [Forward([protocol.CANCEL, running])]
    assert plane.ask(OTHER, number=10, body=encode(Cancel(request=request_id(1)))) == []
    plane.start_due(10.0)
    running = number_of(plane.ask(number=11, now=20.0))
    given_up = encode(Cancel(request=request_id(11), final=True))
    assert plane.ask(number=12, body=given_up, now=20.0) == [Forward([protocol.GIVE_UP, running])]
    assert plane.start_due(10.0) == []
    assert plane.num_requests == 0


def test_client_that_is_gone_ends_its_requests_only() -> None:
    plane = Plane()
    mine, others = number_of(plane.ask()), number_of(plane.ask(OTHER))
    assert plane.gone(b"app") == [Forward([protocol.CANCEL, mine])]
    assert plane.reply(protocol.LAST_ANSWER, others, b"x") != []


def test_waiting_request_of_a_key_that_is_revoked_never_starts() -> None:
    limited = ACCESS._replace(app_limits=LIMITS._replace(per_second=10.0, burst=1.5))
    plane = Plane(limited)
    number_of(plane.ask(number=1))
    plane.ask(number=2)
    actions = plane.change_access(limited._replace(apps={OTHER: "door"}, revoked={APP: "lamp"}))
    assert isinstance(failure(actions), errors.AppRevoked)
    assert plane.start_due(10.0) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "answer", "large", "end", "gone", "cancel"]), st.integers(0, 5)), max_size=60
    )
)
def test_no_counter_is_left_once_all_requests_have_ended(steps: list[tuple[str, int]]) -> None:
    plane, unread = Plane(), []
    forwarded: list[bytes] = []
    for kind, number in steps:
        key = (APP, OTHER)[number % 2]
        actions: list[Action] = []
        match kind:
            case "ask":
                actions = plane.ask(key, number, payload=[bytes(1000 * number)])
            case "cancel":
                actions = plane.ask(key, 99, body=encode(Cancel(request=request_id(number))))
            case "gone":
                actions = plane.gone(key.encode())
            case _ if forwarded:
                sent = {"answer": protocol.LAST_ANSWER, "large": protocol.LARGE_ANSWER, "end": protocol.END}[kind]
                actions = plane.reply(sent, forwarded[number % len(forwarded)], bytes(20_000))
        for action in actions:
            if isinstance(action, Send) and action.num_bytes:
                unread.append(action)
            elif isinstance(action, Forward) and action.frames[0] == protocol.REQUEST:
                forwarded.append(content(action.frames[1]))
    for send in unread:
        plane.left(send)
    for key in (APP, OTHER):
        plane.gone(key.encode())
    assert plane.num_requests == 0
    for key in (APP, OTHER):  # nothing is counted: each may fill its own part, and all of the common one
        parts = [frames(key.encode(), request_id(number), READINESS) for number in range(2)]
        for number, part in enumerate(parts):
            rest = bytes(45_000 - sum(map(len, part)))
            number_of(plane.ask(key, number, payload=[rest]))
        assert isinstance(failure(plane.ask(key, 2)), errors.QueueFull)
        plane.gone(key.encode())


@pytest.mark.parametrize(
    "error",
    [errors.QueueFull(limit=5), errors.DeviceLost(device="attic", reason="it is gone"), errors.AppRevoked(app="lamp")],
)
def test_failure_is_encoded_as_messages_are(error: errors.HearthError) -> None:
    assert encode_failed(error) == encode(Failed.of(error))
