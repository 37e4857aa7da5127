"""Answers to clients that read slowly, stop reading, or are gone."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from coordinator.port.outbox import STALLED_SECONDS, Outbox, Outcome
from coordinator.port.requests import Send

SMALL, LARGE = 0, 50_000


class Transfer:
    """A large answer in ZeroMQ's buffer."""

    def __init__(self) -> None:
        self.done = False


class Port:
    """Sockets of clients: each takes `room` answers until `read`."""

    def __init__(self, room: int) -> None:
        self.room: defaultdict[bytes, int] = defaultdict(lambda: room)
        self.closed: set[bytes] = set()
        self.sent: list[Send] = []
        self.left: list[Send] = []
        self.gone: list[bytes] = []
        self.transfers: defaultdict[bytes, deque[Transfer]] = defaultdict(deque)
        self.outbox = Outbox(self._send, self.left.append, self.gone.append)

    def _send(self, answer: Send) -> Outcome:
        if answer.identity in self.closed:
            return "gone"
        if self.room[answer.identity] == 0:
            return "full"
        self.room[answer.identity] -= 1
        self.sent.append(answer)
        if not answer.num_bytes:
            return "taken"
        self.transfers[answer.identity].append(Transfer())
        return self.transfers[answer.identity][-1]

    def read(self, identity: bytes, count: int = 1) -> None:
        self.room[identity] += count
        for transfer in self.transfers[identity]:
            transfer.done = True


def answer(text: bytes, identity: bytes = b"a", num_bytes: int = SMALL) -> Send:
    return Send(identity, [identity, b"request", text], "key", num_bytes)


def test_answers_of_a_client_keep_their_order_and_delay_no_other_client() -> None:
    port = Port(room=1)
    for text in (b"1", b"2", b"3"):
        port.outbox.post(answer(text), 0.0)
    port.outbox.post(answer(b"other", b"b"), 0.0)
    assert [each.frames[2] for each in port.sent] == [b"1", b"other"]
    port.read(b"a", 5)
    port.outbox.poll(1.0)
    assert [each.frames[2] for each in port.sent] == [b"1", b"other", b"2", b"3"]
    assert not port.outbox.is_busy


def test_large_answer_counts_until_it_has_left() -> None:
    port = Port(room=5)
    port.outbox.post(answer(b"large", num_bytes=LARGE), 0.0)
    port.outbox.poll(1.0)
    assert (port.left, port.outbox.is_busy) == ([], True)
    port.read(b"a")
    port.outbox.poll(2.0)
    assert (len(port.left), port.outbox.is_busy) == (1, False)


def test_reader_that_stalls_is_given_up_after_a_time() -> None:
    port = Port(room=0)
    port.outbox.post(answer(b"small"), 0.0)
    port.outbox.post(answer(b"large", num_bytes=LARGE), 5.0)
    port.outbox.poll(STALLED_SECONDS)
    assert port.gone == []
    port.outbox.poll(STALLED_SECONDS + 0.1)
    assert (port.gone, len(port.left), port.outbox.is_busy) == ([b"a"], 1, False)


def test_reader_that_is_slow_but_reads_is_kept() -> None:
    port = Port(room=0)
    for text in (b"1", b"2", b"3"):
        port.outbox.post(answer(text), 0.0)
    for second in (25.0, 50.0, 75.0):
        port.read(b"a")
        port.outbox.poll(second)
    assert (len(port.sent), port.gone) == (3, [])


def test_small_answers_that_wait_for_one_client_are_of_limited_size() -> None:
    port = Port(room=0)
    for _ in range(2000):
        port.outbox.post(answer(bytes(1000)), 0.0)
    assert port.gone != []
    assert set(port.gone) == {b"a"}


def test_client_that_is_gone_frees_what_its_answers_held() -> None:
    port = Port(room=0)
    port.outbox.post(answer(b"waits", num_bytes=LARGE), 0.0)
    port.closed.add(b"a")
    port.outbox.post(answer(b"later", b"c"), 0.0)
    port.outbox.poll(1.0)
    port.outbox.post(answer(b"new", num_bytes=LARGE), 1.0)
    assert port.gone == [b"a", b"a"]
    assert len(port.left) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["small", "large", "read", "close", "poll"]),
            st.sampled_from([b"a", b"b"]),
            st.integers(0, 12),
        ),
        max_size=40,
    )
)
def test_every_large_answer_leaves_exactly_once(steps: list[tuple[str, bytes, int]]) -> None:
    port, now, posted = Port(room=1), 0.0, Counter[bytes]()
    for number, (kind, identity, seconds) in enumerate(steps):
        now += seconds
        if kind in ("small", "large"):
            text = b"%d" % number
            posted[text] += kind == "large"
            port.outbox.post(answer(text, identity, LARGE if kind == "large" else SMALL), now)
        elif kind == "read":
            port.read(identity)
        elif kind == "close":
            port.closed.add(identity)
        else:
            port.outbox.poll(now)
    for identity in (b"a", b"b"):
        port.read(identity, 100)
    port.outbox.poll(now)
    for identity in (b"a", b"b"):
        port.read(identity)
    port.outbox.poll(now + STALLED_SECONDS + 1)
    assert not port.outbox.is_busy
    assert Counter(each.frames[2] for each in port.left) == +posted
