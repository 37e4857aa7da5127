"""Finding a coordinator: forged mDNS records, several addresses, refused keys."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from simulation.clock import VirtualLoop
from support.servers import rpc_server
from support.waiting import until

from hearth import errors
from hearth.client import connection as connection_module
from hearth.client import sync
from hearth.client.connection import Connection
from hearth.client.home import AsyncHome, _Repeats
from hearth.platform.discovery import COORDINATOR_SERVICE, advertised
from hearth.platform.security import Access, HomeKey, derive_keypair, new_home_key
from hearth.wire import messages as wire
from hearth.wire.rpc import ACCEPT_ALL, Caller, Handler, Policy, Response

KEY = new_home_key()
LOOPBACK = ["127.0.0.1"]
FOUND_WITHIN_SECONDS = 60.0  # long enough for a busy machine


def access(key: HomeKey = KEY) -> Access:
    keys = derive_keypair(key.key_bytes(), "coordinator")
    return Access(keys, keys.public)


async def handle(caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
    if isinstance(message, wire.Hello):
        return wire.CoordinatorWelcome(version="0", name="test")
    return wire.Readiness(ready=True, state="serving", model="m")


def refuses(num_refusals: float) -> Handler:
    """The handler of a coordinator that starts, or takes over: it refuses this many requests, and then serves."""

    async def refuse_at_first(caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        nonlocal num_refusals
        if num_refusals > 0:
            num_refusals -= 1
            raise errors.NotServing(state="the coordinator is starting")
        return await handle(caller, message, payload)

    return refuse_at_first


@asynccontextmanager
async def coordinator(
    key: HomeKey = KEY, admits: bool = True, port: int = 0, policy: Policy = ACCEPT_ALL, handler: Handler = handle
) -> AsyncIterator[int]:
    """A coordinator; yields its port."""
    keys = derive_keypair(key.key_bytes(), "coordinator")
    async with rpc_server(keys, handler, port, lambda _: admits, policy) as server:
        yield server.port


def record(port: int) -> Any:
    """Advertise a coordinator of this home at this port, as everybody can who has a key of the home."""
    own = access().server_public
    return advertised(COORDINATOR_SERVICE, port, own, secrets.token_hex(8), lambda: LOOPBACK)


async def test_records_that_lead_nowhere_mislead_no_client() -> None:
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other_home = await stack.enter_async_context(coordinator(new_home_key()))
        for port in (1, silent.getsockname()[1], other_home):
            await stack.enter_async_context(record(port))
        connection = Connection(access(), None, LOOPBACK)
        try:
            with pytest.raises((errors.NoCoordinator, errors.WrongKey)):
                await connection.client(None, 2.0)
            port = await stack.enter_async_context(coordinator())
            await stack.enter_async_context(record(port))
            found = await connection.client(None, FOUND_WITHIN_SECONDS)
            assert found.endpoint == f"tcp://127.0.0.1:{port}"
        finally:
            await connection.close()


async def test_last_endpoint_is_tried_first_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where multicast is blocked by then, or records are forged. It is only a hint: the key decides."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))

    async def endpoint(seconds: float = FOUND_WITHIN_SECONDS) -> str:
        connection = Connection(access(), None, LOOPBACK)
        try:
            return (await connection.client(None, seconds)).endpoint
        finally:
            await connection.close()

    async with coordinator() as port:
        async with record(port):
            assert await endpoint() == f"tcp://127.0.0.1:{port}"
        (hint,) = (tmp_path / "hearth").iterdir()
        assert (hint.read_text(), hint.stat().st_mode & 0o777) == (f"127.0.0.1:{port}", 0o600)
        monkeypatch.setattr("hearth.platform.discovery.Browser.start", no_multicast)
        assert await endpoint() == f"tcp://127.0.0.1:{port}"
    async with coordinator(new_home_key(), port=port):  # another home has this address now
        with pytest.raises((errors.NoCoordinator, errors.WrongKey)):
            await endpoint(2.0)
    for damage in (b"", b"a b:0", b"\xff", b"tcp://127.0.0.1:1"):
        hint.write_bytes(damage)
        with pytest.raises(errors.NoCoordinator):
            await endpoint(0.3)


async def no_multicast(browser: object) -> None:
    raise OSError("blocked")


@pytest.mark.parametrize("disk_hangs", [False, True])
async def test_cache_folder_that_cannot_be_used_stops_no_client(
    disk_hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "file"))
    if disk_hangs:
        monkeypatch.setattr(connection_module, "_HINT_SECONDS", 0.05)
        monkeypatch.setattr(Path, "read_text", lambda path: time.sleep(0.5))
        monkeypatch.setattr(connection_module, "write_atomically", lambda *_, **__: time.sleep(0.5))
    async with coordinator() as port, record(port):
        connection = Connection(access(), None, LOOPBACK)
        assert (await connection.client(None, FOUND_WITHIN_SECONDS)).endpoint == f"tcp://127.0.0.1:{port}"
        await connection.close()


async def test_first_address_that_answers_is_used() -> None:
    async with coordinator() as port, AsyncHome(access(), f"127.0.0.1:1, 127.0.0.1:{port}", None) as home:
        await home.open(FOUND_WITHIN_SECONDS)
        assert await home.ready(FOUND_WITHIN_SECONDS)


@pytest.mark.parametrize("by_mdns", [False, True])
async def test_standby_that_refuses_while_it_takes_over_is_asked_again(
    by_mdns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is stopped: the kernel of its computer accepts connections, and nobody answers."""
    async with AsyncExitStack() as stack:
        stopped = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports = [stopped.getsockname()[1], await stack.enter_async_context(coordinator(handler=refuses(2)))]
        if by_mdns:
            for port in ports:
                await stack.enter_async_context(record(port))
        addresses = None if by_mdns else ",".join(f"127.0.0.1:{port}" for port in ports)
        connection = Connection(access(), addresses, LOOPBACK)
        stack.push_async_callback(connection.close)
        found = await connection.client(None, FOUND_WITHIN_SECONDS)
        assert found.endpoint == f"tcp://127.0.0.1:{ports[1]}"


