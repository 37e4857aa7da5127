"""Requests, answers and streams over real sockets on loopback."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from support.contexts import zmq_context
from support.servers import rpc_server
from support.waiting import until

from hearth import errors
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.curve import new_keypair, secure_client
from hearth.platform.machine import raise_file_limit
from hearth.platform.security import Access
from hearth.protocol import MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION
from hearth.wire import messages as wire
from hearth.wire import rpc
from hearth.wire.intake import Limits
from hearth.wire.rpc import ACCEPT_ALL, Caller, Policy, Reply, Response, RpcClient, RpcServer

SERVER, CLIENT = new_keypair(), new_keypair()


closed: list[str] = []  # prompts of streams that have ended, in any way
END = wire.TextEnded(
    text="", reason="length", num_prompt_tokens=1, num_tokens=1, queued_seconds=0, first_token_seconds=0,
    decode_seconds=0,
)  # fmt: skip


class PanicError(BaseException):
    """Like the panic of a library that is written in Rust, which is no Exception."""


async def count(request: wire.Generate) -> AsyncGenerator[Reply, None]:
    """Send `max_tokens` answers. Prompts: `broken` fails after half of them, `large` has a large payload."""
    assert request.max_tokens is not None
    try:
        for index in range(request.max_tokens):
            if request.prompt == "broken" and index == request.max_tokens // 2:
                raise errors.TextTooLong(index=index, num_tokens=9, max_tokens=8)
            await asyncio.sleep(0.001)
            payload = [bytes(100_000)] if request.prompt == "large" else []
            yield Reply(wire.TextGenerated(token_ids=(index,), text=request.prompt or ""), payload)
        yield Reply(END)
    finally:
        closed.append(request.prompt or "")


async def echo(caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
    if isinstance(message, wire.Generate):
        return count(message)
    if isinstance(message, wire.Hello):
        return wire.CoordinatorWelcome(
            version="9", name="far", protocol=PROTOCOL_VERSION + (message.name == "other version")
        )
    if isinstance(message, wire.GetReadiness):
        raise errors.TextTooLong(index=0, num_tokens=9, max_tokens=8)
    if isinstance(message, wire.GetStatus):
        raise RuntimeError("a fault")
    if isinstance(message, wire.ListModels):
        raise PanicError("a fault in Rust")
    if isinstance(message, wire.ListDevices):
        await asyncio.sleep(60)
    return Reply(message, payload)


@asynccontextmanager
async def pair(port: int = 0, sndhwm: int = 1000, policy: Policy = ACCEPT_ALL) -> Any:
    with zmq_context() as client_context:
        async with rpc_server(SERVER, echo, port, lambda key: key == CLIENT.public, policy, sndhwm) as server:
            client = RpcClient(client_context, f"tcp://127.0.0.1:{server.port}", Access(CLIENT, SERVER.public), "test")
            try:
                yield server, client, client_context
            finally:
                await client.close()


def raw_client(context: zmq.asyncio.Context, endpoint: str, rcvhwm: int = 1000) -> zmq.asyncio.Socket:
    """A socket without the client's logic: tests send and receive frames themselves."""
    socket = context.socket(zmq.DEALER)
    secure_client(socket, CLIENT, SERVER.public)
    socket.rcvhwm = rcvhwm
    socket.connect(endpoint)
    return socket


async def test_payload_frames_round_trip() -> None:
    async with pair() as (_, client, _):
        reply = await client.call(wire.Done(), [b"a" * 100_000, b""], timeout_seconds=30)
        assert reply.message == wire.Done()
        assert [bytes(frame) for frame in reply.payload] == [b"a" * 100_000, b""]


async def test_concurrent_calls_get_their_own_answers() -> None:
    async with pair() as (_, client, _):
        payloads = [str(i).encode() for i in range(100)]
        replies = await asyncio.gather(*(client.call(wire.Done(), [p], timeout_seconds=10) for p in payloads))
        assert [bytes(reply.payload[0]) for reply in replies] == payloads


async def test_errors_keep_their_type() -> None:
    async with pair() as (_, client, _):
        with pytest.raises(errors.TextTooLong) as error:
            await client.call(wire.GetReadiness(), timeout_seconds=30)
        assert error.value.max_tokens == 8
        with pytest.raises(errors.InternalError, match="a fault"):
            await client.call(wire.GetStatus(), timeout_seconds=30)
        with pytest.raises(errors.InternalError, match="PanicError: a fault in Rust"):
            await client.call(wire.ListModels(), timeout_seconds=30)
        assert await client.call(wire.Done(), timeout_seconds=30)


