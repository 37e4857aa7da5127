"""Both transports under the same tests, and access control of the encrypted one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq
from support.memory_transport import MemoryHub
from support.tcp_proxy import TcpProxy
from support.waiting import wait_for

from hearth.errors import PortInUse
from hearth.platform.curve import KeyPair, new_keypair, secure_client
from hearth.transport.base import Transport
from hearth.transport.resend import MAX_BYTES, MAX_LARGE_BYTES, MAX_SECONDS, LargeMessages, RecentMessages
from hearth.transport.sockets import MAX_FRAMES, SocketTransport
from hearth.wire.messages import Peer


def peer_of(rank: int, transport: SocketTransport) -> Peer:
    return Peer(rank=rank, host="127.0.0.1", port=transport.port, public_key=transport.public_key, bytes_per_second=1e9)


@contextmanager
def closed_at_the_end(*transports: SocketTransport) -> Iterator[None]:
    try:
        yield
    finally:
        for transport in transports:
            transport.close()
            transport.release()


@contextmanager
def sockets(num_ranks: int, encrypted: bool, copied_bytes: int | None = None) -> Iterator[list[SocketTransport]]:
    made = [
        SocketTransport(rank, num_ranks, "127.0.0.1", (0, 0), new_keypair() if encrypted else None, copied_bytes)
        for rank in range(num_ranks)
    ]
    with closed_at_the_end(*made):
        for transport in made:
            transport.connect([peer_of(rank, made[rank]) for rank in range(num_ranks) if rank != transport.rank])
        yield made


@contextmanager
def memory(num_ranks: int) -> Iterator[list[Transport]]:
    hub = MemoryHub(num_ranks)
    yield [hub.transport(rank) for rank in range(num_ranks)]
    hub.close()


KINDS = {
    "memory": lambda n: memory(n),
    "curve": lambda n: sockets(n, encrypted=True),
    "plain": lambda n: sockets(n, encrypted=False),
    "curve, uncopied": lambda n: sockets(n, encrypted=True, copied_bytes=1000),
    "plain, uncopied": lambda n: sockets(n, encrypted=False, copied_bytes=1000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_complete_in_order_with_source(kind: str) -> None:
    with KINDS[kind](3) as transports:
        for i in range(20):
            transports[0].send(2, [bytes([i]), bytes(100_000), b""])
        transports[1].send(2, [b"x"])
        from_zero, from_one = [], []
        while len(from_zero) + len(from_one) < 21:
            received = transports[2].receive(10)
            (from_zero if received.source == 0 else from_one).append([bytes(frame) for frame in received.frames])
        assert from_zero == [[bytes([i]), bytes(100_000), b""] for i in range(20)]
        assert from_one == [[b"x"]]


@pytest.mark.parametrize("kind", KINDS)
def test_receive_times_out(kind: str) -> None:
    with KINDS[kind](2) as transports:
        began = time.monotonic()
        assert transports[0].receive(0.05) is None
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", KINDS)
def test_close_wakes_the_receiver(kind: str) -> None:
    with KINDS[kind](2) as transports:
        done = threading.Event()

        def receive() -> None:
            transports[0].receive(60)
            done.set()

        threading.Thread(target=receive, daemon=True).start()
        transports[0].close()
        assert done.wait(10)


def test_only_peers_of_the_plan_are_admitted() -> None:
    with sockets(2, encrypted=True) as transports:
        with zmq.Context() as context, context.socket(zmq.PUSH) as unknown_key, context.socket(zmq.PUSH) as without_key:
            secure_client(unknown_key, new_keypair(), transports[0].public_key)
            for socket, message in ((unknown_key, b"unknown key"), (without_key, b"no key")):
                socket.linger = 0
                socket.connect(f"tcp://127.0.0.1:{transports[0].port}")
                socket.send(message)
            assert transports[0].receive(0.5) is None
            transports[1].send(0, [b"peer"])
            received = transports[0].receive(10)
            assert received.source == 1


def test_peer_that_connects_early_is_admitted_later() -> None:
    keys: list[KeyPair] = [new_keypair(), new_keypair()]
    late, early = (SocketTransport(rank, 2, "127.0.0.1", (0, 0), keys[rank]) for rank in range(2))
    with closed_at_the_end(late, early):
        early.connect([peer_of(0, late)])
        early.send(0, [b"early"])
        assert late.receive(0.2) is None
        late.connect([peer_of(1, early)])
        received = late.receive(10)
        assert bytes(received.frames[0]) == b"early"


def test_messages_with_too_many_frames_are_dropped_and_counted() -> None:
    with sockets(2, encrypted=True) as transports:
        transports[1].send(0, [b""] * (MAX_FRAMES + 1))
        transports[1].send(0, [b"fine"])
        assert transports[0].receive(10) is None
        received = transports[0].receive(10)
        assert bytes(received.frames[0]) == b"fine"
        assert transports[0].dropped == 1


def test_port_in_use_error_names_the_range_option() -> None:
    first = SocketTransport(0, 1, "127.0.0.1", (0, 0), None)
    with closed_at_the_end(first), pytest.raises(PortInUse, match="--data-ports"):
        SocketTransport(0, 1, "127.0.0.1", (first.port, first.port), None)


def test_memory_transport_limits_rate_and_can_be_cut() -> None:
    hub = MemoryHub(2, bytes_per_second=1e6)
    try:
        began = time.monotonic()
        hub.transport(0).send(1, [bytes(100_000)])
        hub.transport(0).send(1, [bytes(100_000)])
        for _ in range(2):
            assert hub.transport(1).receive(10) is not None
        assert time.monotonic() - began >= 0.2
        hub.cut(0, 1)
        hub.transport(0).send(1, [b"lost"])
        assert hub.transport(1).receive(0.05) is None
    finally:
        hub.close()


@contextmanager
def proxied(
    encrypted: bool, copied_bytes: int | None = None
) -> Iterator[tuple[SocketTransport, SocketTransport, TcpProxy]]:
    """A sender (rank 1), a receiver (rank 0), and the proxy between them."""
    receiver, sender = (
        SocketTransport(rank, 2, "127.0.0.1", (0, 0), new_keypair() if encrypted else None, copied_bytes)
        for rank in range(2)
    )
    with closing(TcpProxy(receiver.port)) as proxy, closed_at_the_end(receiver, sender):
        receiver.connect([peer_of(1, sender)])
        sender.connect([peer_of(0, receiver).model_copy(update={"port": proxy.port})])
        sender.send(0, [b"first"])
        received = receiver.receive(10)
        assert received is not None
        yield sender, receiver, proxy


@pytest.mark.parametrize("encrypted", [True, False])
def test_messages_lost_with_a_connection_are_sent_again_at_once(encrypted: bool) -> None:
    with proxied(encrypted) as (sender, receiver, proxy):
        proxy.swallow()
        sender.send(0, [b"lost", bytes(100_000)])
        assert receiver.receive(0.2) is None
        began = time.monotonic()
        proxy.reset()
        arrived = []
        while b"lost" not in arrived:
            assert time.monotonic() - began < 5
            if (received := receiver.receive(1)) is not None:
                arrived.append(bytes(received.frames[0]))
        assert arrived == [b"first", b"lost"]  # the first one a second time, since it might have been lost, too
        assert time.monotonic() - began < 1
        sender.send(0, [b"later"])
        received = receiver.receive(10)
        assert bytes(received.frames[0]) == b"later"


@pytest.mark.parametrize("copied_bytes", [None, 1000])
def test_large_message_that_is_lost_with_a_connection_is_sent_again_at_once(copied_bytes: int | None) -> None:
    content = random.randbytes(3 * MAX_BYTES)
    with proxied(True, copied_bytes) as (sender, receiver, proxy):
        proxy.swallow()
        sender.send(0, [b"large", content])
        assert receiver.receive(0.2) is None
        began = time.monotonic()
        proxy.reset()
        while (received := receiver.receive(1)) is None or bytes(received.frames[0]) != b"large":
            assert time.monotonic() - began < 5
        assert bytes(received.frames[1]) == content
        assert time.monotonic() - began < 2  # the proxy passes on some hundred MB/s


def test_large_messages_are_kept_until_they_must_have_arrived() -> None:
    size = MAX_LARGE_BYTES // 2
    large = LargeMessages(bytes_per_second=size)  # each takes a second
    for name, now in ((b"a", 0.0), (b"b", 0.5), (b"c", 1.0)):
        large.add([name, memoryview(bytes(size - 1))], now)
    assert [frames[0] for frames in large.take_lost(0.75)] == [b"b"]  # the first is too much, the last was sent later
    assert [frames[0] for frames in large.take_lost(5.4)] == [b"c"]  # 3 s after the first, at the measured rate
    assert large.take_lost(5.4) == []
    large.add([b"d", bytes(4 * MAX_LARGE_BYTES)], 10.0)
    large.free(10.0 + MAX_SECONDS)
    assert [frames[0] for frames in large.take_lost(10.0 + MAX_SECONDS)] == [b"d"]  # the newest, whatever its size
    large.add([b"e", bytes(size)], 100.0)
    large.free(103.0)
    assert large.take_lost(101.0) == []


def test_background_messages_leave_room_for_those_of_steps_that_are_sent_again() -> None:
    with proxied(encrypted=True) as (sender, receiver, proxy):
        proxy.swallow()
        sender.send(0, [b"step", bytes(1000)])
        for number in range(20):  # more than both kinds of messages may take
            sender.send(0, [bytes([number]), bytes(MAX_BYTES // 16)], background=True)
        assert receiver.receive(0.2) is None
        proxy.reset()
        arrived = []
        while not arrived or arrived[-1] != b"\x13":
            received = receiver.receive(10)
            arrived.append(bytes(received.frames[0]))
        assert b"step" in arrived


def test_a_broken_connection_is_made_again_when_nothing_was_lost() -> None:
    with proxied(encrypted=True) as (sender, receiver, proxy):
        for count in range(2, 5):
            proxy.reset()
            wait_for("the connection", lambda count=count: proxy.num_connections == count)
            sender.send(0, [bytes([count])])
            while (received := receiver.receive(10)) is not None and bytes(received.frames[0]) != bytes([count]):
                pass
            assert received is not None


def test_only_the_newest_messages_are_kept_and_no_old_or_large_ones() -> None:
    recent = RecentMessages()
    for second in range(5):
        recent.add([bytes([second]), memoryview(bytes(MAX_BYTES // 4))], float(second))
    assert [frames[0] for frames in recent.sent_between(4.0, 4.0)] == [b"\x02", b"\x03", b"\x04"]
    recent.add([bytes(MAX_BYTES + 1)], 5.0)
    assert len(recent.sent_between(5.0, 5.0)) == 3
    assert [frames[0] for frames in recent.sent_between(5.0, 3.5)] == [b"\x02", b"\x03"]  # the rest was sent later
    assert [frames[0] for frames in recent.sent_between(MAX_SECONDS + 3.5, 20.0)] == [b"\x04"]


@pytest.mark.parametrize("kind", ["curve", "plain", "curve, uncopied", "plain, uncopied"])
def test_bytes_of_messages_are_counted_by_receiver_until_the_plan_ends(kind: str) -> None:
    with KINDS[kind](3) as transports:
        sender = transports[0]
        assert isinstance(sender, SocketTransport)
        assert sender.sent_bytes_by_rank == (0, 0, 0)
        sender.send(2, [b"header", bytes(100_000), b""])
        sender.send(2, [bytes(MAX_BYTES + 1)], background=True)
        sender.send(1, [memoryview(b"small")])
        received = [transports[2].receive(10), transports[2].receive(10)]
        arrived = sum(len(frame) for message in received if message is not None for frame in message.frames)
        assert sender.sent_bytes_by_rank == (0, 5, arrived) == (0, 5, 100_006 + MAX_BYTES + 1)
        sender.leave(0, 2)
        assert sender.sent_bytes_by_rank == (0, 0)
