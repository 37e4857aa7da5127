"""Requests and answers over real sockets on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq.asyncio

from hearth.errors import (
    BadMessage,
    ConnectionLost,
    DeadlineExceeded,
    InternalError,
    PortInUse,
    ProtocolMismatch,
    TextTooLong,
    Unreachable,
)
from hearth.messages import (
    MAX_PAYLOAD_FRAMES,
    AgentWelcome,
    CoordinatorWelcome,
    Done,
    GetReadiness,
    GetStatus,
    Hello,
    ListApps,
    ListDevices,
    Message,
)
from hearth.rpc import Caller, Reply, RpcClient, RpcServer
from hearth.security import Access, asyncio_gatekeeper, new_keypair, secure_client

SERVER, CLIENT = new_keypair(), new_keypair()


async def echo(caller: Caller, message: Message, payload: Sequence[Any]) -> Message | Reply:
    if isinstance(message, Hello):
        return CoordinatorWelcome(version="9", name="far", protocol=2 if message.name == "other version" else 1)
    if isinstance(message, GetReadiness):
        raise TextTooLong(index=0, num_tokens=9, max_tokens=8)
    if isinstance(message, GetStatus):
        raise RuntimeError("a fault")
    if isinstance(message, ListDevices):
        await asyncio.sleep(60)
    return Reply(message, payload)


@asynccontextmanager
async def pair(port: int = 0) -> Any:
    context, client_context = zmq.asyncio.Context(), zmq.asyncio.Context()
    gatekeeper = asyncio_gatekeeper(context)
    gatekeeper.admit("test", lambda key: key == CLIENT.public)
    gatekeeper.start()
    server = RpcServer(context, "127.0.0.1", port, SERVER, "test", echo)
    await server.start()
    client = RpcClient(client_context, f"tcp://127.0.0.1:{server.port}", Access(CLIENT, SERVER.public), "test")
    try:
        yield server, client, client_context
    finally:
        await client.close()
        await server.close()
        gatekeeper.stop()
        context.destroy(linger=0)
        client_context.destroy(linger=0)


def run(scenario: Callable[[RpcServer, RpcClient, Any], Awaitable[None]]) -> None:
    async def main() -> None:
        async with pair() as (server, client, context):
            await asyncio.wait_for(scenario(server, client, context), 30)

    asyncio.run(main())


def test_payload_frames_come_back() -> None:
    async def scenario(server: RpcServer, client: RpcClient, _: Any) -> None:
        reply = await client.call(Done(), [b"a" * 100_000, b""], timeout_seconds=5)
        assert reply.message == Done()
        assert [bytes(frame) for frame in reply.payload] == [b"a" * 100_000, b""]

    run(scenario)


def test_many_calls_at_once_get_their_own_answers() -> None:
    async def scenario(server: RpcServer, client: RpcClient, _: Any) -> None:
        payloads = [str(i).encode() for i in range(100)]
        replies = await asyncio.gather(*(client.call(Done(), [p], timeout_seconds=10) for p in payloads))
        assert [bytes(reply.payload[0]) for reply in replies] == payloads

    run(scenario)


def test_errors_arrive_as_what_they_are() -> None:
    async def scenario(server: RpcServer, client: RpcClient, _: Any) -> None:
        with pytest.raises(TextTooLong) as error:
            await client.call(GetReadiness(), timeout_seconds=5)
        assert error.value.max_tokens == 8
        with pytest.raises(InternalError, match="a fault"):
            await client.call(GetStatus(), timeout_seconds=5)
        assert await client.call(Done(), timeout_seconds=5)

    run(scenario)


def test_every_wait_has_a_deadline() -> None:
    async def scenario(server: RpcServer, client: RpcClient, _: Any) -> None:
        with pytest.raises(DeadlineExceeded):
            await client.call(ListDevices(), timeout_seconds=0.2)
        assert await client.call(Done(), timeout_seconds=5)

    run(scenario)


def test_another_protocol_version_is_named() -> None:
    async def scenario(server: RpcServer, client: RpcClient, context: Any) -> None:
        assert (await client.hello(CoordinatorWelcome, timeout_seconds=5)).name == "far"
        other = RpcClient(context, client.endpoint, Access(CLIENT, SERVER.public), "other version")
        with pytest.raises(ProtocolMismatch) as error:
            await other.hello(CoordinatorWelcome, timeout_seconds=5)
        assert (error.value.ours, error.value.theirs) == (1, 2)
        with pytest.raises(BadMessage):
            await client.hello(AgentWelcome, timeout_seconds=5)
        await other.close()

    run(scenario)


def test_malformed_and_oversized_frames_are_counted_and_the_rest_goes_on() -> None:
    async def scenario(server: RpcServer, client: RpcClient, context: Any) -> None:
        raw = context.socket(zmq.DEALER)
        secure_client(raw, CLIENT, SERVER.public)
        raw.connect(client.endpoint)
        for frames in (
            [b"short", b""],
            [b"", b""],
            [bytes(8), b"\xc1"],
            [bytes(8), b"\x80", *[b""] * (MAX_PAYLOAD_FRAMES + 1)],
        ):
            await raw.send_multipart(frames)
        answers = [await asyncio.wait_for(raw.recv_multipart(), 5) for _ in range(2)]
        assert all(b"BadMessage" in answer[1] or b"UnknownMessage" in answer[1] for answer in answers)
        assert server.dropped == 4
        await raw.send_multipart([bytes(8), bytes(65 << 20)])  # over MAXMSGSIZE: only this connection is dropped
        raw.close()
        assert await client.call(Done(), timeout_seconds=5)
        assert await client.call(ListApps(), timeout_seconds=5)

    run(scenario)


def test_a_lost_server_fails_calls_at_once_and_is_found_again() -> None:
    async def main() -> None:
        async with pair() as (server, client, _):
            await client.call(Done(), timeout_seconds=5)
            waiting = asyncio.create_task(client.call(ListDevices(), timeout_seconds=30))
            await asyncio.sleep(0.1)
            port = server.port
            await server.close()
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(waiting, 5)
            with pytest.raises(Unreachable):
                await client.call(Done(), timeout_seconds=0.3)
            async with pair(port):
                assert await client.call(Done(), timeout_seconds=5)

    asyncio.run(main())


def test_a_port_that_is_taken_names_the_way_out() -> None:
    async def scenario(server: RpcServer, client: RpcClient, _: Any) -> None:
        context = zmq.asyncio.Context()
        with pytest.raises(PortInUse, match="--port"):
            RpcServer(context, "127.0.0.1", server.port, SERVER, "test", echo)
        context.destroy(linger=0)

    run(scenario)