async def test_every_call_has_a_deadline() -> None:
    async with pair() as (_, client, _):
        with pytest.raises(errors.DeadlineExceeded):
            await client.call(wire.ListDevices(), timeout_seconds=0.2)
        assert await client.call(wire.Done(), timeout_seconds=30)


async def test_server_knows_whether_the_connection_of_a_request_is_open() -> None:
    callers: list[Caller] = []

    async def note(caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        callers.append(caller)
        return wire.Done()

    async with pair() as (server, client, context):
        server._handler = note
        other = RpcClient(context, client.endpoint, Access(CLIENT, SERVER.public), "other")
        for each in (client, other):
            await each.call(wire.Done(), timeout_seconds=30)
        assert all(caller.is_connected() for caller in callers)
        await other.close()
        await until("the end of the connection", lambda: not callers[1].is_connected())
        assert callers[0].is_connected()
        await client.call(wire.Done(), timeout_seconds=30)


async def test_other_protocol_version_is_reported() -> None:
    async with pair() as (_, client, context):
        assert (await client.hello(wire.CoordinatorWelcome, timeout_seconds=30)).name == "far"
        other = RpcClient(context, client.endpoint, Access(CLIENT, SERVER.public), "other version")
        with pytest.raises(errors.ProtocolMismatch) as error:
            await other.hello(wire.CoordinatorWelcome, timeout_seconds=30)
        assert (error.value.ours, error.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
        with pytest.raises(errors.BadMessage):
            await client.hello(wire.AgentWelcome, timeout_seconds=30)
        await other.close()


async def test_malformed_and_oversized_frames_are_counted_and_dropped() -> None:
    async with pair() as (server, client, context):
        raw = raw_client(context, client.endpoint)
        for frames in (
            [b"short", b""],
            [b"", b""],
            [bytes(8), b"\xc1"],
            [bytes(8), b"\x80", *[b""] * (MAX_PAYLOAD_FRAMES + 1)],
        ):
            await raw.send_multipart(frames)
        answers = [await asyncio.wait_for(raw.recv_multipart(), 30) for _ in range(2)]
        assert all(b"BadMessage" in answer[1] or b"UnknownMessage" in answer[1] for answer in answers)
        assert server.refusals.count == 4
        await raw.send_multipart([bytes(8), bytes(65 << 20)])  # over MAXMSGSIZE: closes this connection only
        raw.close()
        assert await client.call(wire.Done(), timeout_seconds=30)
        assert await client.call(wire.ListApps(), timeout_seconds=30)


async def test_invalid_field_name_as_long_as_a_message_gets_a_short_answer() -> None:
    async with pair() as (_, client, context):
        raw = raw_client(context, client.endpoint)
        fields = {"v": PROTOCOL_VERSION, "t": "failed", "code": "X", "details": {"k" * (3 << 20): []}}
        await raw.send_multipart([bytes(8), msgpack.packb(fields)])
        answer = await asyncio.wait_for(raw.recv_multipart(), 30)
        assert b"BadMessage" in answer[1]
        assert len(answer[1]) < 1000
        raw.close()
        assert await client.call(wire.Done(), timeout_seconds=30)


async def test_server_whose_messages_wait_has_not_worked() -> None:
    async with pair() as (server, client, context):
        await client.call(wire.Done(), timeout_seconds=30)
        assert server.has_worked()
        assert server.has_worked()  # nothing waits
        server._loop_task.cancel()
        raw = raw_client(context, client.endpoint)
        await raw.send_multipart([b"short", b""])
        await until("the message", lambda: not server.has_worked())
        raw.close()


async def test_idle_connections_leave_room_for_others() -> None:
    raise_file_limit()

    async with pair() as (server, client, context):
        with ExitStack() as stack:
            for _ in range(2000):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            late = RpcClient(context, client.endpoint, Access(CLIENT, SERVER.public), "late")
            assert await late.call(wire.Done(), timeout_seconds=10)
            assert await client.call(wire.Done(), timeout_seconds=10)
            await late.close()


async def test_flood_of_messages_leaves_time_for_other_tasks() -> None:
    async with pair() as (server, client, context):
        raw = raw_client(context, client.endpoint)
        await raw.send_multipart([b"short", b""])
        await until("the connection", lambda: server.refusals.count == 1)
        num_messages, turns = 900, 0  # fewer than the socket buffers, so that all of them wait
        for _ in range(num_messages):
            raw.send_multipart([b"short", b""])
        time.sleep(0.5)  # the loop does not run until they have arrived
        while server.refusals.count < num_messages:
            turns += 1
            await asyncio.sleep(0)
        assert turns > num_messages / 2
        raw.close()


async def test_flood_of_refused_messages_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.wire.intake._REFUSAL_BURST", 20.0)
    monkeypatch.setattr("hearth.wire.intake._REFUSALS_PER_SECOND", 0.1)

    async with pair() as (_, client, context):
        await client.call(wire.Done(), timeout_seconds=30)
        raw = raw_client(context, client.endpoint)
        monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for body in (b"\xc1", b"") * 15:
            await raw.send_multipart([b"short" if not body else bytes(8), body])
        assert await monitor.poll(10_000)
        assert await client.call(wire.Done(), timeout_seconds=30)
        raw.disable_monitor()
        raw.close()


async def test_calls_fail_on_connection_loss_and_client_reconnects() -> None:
    async with pair() as (server, client, _):
        await client.call(wire.Done(), timeout_seconds=30)
        waiting = asyncio.create_task(client.call(wire.ListDevices(), timeout_seconds=30))
        await until("the request", lambda: server.num_running)
        port = server.port
        await server.close()
        with pytest.raises(errors.ConnectionLost):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(errors.Unreachable):
            await client.call(wire.Done(), timeout_seconds=0.3)
        async with pair(port):
            assert await client.call(wire.Done(), timeout_seconds=30)


async def test_closing_ends_calls_that_wait_for_the_connection() -> None:
    with zmq_context() as context:
        client = RpcClient(context, "tcp://127.0.0.1:1", Access(CLIENT, SERVER.public), "test")
        waiting = asyncio.create_task(client.call(wire.Done(), timeout_seconds=600))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(errors.ConnectionLost):
            await asyncio.wait_for(waiting, 10)


async def test_port_in_use_error_names_the_option() -> None:
    async with pair() as (server, _, _):
        with zmq_context() as context, pytest.raises(errors.PortInUse, match="--port"):
            RpcServer(context, "127.0.0.1", server.port, SERVER, "test", echo)


async def test_request_is_authorised_before_it_is_decoded() -> None:
    def authorise(public_key: str, kind: type[wire.Message]) -> None:
        if kind is not wire.Hello:
            raise errors.NotAuthorised(role="app", action=f"send {kind.__name__}")

    async with pair(
        policy=Policy({kind.tag: kind for kind in (wire.Hello, wire.ListDevices)}, authorise, sizes=wire.CLIENT_SIZES)
    ) as (server, client, context):
        raw = raw_client(context, client.endpoint)
        for tag, error in (("list_devices", b"NotAuthorised"), ("load", b"UnknownMessage"), ("hello", b"BadMessage")):
            await raw.send_multipart(
                [bytes(8), msgpack.packb({"v": PROTOCOL_VERSION, "t": tag, "name": [None] * 9000})]
            )
            assert error in (await asyncio.wait_for(raw.recv_multipart(), 30))[1]
        raw.close()
        assert server.refusals.count == 3


async def test_requests_of_a_key_start_at_a_limited_rate_and_others_are_not_delayed() -> None:
    async with pair(policy=Policy(limits=lambda public_key: Limits(per_second=20.0, burst=5.0))) as (_, client, _):
        began = time.monotonic()
        await asyncio.gather(*(client.call(wire.Done(), timeout_seconds=30) for _ in range(15)))
        assert time.monotonic() - began > 0.4


async def test_key_whose_requests_hold_too_much_memory_is_refused() -> None:
    policy = Policy(limits=lambda public_key: Limits(total_bytes=1 << 20, request_bytes=1 << 20))
    async with pair(policy=policy) as (server, client, _):
        with pytest.raises(errors.FrameTooLarge):
            await client.call(wire.Done(), [bytes(2 << 20)], timeout_seconds=30)
        waiting = asyncio.create_task(client.call(wire.ListDevices(), [bytes(1 << 19)], timeout_seconds=30))
        await until("the request", lambda: server.num_running)
        with pytest.raises(errors.QueueFull):
            await client.call(wire.Done(), [bytes(700_000)], timeout_seconds=30)
        waiting.cancel()


# ---- streams --------------------------------------------------------------------------------------------------------

ENDLESS = 1_000_000


def stream(client: RpcClient, prompt: str, max_tokens: int, timeout_seconds: float = 5) -> AsyncGenerator[Reply, None]:
    closed.clear()
    request = wire.Generate(prompt=prompt, max_tokens=max_tokens)
    return client.stream(request, timeout_seconds=timeout_seconds, last=wire.TextEnded)


async def test_stream_arrives_in_order_up_to_its_last_message() -> None:
    async with pair() as (server, client, _):
        messages = [reply.message async for reply in stream(client, "all", 200)]
        assert messages[-1] == END
        assert [message.token_ids for message in messages[:-1]] == [(index,) for index in range(200)]  # type: ignore[union-attr]
        assert closed == ["all"]
        await until("the request's end", lambda: not server.num_running)
        assert not client.pending


async def test_error_inside_a_stream_ends_it_with_its_type() -> None:
    async with pair() as (_, client, _):
        received = []

        async def read() -> None:
            async for reply in stream(client, "broken", 20):
                received.append(reply)

        with pytest.raises(errors.TextTooLong) as error:
            await read()
        assert (len(received), error.value.index) == (10, 10)
        assert await client.call(wire.Done(), timeout_seconds=30)


@pytest.mark.parametrize("way", ["aclose", "cancel"])
async def test_abandoned_stream_is_closed_at_the_server(way: str) -> None:
    async with pair() as (server, client, _):
        began = asyncio.Event()

        async def read() -> None:
            async with aclosing(stream(client, way, ENDLESS)) as replies:
                async for _ in replies:
                    began.set()
                    if way == "aclose":
                        break

        reading = asyncio.create_task(read())
        await began.wait()
        if way == "cancel":
            reading.cancel()
        await asyncio.wait({reading})
        await until("the generator's end", lambda: closed == [way])
        await until("the end of all requests", lambda: not server.num_running)
        assert not client.pending


@pytest.mark.parametrize("limits", [{"timeout_seconds": 0.2}, {"timeout_seconds": 60, "total_seconds": 0.2}])
async def test_stream_is_cancelled_when_the_next_answer_times_out(limits: dict[str, float]) -> None:
    async with pair() as (server, client, _):
        await client.call(wire.Done(), timeout_seconds=30)  # the handshake has no part in the timeout
        late = client.stream(wire.ListDevices(), last=wire.Done, **limits)
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.2 s"):
            await anext(late)
        await until("the end of all requests", lambda: not server.num_running)
        assert not client.pending


async def test_streams_and_calls_run_concurrently() -> None:
    async with pair() as (_, client, _):

        async def read(index: int) -> list[str]:
            replies = [reply.message async for reply in stream(client, f"stream {index}", 50)]
            return [message.text for message in replies[:-1] if isinstance(message, wire.TextGenerated)]

        async with aclosing(stream(client, "endless", ENDLESS)) as endless:
            await anext(endless)
            found = await asyncio.gather(
                *(read(index) for index in range(8)), client.call(wire.Done(), timeout_seconds=30)
            )
            assert found[:8] == [[f"stream {index}"] * 50 for index in range(8)]
            assert found[8].message == wire.Done()
            await anext(endless)


async def test_only_the_requesting_connection_can_cancel() -> None:
    async with pair() as (_, client, context):
        async with aclosing(stream(client, "mine", ENDLESS)) as mine:
            await anext(mine)
            (request_id,) = client.pending
            other = raw_client(context, client.endpoint)
            for cancelled in (request_id, bytes(8)):
                await other.send_multipart([b"12345678", wire.encode(wire.Cancel(request=cancelled))])
            await other.send_multipart([b"the last", wire.encode(wire.Done())])
            assert (await asyncio.wait_for(other.recv_multipart(), 30))[0] == b"the last"
            for _ in range(20):
                await anext(mine)
            assert not closed
            other.close()
        await until("the generator's end", lambda: closed == ["mine"])


async def test_request_cancelled_before_it_runs_is_removed() -> None:
    async with pair() as (server, client, context):
        raw = raw_client(context, client.endpoint)
        for index in range(50):
            request_id = index.to_bytes(8, "big")
            await raw.send_multipart([request_id, wire.encode(wire.Generate(prompt="early", max_tokens=ENDLESS))])
            await raw.send_multipart([b"a cancel", wire.encode(wire.Cancel(request=request_id))])
        await raw.send_multipart([b"the last", wire.encode(wire.Done())])
        while (await asyncio.wait_for(raw.recv_multipart(), 30))[0] != b"the last":
            pass
        await until("the end of all requests", lambda: not server.num_running)
        raw.close()


async def test_disconnected_caller_is_noticed_at_the_next_answer() -> None:
    async with pair() as (_, client, context):
        closed.clear()
        other = raw_client(context, client.endpoint)
        await other.send_multipart([bytes(8), wire.encode(wire.Generate(prompt="gone", max_tokens=ENDLESS))])
        await asyncio.wait_for(other.recv_multipart(), 30)
        other.close()  # as if its process was killed: no Cancel
        await until("the generator's end", lambda: closed == ["gone"])
        assert await client.call(wire.Done(), timeout_seconds=30)


async def test_stalled_caller_blocks_no_other_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_STALLED_SECONDS", 3.0)

    async with pair(sndhwm=10) as (_, client, context):
        raw = raw_client(context, client.endpoint, rcvhwm=10)
        closed.clear()
        await raw.send_multipart([bytes(8), wire.encode(wire.Generate(prompt="large", max_tokens=ENDLESS))])
        answered_before = 0
        while not closed:
            await client.call(wire.Done(), timeout_seconds=30)
            answered_before += not closed  # while the other caller's buffer is full
            await asyncio.sleep(0.01)
        assert answered_before
        raw.close()


async def test_connection_loss_ends_a_stream() -> None:
    async with pair() as (server, client, _):
        reading = stream(client, "lost", ENDLESS, timeout_seconds=30)
        await anext(reading)
        await server.close()
        with pytest.raises(errors.ConnectionLost):
            async for _reply in reading:
                pass
        with pytest.raises(errors.Unreachable):
            await anext(stream(client, "nobody", 1, timeout_seconds=0.3))


async def test_requests_of_a_revoked_key_end_at_once() -> None:
    async with pair() as (server, client, _):

        async def read() -> None:
            async for _ in stream(client, "revoked", ENDLESS):
                pass

        reading = asyncio.create_task(read())
        waiting = asyncio.create_task(client.call(wire.ListDevices(), timeout_seconds=30))
        await until("both requests", lambda: server.num_running == 2)
        await server.end_requests("another key", errors.AppRevoked(app="lamp"))
        assert server.num_running == 2
        await server.end_requests(CLIENT.public, errors.AppRevoked(app="lamp"))
        for ended in (reading, waiting):
            with pytest.raises(errors.AppRevoked):
                await asyncio.wait_for(ended, 30)
        assert closed == ["revoked"]


async def test_servers_can_follow_one_another_on_one_port() -> None:
    port = 0
    for _ in range(4):
        async with pair(port) as (server, client, _context):
            await client.hello(wire.CoordinatorWelcome, timeout_seconds=5.0)
            port = server.port


def test_stopped_server_is_noticed_sooner_by_a_client_that_can_go_elsewhere() -> None:
    """A process that is stopped keeps its TCP connections open."""
    code = """
import asyncio, sys, zmq.asyncio
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.loop_gatekeeper import LoopGatekeeper
from hearth.platform.curve import KeyPair
from hearth.wire.messages import Done
from hearth.wire.rpc import RpcServer

async def handle(caller, message, payload):
    await asyncio.sleep(60)
    return Done()

async def main():
    context = zmq.asyncio.Context()
    gatekeeper = LoopGatekeeper(context)
    gatekeeper.admit("d", lambda key: True)
    gatekeeper.start()
    print(RpcServer(context, "127.0.0.1", 0, KeyPair(*sys.argv[1:]), "d", handle).port, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    server_keys = new_keypair()
    with subprocess.Popen([sys.executable, "-c", code, *server_keys], stdout=subprocess.PIPE) as server:
        try:
            port = int(server.stdout.readline())

            async def scenario() -> None:
                context = zmq.asyncio.Context()
                access = Access(new_keypair(), server_keys.public)
                endpoint = f"tcp://127.0.0.1:{port}"
                clients = [RpcClient(context, endpoint, access, "client", quick=quick) for quick in (True, False)]
                quick, patient = [asyncio.ensure_future(each.call(wire.Done(), timeout_seconds=50)) for each in clients]
                try:
                    while not all(each.pending for each in clients):
                        await asyncio.sleep(0.01)
                    server.send_signal(signal.SIGSTOP)
                    with pytest.raises(errors.ConnectionLost):
                        await quick
                    assert not patient.done()
                finally:
                    await cancel_all([quick, patient])
                    for each in clients:
                        await each.close()
                    context.destroy(linger=0)

            asyncio.run(scenario())
        finally:
            server.kill()
