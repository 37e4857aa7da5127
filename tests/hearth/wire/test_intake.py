"""Admission of requests: limits of one key, memory that keys share, floods, and messages that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from hearth.errors import AppRevoked, BadMessage, FrameTooLarge, HearthError, NotAuthorised, QueueFull
from hearth.protocol import MAX_PAYLOAD_FRAMES
from hearth.wire.intake import Begin, End, Intake, Limits, Pool, Refuse, Rules
from hearth.wire.messages import Cancel, Done, encode

LIMITS = Limits(requests=3, total_bytes=1000, request_bytes=600)
MANY = Limits(requests=10_000)
DONE = encode(Done())
HEAD_BYTES = len(b"key") + 8 + len(DONE)  # of a request without a payload


class TestRules(Rules):
    __test__ = False

    def __init__(self, limits: Limits = MANY, pool: Pool | None = None) -> None:
        self._limits, self._pool = limits, pool

    def check(self, public_key: str, tag: str) -> None:
        if tag != "done":
            raise NotAuthorised(role="none", action=tag)

    def limits_of(self, public_key: str) -> Limits:
        return self._limits

    def revocation(self, public_key: str) -> HearthError | None:
        return AppRevoked(app="lamp") if public_key == "revoked" else None

    def pool_of(self, public_key: str) -> Pool | None:
        return self._pool


class Server(Intake):
    """Requests of callers that have one connection each, named as their key."""

    def __init__(self, limits: Limits = MANY, pool: Pool | None = None) -> None:
        self.running: set[tuple[bytes, bytes]] = set()
        super().__init__(TestRules(limits, pool), self.running)

    def ask(self, payload_bytes: int = 0, now: float = 0.0, key: str = "key", body: bytes = DONE) -> Any:
        payload = [bytes(payload_bytes)] if payload_bytes else []
        return self.receive(message(key, body, *payload), key, now)


def message(key: str, *parts: bytes, request: int = 1) -> list[zmq.Frame]:
    return [zmq.Frame(each) for each in (key.encode(), request.to_bytes(8, "little"), *parts)]


def delays(outcomes: Sequence[Any]) -> list[float]:
    assert all(isinstance(each, Begin) for each in outcomes), outcomes
    return [each.delay_seconds for each in outcomes]


def error(outcome: Any) -> type[HearthError]:
    assert isinstance(outcome, Refuse)
    assert outcome.error is not None
    return type(outcome.error)


def num_answered(outcomes: Sequence[Any]) -> int:
    return sum(isinstance(each, Refuse) and not each.ends_connection for each in outcomes)


def test_requests_beyond_the_burst_wait_for_their_start() -> None:
    server = Server(MANY._replace(per_second=10.0, burst=2.0))
    waits = delays([server.ask(now=5.0) for _ in range(4)] + [server.ask(now=6.0) for _ in range(3)])
    assert waits == pytest.approx([0, 0, 0.1, 0.2, 0, 0, 0.1], abs=0.01)


def test_large_messages_cost_more() -> None:
    server = Server(MANY._replace(per_second=10.0, burst=2.0))
    server.ask(body=DONE + bytes(640 << 10))  # what follows the message is not read here
    assert delays([server.ask()]) == pytest.approx([1.0], abs=0.01)


def test_requests_and_bytes_in_progress_are_limited_until_they_leave() -> None:
    server = Server(LIMITS)
    assert error(server.ask(601 - HEAD_BYTES)) is FrameTooLarge
    assert isinstance(server.ask(600 - HEAD_BYTES), Begin)
    assert error(server.ask(401 - HEAD_BYTES)) is QueueFull
    assert isinstance(server.ask(300 - HEAD_BYTES), Begin)
    assert isinstance(server.ask(), Begin)
    assert error(server.ask()) is QueueFull  # the fourth
    assert isinstance(server.ask(key="other"), Begin)
    server.leave("key", 600)
    assert isinstance(server.ask(600 - HEAD_BYTES), Begin)


def test_trusted_peer_never_waits() -> None:
    server = Server(Limits())
    assert delays([server.ask(1 << 10) for _ in range(200)]) == [0.0] * 200


def test_keys_share_one_half_of_their_pool_and_divide_the_other() -> None:
    server = Server(pool=Pool(1200, num_keys=2))
    assert isinstance(server.ask(900 - HEAD_BYTES), Begin)  # 300 of its own, and 600 of all
    assert error(server.ask(key="other", payload_bytes=400)) is QueueFull
    assert isinstance(server.ask(key="other", payload_bytes=200), Begin)
    with pytest.raises(QueueFull):
        server.hold("key", 1)
    server.leave("key", 900)
    server.hold("key", 900)
    assert error(server.ask()) is QueueFull
    server.release("key", 900)
    assert isinstance(server.ask(), Begin)


def test_unread_answers_of_a_key_without_a_pool_are_limited() -> None:
    server = Server(LIMITS)
    server.hold("key", 1000)
    with pytest.raises(QueueFull):
        server.hold("key", 1)
    server.release("key", 1000)
    server.hold("key", 1000)


def test_cancellation_ends_a_request_of_the_same_connection_only() -> None:
    server = Server()
    server.running.add((b"key", b"12345678"))
    cancel = encode(Cancel(request=b"12345678", final=True))
    assert server.ask(body=cancel) == End(b"key", b"12345678", True)
    assert server.ask(body=cancel, key="other") is None
    assert error(server.ask(body=cancel + bytes(64))) is BadMessage


@pytest.mark.parametrize(
    ("frames", "key", "expected"),
    [
        (message("key", DONE.replace(b"done", b"fone")), "key", NotAuthorised),
        (message("key", b"\xc1"), "key", BadMessage),
        (message("key", DONE, *([b""] * (MAX_PAYLOAD_FRAMES + 1))), "key", BadMessage),
        (message("key", DONE), "revoked", AppRevoked),
        (message("key"), "key", None),
        ([zmq.Frame(b"key"), zmq.Frame(b"1"), zmq.Frame(DONE)], "key", None),
    ],
)
def test_message_that_is_refused_is_answered_if_it_is_a_request(
    frames: list[zmq.Frame], key: str, expected: type[HearthError] | None
) -> None:
    outcome = Server().receive(frames, key, 0.0)
    assert isinstance(outcome, Refuse)
    assert outcome.reason
    assert not outcome.ends_connection
    assert (type(outcome.error) if outcome.error else None) is expected


def test_few_messages_of_a_revoked_key_are_answered() -> None:
    server = Server()

    def flood(connection: str, now: float) -> list[Any]:
        return [server.receive(message(connection, DONE), "revoked", now) for _ in range(100)]

    outcomes = flood("one", 0.0)
    assert num_answered(outcomes) == 50
    assert outcomes[51:] == [None] * 49  # its connection was ended
    assert num_answered(flood("two", 1.0)) == 5


def test_flood_of_refused_messages_is_not_answered() -> None:
    server = Server()
    floods = [
        [server.receive(message(str(connection), b"\xc1"), "key", now) for connection in range(number)]
        for now, number in ((0.0, 4000), (0.0, 200), (1.0, 4000), (2.0, 1))
    ]
    assert [num_answered(each) for each in floods] == [4000, 96, pytest.approx(200, abs=1), 1]


def test_flood_of_cancellations_of_nothing_ends_its_connection() -> None:
    server, cancel = Server(), encode(Cancel(request=b"12345678"))
    outcomes = [server.ask(body=cancel) for _ in range(5000)]
    assert [each for each in outcomes if each is not None] == [Refuse("", None, ends_connection=True)]
    assert isinstance(server.ask(now=2.0), Begin)  # a caller may use the name of a connection that was ended again
