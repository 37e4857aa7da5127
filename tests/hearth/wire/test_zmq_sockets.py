"""Sockets of the event loop: no message is missed, whatever touches the socket; a closed one ends its receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import zmq
from support.contexts import zmq_context

from hearth.wire.zmq_sockets import LoopSocket, loop_socket

Scenario = Callable[[LoopSocket, LoopSocket], Awaitable[None]]


def run(scenario: Scenario) -> None:
    """With two connected sockets."""

    async def main() -> None:
        with zmq_context() as context:
            one, other = loop_socket(context, zmq.PAIR), loop_socket(context, zmq.PAIR)
            try:
                one.bind("inproc://pair")
                other.connect("inproc://pair")
                await asyncio.wait_for(scenario(one, other), 20)
            finally:
                one.close(linger=0)
                other.close(linger=0)

    asyncio.run(main())


def test_messages_arrive_in_order_whether_or_not_they_are_awaited() -> None:
    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        async def read(count: int) -> list[int]:
            return [int((await other.receive())[0].bytes) for _ in range(count)]

        for number in range(100):  # nobody waits yet
            one.send_now([b"%d" % number])
        assert await read(100) == list(range(100))
        reading = asyncio.ensure_future(read(200))
        for number in range(200):
            one.send_now([b"%d" % number])
            if number % 7 == 0:
                await asyncio.sleep(0)
        assert await reading == list(range(200))

    run(scenario)


@pytest.mark.parametrize("access", ["send", "events"])
def test_message_is_not_missed_if_another_access_clears_its_signal(access: str) -> None:
    """Both ends send and look at their sockets all the time, while their receivers wait."""

    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        async def exchange(socket: LoopSocket) -> None:
            for number in range(2000):
                reading = asyncio.ensure_future(socket.receive())
                await asyncio.sleep(0)
                socket.send_now([b"%d" % number])
                if access == "events":
                    socket.has_waiting_message()
                assert (await reading)[0].bytes == b"%d" % number

        await asyncio.gather(exchange(one), exchange(other))

    run(scenario)


def test_message_is_not_missed_if_a_send_that_fails_clears_its_signal() -> None:
    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        _fill_buffer(other)
        reading = asyncio.ensure_future(other.receive())
        await asyncio.sleep(0)
        one.send_now([b"arrived"])
        time.sleep(0.01)  # ZeroMQ looks for signals again only some time after it last did
        with pytest.raises(zmq.Again):
            other.send_now([b"no room"])
        assert (await reading)[0].bytes == b"arrived"

    run(scenario)


def test_messages_that_nobody_reads_do_not_keep_the_loop_busy() -> None:
    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        first = asyncio.ensure_future(other.receive())
        await asyncio.sleep(0)
        one.send_now([b"1"])
        await first
        one.send_now([b"2"])
        used = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - used < 0.1
        assert (await other.receive())[0].bytes == b"2"

    run(scenario)


def test_send_without_a_connection_or_with_a_full_buffer_raises() -> None:
    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        with zmq_context() as context:
            alone = loop_socket(context, zmq.DEALER)
            with pytest.raises(zmq.Again):
                alone.send_now([b"x"])
            alone.close(linger=0)

    run(scenario)


def _fill_buffer(socket: LoopSocket) -> None:
    with suppress(zmq.Again):
        while True:
            socket.send_now([b"one of many"])


def test_closing_ends_the_receiver() -> None:
    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        reading = asyncio.ensure_future(other.receive())
        await asyncio.sleep(0)
        other.close(linger=0)
        with pytest.raises(asyncio.CancelledError):
            await reading

    run(scenario)


def test_frames_that_cannot_be_sent_leave_no_half_message() -> None:
    async def scenario(one: LoopSocket, other: LoopSocket) -> None:
        with pytest.raises(TypeError):
            one.send_now([b"first", "text is not bytes"])
        one.send_now([b"whole", bytearray(b"message"), memoryview(b"!"), zmq.Frame(b"?")])
        assert [frame.bytes for frame in await other.receive()] == [b"whole", b"message", b"!", b"?"]

    run(scenario)
