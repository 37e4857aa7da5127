"""The client port with its real process: requests, answers, streams, revocation, and the death of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from support.contexts import zmq_context
from support.waiting import until

from coordinator.serve.clients import client_port as client_port_module
from coordinator.serve.clients.client_port import ClientPort, client_port
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from hearth import errors
from hearth.platform.curve import KeyPair, new_keypair
from hearth.platform.security import Access, derive_keypair, new_home_key
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Reply, Response, RpcClient, caller_may_return

HOME = new_home_key()
ADMIN = derive_keypair(HOME.key_bytes(), "admin")
END = wire.TextEnded(
    text="", reason="length", num_prompt_tokens=1, num_tokens=1, queued_seconds=0, first_token_seconds=0,
    decode_seconds=0,
)  # fmt: skip


class Home:
    """A client port whose handler answers like a coordinator, an app's key, and clients."""

    def __init__(self, port: ClientPort, trust: Trust, context: zmq.asyncio.Context) -> None:
        self.port = port
        self.trust = trust
        self.context = context
        self.app = new_keypair()
        self.callers: list[str] = []
        self.closed: list[str] = []  # prompts of streams that have ended, in any way
        self.may_return: list[bool] = []  # of these, whether their callers may ask for the rest
        self.clients: list[RpcClient] = []
        trust.apps.add("lamp", self.app.public)

    async def handle(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        self.callers.append(caller.public_key)
        if isinstance(message, wire.Generate):
            return self.generate(message)
        if isinstance(message, wire.GetReadiness):
            return wire.Readiness(ready=True, state="serving", model="m")
        if isinstance(message, wire.Embed):
            raise errors.TextTooLong(index=0, num_tokens=9, max_tokens=8)
        if isinstance(message, wire.ListDevices):
            await asyncio.sleep(60)
        return Reply(wire.Done(), [bytes(frame) for frame in payload])

    async def generate(self, request: wire.Generate) -> AsyncGenerator[Reply, None]:
        """`max_tokens` answers, with the prompt `large` of 1 MiB each."""
        assert request.max_tokens is not None
        try:
            for index in range(request.max_tokens):
                await asyncio.sleep(0.001)
                payload = [bytes(1 << 20)] if request.prompt == "large" else []
                yield Reply(wire.TextGenerated(token_ids=(index,), text=""), payload)
            yield Reply(END)
        finally:
            self.closed.append(request.prompt or "")
            self.may_return.append(caller_may_return())

    def client(self, keys: KeyPair = ADMIN, host: str = "127.0.0.1") -> RpcClient:
        access = Access(keys, self.trust.keypair.public)
        self.clients.append(RpcClient(self.context, f"tcp://{host}:{self.port.port}", access, "test"))
        return self.clients[-1]

    @property
    def process_id(self) -> int:
        assert self.port.process_id is not None
        return self.port.process_id


@asynccontextmanager
async def home_in(folder: Path, bind_host: str = "127.0.0.1", **settings: Any) -> AsyncIterator[Home]:
    made = CoordinatorSettings(state_dir=folder, port=0, bind_host=bind_host, **settings)
    trust = Trust(made, HOME)
    with zmq_context() as context:
        async with client_port(made, trust) as port:
            all_of_it = Home(port, trust, context)
            async with port.serving(all_of_it.handle):
                try:
                    yield all_of_it
                finally:
                    for client in all_of_it.clients:
                        await client.close()


@pytest.fixture
def home(tmp_path: Path) -> AbstractAsyncContextManager[Home]:
    return home_in(tmp_path)


async def tokens(client: RpcClient, prompt: str, count: int) -> int:
    """Read a whole stream; returns the number of its tokens."""
    received = 0
    stream = client.stream(wire.Generate(prompt=prompt, max_tokens=count), timeout_seconds=20, last=wire.TextEnded)
    async with aclosing(stream) as replies:
        async for reply in replies:
            received += isinstance(reply.message, wire.TextGenerated)
    return received


async def test_requests_streams_and_errors_pass_through_the_gateway(home: Home) -> None:
    client = home.client(home.app)
    assert (await client.call(wire.GetReadiness(), timeout_seconds=20)).message == wire.Readiness(
        ready=True, state="serving", model="m"
    )
    frames = [b"a" * 3_000_000, b"", b"b"]
    reply = await client.call(wire.Infer(names=()), frames, timeout_seconds=20)
    assert [bytes(frame) for frame in reply.payload] == frames
    assert await tokens(client, "small", 50) == 50
    assert await tokens(client, "large", 20) == 20
    with pytest.raises(errors.TextTooLong):
        await client.call(wire.Embed(texts=("a",)), timeout_seconds=20)
    assert set(home.callers) == {home.app.public}
    assert home.port.num_running == 0


async def test_closing_a_stream_cancels_it_in_the_coordinator(home: Home) -> None:
    client = home.client()
    stream = client.stream(wire.Generate(prompt="p", max_tokens=100_000), timeout_seconds=20, last=wire.TextEnded)
    async with aclosing(stream) as replies:
        async for _ in replies:
            break
    await until("the end of the stream", lambda: home.closed == ["p"] and home.port.num_running == 0)
    assert home.may_return == [False]


async def test_request_of_a_client_that_is_gone_is_cancelled(home: Home) -> None:
    client = home.client()
    stream = client.stream(wire.Generate(prompt="p", max_tokens=100_000), timeout_seconds=20, last=wire.TextEnded)
    await anext(stream)
    home.clients.remove(client)
    await client.close()
    with suppress(errors.ConnectionLost):
        await stream.aclose()
    await until("the end of the stream", lambda: home.closed == ["p"])
    assert home.may_return == [True]  # on another connection


async def test_roles_are_checked_and_refusals_counted(tmp_path: Path) -> None:
    async with home_in(tmp_path, app_request_bytes=1 << 20) as home:
        app = home.client(home.app)
        with pytest.raises(errors.NotAuthorised):
            await app.call(wire.ListDevices(), timeout_seconds=20)
        with pytest.raises(errors.FrameTooLarge):
            await app.call(wire.Infer(names=()), [bytes(2 << 20)], timeout_seconds=20)
        with pytest.raises(errors.BadMessage):
            await app.call(wire.Generate(prompt="p", max_tokens=1), [b""] * 65, timeout_seconds=20)
        with pytest.raises(errors.WrongKey):
            await home.client(new_keypair()).call(wire.GetReadiness(), timeout_seconds=20)
        assert home.callers == []
        await until(
            "counts", lambda: home.port.counters.refused_requests == 3 and home.port.counters.refused_connections > 0
        )


async def test_apps_may_send_what_their_roles_permit(home: Home) -> None:
    watch, measure, ask = wire.WatchEvents(), wire.GetMetrics(), wire.GetModelInfo()
    # The process runs, and hears of changes at once.
    await home.client().call(wire.GetReadiness(), timeout_seconds=20)
    permitted = {"app": (ask,), "metrics": (measure,), "observer": (ask, measure, watch)}
    for role, theirs in permitted.items():
        keys = new_keypair()
        home.trust.apps.add(role, keys.public, role)
        home.port.change_access()
        await home.client().call(wire.GetReadiness(), timeout_seconds=20)
        client = home.client(keys)
        for message in (watch, measure, ask):
            if message in theirs:
                await client.call(message, timeout_seconds=20)
            else:
                with pytest.raises(errors.NotAuthorised, match=f"role '{role}'"):
                    await client.call(message, timeout_seconds=20)
        with pytest.raises(errors.NotAuthorised):
            await client.call(wire.ListDevices(), timeout_seconds=20)


async def test_new_app_may_connect_at_once_and_revoked_one_is_ended_at_once(home: Home) -> None:
    await home.client().call(wire.GetReadiness(), timeout_seconds=20)
    blind = new_keypair()
    home.trust.apps.add("blind", blind.public)
    home.port.change_access()
    # The answer of `add_app` follows the change likewise.
    await home.client().call(wire.GetReadiness(), timeout_seconds=20)
    client = home.client(blind)
    stream = client.stream(wire.Generate(prompt="p", max_tokens=100_000), timeout_seconds=20, last=wire.TextEnded)
    await anext(stream)
    home.trust.apps.revoke("blind")
    home.port.change_access()
    await home.port.end_requests(blind.public, errors.AppRevoked(app="blind"))
    with pytest.raises(errors.AppRevoked):
        async for _ in stream:
            pass
    assert home.closed == ["p"]
    with pytest.raises(errors.AppRevoked):
        await client.call(wire.GetReadiness(), timeout_seconds=20)


async def test_app_that_is_added_while_the_process_starts_may_connect(home: Home) -> None:
    await until("a process", lambda: home.port.process_id is not None)
    added = new_keypair()
    home.trust.apps.add("blind", added.public)
    home.port.change_access()
    await home.client().call(wire.GetReadiness(), timeout_seconds=20)  # the process has started
    while True:  # until the next tick
        try:
            await home.client(added).call(wire.GetReadiness(), timeout_seconds=20)
            return
        except errors.WrongKey:
            await asyncio.sleep(0.1)


async def test_connection_of_a_revoked_app_ends_if_it_goes_on_asking(home: Home) -> None:
    client, other = home.client(home.app), home.client()
    await client.call(wire.GetReadiness(), timeout_seconds=20)
    home.trust.apps.revoke("lamp")
    home.port.change_access()
    await other.call(wire.GetReadiness(), timeout_seconds=20)
    failures: list[type[Exception]] = []
    ended = asyncio.Event()
    client.on_disconnect = ended.set
    while not ended.is_set():
        calls = [client.call(wire.GetReadiness(), timeout_seconds=20) for _ in range(20)]
        failures += [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)]  # type: ignore[misc]
    assert set(failures) <= {errors.AppRevoked, errors.ConnectionLost, errors.Unreachable}
    assert 0 < failures.count(errors.AppRevoked) < 70
    await other.call(wire.GetReadiness(), timeout_seconds=20)
    assert len(home.callers) == 3


