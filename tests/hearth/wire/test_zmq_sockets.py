"""Sockets of the event loop: no message is missed, whatever touches the socket; a closed one ends its receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import zmq
from support.contexts import zmq_context

from hearth.wire.zmq_sockets import LoopSocket, loop_socket


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[LoopSocket, LoopSocket]]:
    """Two connected sockets."""
    with zmq_context() as context:
        one, other = loop_socket(context, zmq.PAIR), loop_socket(context, zmq.PAIR)
        try:
            one.bind("inproc://pair")
            other.connect("inproc://pair")
            yield one, other
        finally:
            one.close(linger=0)
            other.close(linger=0)


async def test_messages_arrive_in_order_whether_or_not_they_are_awaited() -> None:
    async with pair() as (one, other):

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


@pytest.mark.parametrize("access", ["send", "events"])
async def test_message_is_not_missed_if_another_access_clears_its_signal(access: str) -> None:
    """Both ends send and look at their sockets all the time, while their receivers wait."""
    async with pair() as (one, other):

        async def exchange(socket: LoopSocket) -> None:
            for number in range(2000):
                reading = asyncio.ensure_future(socket.receive())
                await asyncio.sleep(0)
                socket.send_now([b"%d" % number])
                if access == "events":
                    socket.has_waiting_message()
                assert (await reading)[0].bytes == b"%d" % number

        await asyncio.gather(exchange(one), exchange(other))


async def test_message_is_not_missed_if_a_send_that_fails_clears_its_signal() -> None:
    async with pair() as (one, other):
        _fill_buffer(other)
        reading = asyncio.ensure_future(other.receive())
        await asyncio.sleep(0)
        one.send_now([b"arrived"])
        time.sleep(0.01)  # ZeroMQ looks for signals again only some time after it last did
        with pytest.raises(zmq.Again):
            other.send_now([b"no room"])
        assert (await reading)[0].bytes == b"arrived"


async def test_messages_that_nobody_reads_do_not_keep_the_loop_busy() -> None:
    async with pair() as (one, other):
        first = asyncio.ensure_future(other.receive())
        await asyncio.sleep(0)
        one.send_now([b"1"])
        await first
        one.send_now([b"2"])
        used = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - used < 0.1
        assert (await other.receive())[0].bytes == b"2"


async def test_send_without_a_connection_or_with_a_full_buffer_raises() -> None:
    async with pair() as (_, _):
        with zmq_context() as context:
            alone = loop_socket(context, zmq.DEALER)
            with pytest.raises(zmq.Again):
                alone.send_now([b"x"])
            alone.close(linger=0)


def _fill_buffer(socket: LoopSocket) -> None:
    with suppress(zmq.Again):
        while True:
            socket.send_now([b"one of many"])


async def test_closing_ends_the_receiver() -> None:
    async with pair() as (_, other):
        reading = asyncio.ensure_future(other.receive())
        await asyncio.sleep(0)
        other.close(linger=0)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_frames_that_cannot_be_sent_leave_no_half_message() -> None:
    async with pair() as (one, other):
        with pytest.raises(TypeError):
            one.send_now([b"first", "text is not bytes"])
        one.send_now([b"whole", bytearray(b"message"), memoryview(b"!"), zmq.Frame(b"?")])
        assert [frame.bytes for frame in await other.receive()] == [b"whole", b"message", b"!", b"?"]
