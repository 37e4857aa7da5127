"""Protocol version 1 against the current one, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgpack
import pytest
import zmq.asyncio
from support.messages import EXAMPLES, as_version_1
from support.servers import DOMAIN, guarded_context
from support.waiting import until

from coordinator.devices.fleet import Fleet
from hearth.errors import PortInUse, ProtocolMismatch
from hearth.platform.curve import new_keypair, secure_client, secure_server
from hearth.platform.security import Access
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire.messages import AgentWelcome, Done, GetTelemetry, Hello, Message, encode
from hearth.wire.rpc import Caller, Response, RpcClient, RpcServer

VERSION_1 = {message.tag: as_version_1(message) for message in EXAMPLES}
# Version 1's answer to the hello of version 3.
REFUSAL_1 = bytes.fromhex(
    "83a174a66661696c6564a4636f6465b050726f746f636f6c4d69736d61746368a764657461696c7383a470656572a6636c69656e74a46f75727301"
    "a674686569727303"
)
SERVER, CLIENT = new_keypair(), new_keypair()
WELCOME = AgentWelcome(
    version="2", device_id="id", boot_id="b", name="kitchen", device_public_key=SERVER.public, link_port=1
)
TELEMETRY = next(message for message in EXAMPLES if message.tag == "telemetry")


async def agent(caller: Caller, message: Message, payload: Sequence[Any]) -> Response:
    """An agent of the current version that answers hello and telemetry."""
    if isinstance(message, Hello):
        if message.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(peer=message.name, ours=PROTOCOL_VERSION, theirs=message.protocol)
        return WELCOME
    return TELEMETRY if isinstance(message, GetTelemetry) else Done()


def admits(public_key: str) -> bool:
    return public_key == CLIENT.public


@asynccontextmanager
async def version_1(context: zmq.asyncio.Context, answer: bytes) -> AsyncIterator[int]:
    """A version 1 server that gives one answer to every request. Yields its port."""
    socket = context.socket(zmq.ROUTER)
    secure_server(socket, SERVER, DOMAIN)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        while True:
            identity, request_id, *_ = await socket.recv_multipart()
            await socket.send_multipart([identity, request_id, answer])

    serving = asyncio.create_task(serve())
    try:
        yield port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        socket.close(linger=0)


async def test_v1_client_gets_the_version_error_for_every_request() -> None:
    """With and without a hello: ZeroMQ reconnects the client to a server that has been upgraded meanwhile."""
    async with guarded_context(admits) as context:
        server = RpcServer(context, "127.0.0.1", 0, SERVER, DOMAIN, agent)
        socket = context.socket(zmq.DEALER)
        secure_client(socket, CLIENT, SERVER.public)
        socket.connect(f"tcp://127.0.0.1:{server.port}")
        for tag, message in VERSION_1.items():
            if tag in ("cancel", "failed", "agent_welcome", "coordinator_welcome"):
                continue  # not requests
            await socket.send_multipart([bytes(8), message])
            request_id, body = await asyncio.wait_for(socket.recv_multipart(), 30)
            assert request_id == bytes(8)
            failed = msgpack.unpackb(body)
            assert (failed["t"], failed["code"]) == ("failed", "ProtocolMismatch"), tag
            assert (failed["details"]["ours"], failed["details"]["theirs"]) == (PROTOCOL_VERSION, 1), tag
        socket.close(linger=0)
        await server.close()


@pytest.mark.parametrize("answer", [REFUSAL_1, *(VERSION_1[tag] for tag in ("agent_welcome", "done"))])
async def test_v1_server_error_names_both_versions(answer: bytes) -> None:
    async with guarded_context(admits) as context, version_1(context, answer) as port:
        client = RpcClient(context, f"tcp://127.0.0.1:{port}", Access(CLIENT, SERVER.public), "client")
        with pytest.raises(ProtocolMismatch) as error:
            await client.hello(AgentWelcome, timeout_seconds=30)
        assert (error.value.ours, error.value.theirs) == (PROTOCOL_VERSION, 1)
        await client.close()


async def test_server_downgraded_to_v1_raises_the_version_error() -> None:
    async with guarded_context(admits) as context, version_1(context, VERSION_1["agent_state"]) as port:
        client = RpcClient(context, f"tcp://127.0.0.1:{port}", Access(CLIENT, SERVER.public), "client")
        with pytest.raises(ProtocolMismatch):
            await client.call(Done(), timeout_seconds=30)
        await client.close()


async def test_v1_agent_is_refused_until_upgraded() -> None:
    async with guarded_context(admits) as context, AsyncExitStack() as before:
        port = await before.enter_async_context(version_1(context, REFUSAL_1))
        address = f"127.0.0.1:{port}"
        async with Fleet(Access(CLIENT, SERVER.public), None, static_devices=address, browse=False) as fleet:
            await until("the refusal", lambda: bool(fleet.device_infos()))
            (refused,) = fleet.device_infos()
            assert (refused.state, refused.name) == ("refused", address)
            assert f"{address} speaks protocol version 1, this side speaks {PROTOCOL_VERSION}" in refused.reason
            assert len(fleet.refusals) == 1
            await before.aclose()
            servers: list[RpcServer] = []

            def upgraded() -> bool:
                """libzmq releases the port some time after the socket was closed."""
                with suppress(PortInUse):
                    servers.append(RpcServer(context, "127.0.0.1", port, SERVER, DOMAIN, agent))
                return bool(servers)

            await until("the port", upgraded)
            (server,) = servers
            await until("the device", lambda: bool(fleet.devices))
            assert [(info.name, info.state) for info in fleet.device_infos()] == [("kitchen", "alive")]
            assert not fleet.refusals
        await server.close()


def test_messages_start_with_the_protocol_version() -> None:
    assert all(encode(message)[1:4] == b"\xa1v" + bytes([PROTOCOL_VERSION]) for message in EXAMPLES if _small(message))


def _small(message: Message) -> bool:
    """Whether the message's map has a header of one byte."""
    return len(type(message).model_fields) < 14