async def test_only_coordinator_is_asked_again_while_it_starts() -> None:
    async with coordinator(handler=refuses(2)) as port, AsyncHome(access(), f"127.0.0.1:{port}", None) as home:
        await home.open(FOUND_WITHIN_SECONDS)
        assert await home.ready(FOUND_WITHIN_SECONDS)


async def test_coordinator_that_does_not_serve_in_time_is_reported() -> None:
    async with coordinator(handler=refuses(math.inf)) as port:
        connection = Connection(access(), f"127.0.0.1:{port}", None)
        with pytest.raises(errors.NotServing):
            await connection.client(None, 2.0)
        await connection.close()


async def test_refused_key_is_reported_before_the_timeout() -> None:
    async with coordinator(admits=False) as port:
        for addresses in (f"127.0.0.1:{port}", f"127.0.0.1:{port},127.0.0.1:{port}"):
            connection = Connection(access(), addresses, None)
            with pytest.raises(errors.WrongKey):
                await asyncio.wait_for(connection.client(None, 600.0), FOUND_WITHIN_SECONDS)
            await connection.close()


def _refuse(public_key: str, kind: type[wire.Message]) -> None:
    raise errors.AppRevoked(app="lamp")


@pytest.mark.parametrize(
    ("refusal", "error"),
    [({"admits": False}, errors.WrongKey), ({"policy": Policy(authorise=_refuse)}, errors.AppRevoked)],
)
async def test_search_over_mdns_ends_when_the_key_is_refused(
    refusal: dict[str, Any], error: type[errors.HearthError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_REFUSED_SECONDS", 0.2)

    async with coordinator(**refusal) as port, record(port):
        connection = Connection(access(), None, LOOPBACK)
        with pytest.raises(error):
            await asyncio.wait_for(connection.client(None, 600.0), FOUND_WITHIN_SECONDS)
        await connection.close()


async def test_coordinator_is_found_next_to_one_that_refuses_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_REFUSED_SECONDS", FOUND_WITHIN_SECONDS)

    async with coordinator(admits=False) as forged, record(forged), coordinator() as port, record(port):
        connection = Connection(access(), None, LOOPBACK)
        assert (await connection.client(None, FOUND_WITHIN_SECONDS)).endpoint == f"tcp://127.0.0.1:{port}"
        await connection.close()


async def test_server_that_hangs_in_the_handshake_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = Connection(access(), f"127.0.0.1:{silent.getsockname()[1]}", None)
        connection._context.setsockopt(zmq.HANDSHAKE_IVL, 100)  # ZeroMQ gives a handshake up after this many ms
        with pytest.raises(errors.Unreachable):
            await connection.client(None, 1.0)
        await connection.close()


async def test_call_waits_for_the_search_of_another_one_only_until_its_own_deadline() -> None:
    connection = Connection(access(), "127.0.0.1:1", None)
    searching = asyncio.create_task(connection.client(None, 600.0))
    await asyncio.sleep(0)
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises(errors.Unreachable):
        await connection.client(None, 0.3)
    assert clock() - began < 1.2  # less than a second late
    assert not searching.done()
    await connection.close()
    await asyncio.gather(searching, return_exceptions=True)


def test_call_is_repeated_soon_after_a_failover_but_does_not_flood_a_home_that_is_down() -> None:
    """Each pause costs at most a tenth of the time for which there was no coordinator, on a clock that jumps to it."""

    async def attempts() -> list[float]:
        clock = asyncio.get_running_loop().time
        repeats = _Repeats(60.0, SimpleNamespace(closed=False))  # type: ignore[arg-type]
        times = [clock()]
        try:
            while True:
                await repeats.pause(errors.Unreachable(endpoint="x", seconds=1.0))
                times.append(clock())
        except errors.Unreachable:
            return times

    loop = VirtualLoop()
    try:
        times = loop.run_until_complete(attempts())
    finally:
        loop.close()
    for before, after in pairwise(times):
        assert after - before <= max(0.05, 0.1 * before) + 1e-9
        assert after - before <= 0.5 + 1e-9
    assert 55.0 < times[-1] < 60.0
    assert len(times) < 200


async def test_closing_ends_a_search() -> None:
    connection = Connection(access(), "127.0.0.1:1", None)
    searching = asyncio.create_task(connection.client(None, 600.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await connection.close()
    with pytest.raises(errors.ConnectionLost):
        await asyncio.wait_for(searching, FOUND_WITHIN_SECONDS)


def test_blocking_client_that_cannot_be_closed_in_time_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: AsyncHome) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sync, "_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(AsyncHome, "close", hang)
    home = sync.Home(AsyncHome(access(), "127.0.0.1:1", None))
    home.close()
    with pytest.raises(errors.ConnectionLost):
        home.ready()


async def test_waiting_for_readiness_outlasts_a_restart() -> None:
    async with coordinator() as port:
        home = AsyncHome(access(), f"127.0.0.1:{port}", None)
        await home.open(FOUND_WITHIN_SECONDS)
    with pytest.raises(errors.DeadlineExceeded, match="getting ready"):
        await home.wait_ready(0.3)
    waiting = asyncio.create_task(home.wait_ready(FOUND_WITHIN_SECONDS))
    await asyncio.sleep(0.3)
    async with coordinator(port=port):
        await waiting
    await home.close()


@pytest.mark.parametrize("first_one", ["is gone", "refuses the key"])
async def test_call_goes_to_another_coordinator_if_the_first_one(first_one: str) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        port = await first.enter_async_context(coordinator())
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other_port = other.getsockname()[1]
        home = AsyncHome(access(), f"127.0.0.1:{port},127.0.0.1:{other_port}", None)
        stack.push_async_callback(home.close)
        await home.open(FOUND_WITHIN_SECONDS)
        present = home._connection._client
        assert present is not None
        await first.aclose()
        await until("the end of the connection", lambda: not present.is_connected)
        if first_one == "refuses the key":
            await stack.enter_async_context(coordinator(port=port, admits=False))
            await until("the refusal", lambda: present._refused)
        await stack.enter_async_context(coordinator(port=other_port))
        assert await asyncio.wait_for(home.ready(600.0), FOUND_WITHIN_SECONDS)