async def test_coordinator_refuses_a_revoked_key_that_its_process_still_admits(home: Home) -> None:
    client = home.client(home.app)
    await client.call(wire.GetReadiness(), timeout_seconds=20)
    os.kill(home.process_id, signal.SIGSTOP)
    asking = asyncio.ensure_future(client.call(wire.GetReadiness(), timeout_seconds=20))
    await asyncio.sleep(0.05)
    home.trust.apps.revoke("lamp")  # the process is not told: it gets this message before the rules
    home.port.change_access = lambda: None  # type: ignore[method-assign]
    os.kill(home.process_id, signal.SIGCONT)
    with pytest.raises(errors.AppRevoked):
        await asking
    assert len(home.callers) == 1


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_process_that_dies_or_hangs_is_replaced_and_clients_reach_it_again(
    home: Home, fault: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    client = home.client()
    assert await tokens(client, "before", 3) == 3
    running = asyncio.ensure_future(tokens(client, "cut", 100_000))
    await until("the request", lambda: home.port.num_running == 1)
    before = home.process_id
    os.kill(before, fault)
    with pytest.raises(errors.ConnectionLost):
        await running
    await until("the end of the streams", lambda: home.closed == ["before", "cut"] and home.port.num_running == 0)
    assert await tokens(client, "after", 3) == 3
    assert home.process_id != before
    assert not [record for record in caplog.records if record.exc_info]


async def test_process_starts_as_soon_as_a_folder_takes_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = client_port_module.SocketFolder
    attempts = iter(["full", "full between the folder and its socket"])

    def folder(prefix: str) -> Any:
        fault = next(attempts, None)
        if fault == "full":
            raise OSError("no temporary folder takes a socket (/tmp: No space left on device)")
        one = made(prefix)
        if fault is not None:
            one.path = one.path / "absent"
        return one

    monkeypatch.setattr(client_port_module, "SocketFolder", folder)
    async with home_in(tmp_path) as home:
        assert await tokens(home.client(), "small", 3) == 3
        starts = [record.getMessage() for record in caplog.records if "started again" in record.getMessage()]
        assert len(starts) == 2
        assert "could not be started: no temporary folder takes a socket (/tmp: No space left on device)" in starts[0]
        assert "No such file or directory" in starts[1]


async def test_stall_of_the_event_loop_keeps_the_gateway(home: Home) -> None:
    client = home.client()
    await client.call(wire.GetReadiness(), timeout_seconds=20)
    before = home.process_id
    time.sleep(1.75)
    assert await tokens(client, "p", 3) == 3
    await asyncio.sleep(0.3)  # for one more check of the process
    assert home.process_id == before


async def test_requests_that_run_when_a_role_ends_are_told(tmp_path: Path) -> None:
    with zmq_context() as context:
        settings = CoordinatorSettings(state_dir=tmp_path, port=0, bind_host="127.0.0.1")
        trust = Trust(settings, HOME)
        async with client_port(settings, trust) as port:
            one = Home(port, trust, context)
            client = one.client()
            async with port.serving(one.handle):
                await client.call(wire.GetReadiness(), timeout_seconds=20)
                waiting = asyncio.ensure_future(client.call(wire.ListDevices(), timeout_seconds=20))
                await until("the request", lambda: port.num_running == 1)
            with pytest.raises(errors.NotServing):
                await waiting
            with pytest.raises(errors.NotServing):  # until the next role begins
                await client.call(wire.GetReadiness(), timeout_seconds=20)
        with pytest.raises((errors.ConnectionLost, errors.Unreachable)):
            await client.call(wire.GetReadiness(), timeout_seconds=0.5)
        await client.close()


FLOOD = """
import sys, time
import zmq
from hearth.platform.curve import KeyPair, secure_client
from hearth.wire.messages import Infer, encode

port, server_key, public, secret = sys.argv[1:]
sender = zmq.Context().socket(zmq.DEALER)
secure_client(sender, KeyPair(public, secret), server_key)
sender.connect(f"tcp://127.0.0.1:{port}")
frame = bytes(60 << 20)
sender.send_multipart([bytes(8), encode(Infer(names=()))] + [frame] * 30, copy=False)
time.sleep(60)
"""


async def test_message_of_many_large_frames_costs_its_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 frames of 60 MiB: the coordinator gets none of them, and clients go on with the same process."""
    monkeypatch.setattr("coordinator.serve.clients.client_port._SPARE_BYTES", -512 << 20)  # then the limit is 256 MiB
    async with home_in(tmp_path) as home:
        good = home.client()
        await good.call(wire.GetReadiness(), timeout_seconds=20)
        first, before = home.process_id, peak_bytes()
        arguments = (str(home.port.port), home.trust.keypair.public, *home.app)
        sender = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, *arguments)
        try:
            await until("bytes", lambda: home.port.process_id != first or memory_bytes(first, "VmHWM") > 200 << 20)
            await until("their end", lambda: home.port.process_id != first or memory_bytes(first, "VmRSS") < 100 << 20)
            assert home.port.process_id == first
        finally:
            sender.kill()
            await sender.wait()
        await until_answered(good)
        assert peak_bytes() - before < 50 << 20
        assert set(home.callers) == {ADMIN.public}


async def test_frames_that_strangers_announce_and_do_not_send_harm_nobody(home: Home) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(52, b"\0")
    large = b"\x06" + (64 << 20).to_bytes(8, "big") + b"HELLO"  # the head of a command of 64 MiB
    client = home.client(home.app)
    await client.call(wire.GetReadiness(), timeout_seconds=20)
    first = home.process_id
    with ExitStack() as stack:
        for _ in range(60):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", home.port.port)))
            stranger.sendall(greeting + large)
        await asyncio.sleep(0.2)  # for ZeroMQ to make room for them
        for _ in range(5):
            await client.call(wire.Infer(names=()), [bytes(3_000_000)], timeout_seconds=10)
    assert home.process_id == first


async def until_answered(client: RpcClient) -> None:
    while True:
        try:
            await client.call(wire.GetReadiness(), timeout_seconds=20)
            return
        except errors.ConnectionLost:
            pass


def peak_bytes() -> int:
    return memory_bytes(os.getpid(), "VmHWM")


def memory_bytes(pid: int, field: str) -> int:
    with suppress(OSError):  # the process has ended
        if field in (status := Path(f"/proc/{pid}/status").read_text()):
            return int(status.partition(f"{field}:")[2].split()[0]) << 10
    return 0


async def test_port_in_use_and_impossible_addresses_are_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = CoordinatorSettings(state_dir=tmp_path, port=other.getsockname()[1], bind_host="127.0.0.1")
        with pytest.raises(errors.PortInUse, match="--port"):
            ClientPort(settings, Trust(settings, HOME))
    settings = CoordinatorSettings(state_dir=tmp_path, port=0, bind_host="192.0.2.1")
    with pytest.raises(errors.BadSetting, match=r"192\.0\.2\.1"):
        ClientPort(settings, Trust(settings, HOME))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6_address_is_listened_on(tmp_path: Path) -> None:
    with suppress(errors.BadSetting):  # a host without an IPv6 loopback address
        async with home_in(tmp_path, bind_host="::1") as home:
            home.context.setsockopt(zmq.IPV6, 1)
            assert await tokens(home.client(host="[::1]"), "small", 3) == 3
