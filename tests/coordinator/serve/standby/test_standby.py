"""What a standby answers before it leads, and how it finds its leader."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers import rpc_server
from support.waiting import until
from zeroconf.asyncio import AsyncServiceBrowser

from coordinator.serve.clients.client_port import client_port
from coordinator.serve.clients.trust import Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.standby import standby as module
from coordinator.serve.standby.standby import Standby
from coordinator.serve.state import StateFile
from hearth.errors import NotServing
from hearth.platform import discovery
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.discovery import COORDINATOR_SERVICE, DiscoveredService
from hearth.platform.security import HomeKey, derive_keypair, new_home_key
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Reply, Response


@asynccontextmanager
async def standby_of(home: HomeKey, folder: Path, leaders: Sequence[str] = ()) -> AsyncIterator[Standby]:
    """A standby that does not run yet, with its open port."""
    settings = CoordinatorSettings(state_dir=folder, name="attic", port=0, bind_host="127.0.0.1")
    trust = Trust(settings, home)
    async with client_port(settings, trust) as port:
        yield Standby(settings, home, lambda line: None, trust, StateFile(folder), port, leaders)


@asynccontextmanager
async def running(standby: Standby) -> AsyncIterator[None]:
    """Run a standby until the context ends."""
    task = asyncio.create_task(standby.run())
    try:
        yield
    finally:
        await cancel_all([task])


async def test_only_administrators_learn_the_name_of_the_leader(tmp_path: Path) -> None:
    home = new_home_key()
    admin = Caller(derive_keypair(home.key_bytes(), "admin").public)

    async with (
        leading(home) as port, standby_of(home, tmp_path, [f"127.0.0.1:{port}"]) as standby, running(standby)
    ):  # fmt: skip
        await until("the leader", lambda: "kitchen" in standby.state, seconds=20)
        for caller, learns in ((admin, True), (Caller("an app"), False)):
            ready = await standby.handle(caller, wire.GetReadiness(request_id="1", timeout_seconds=1.0), ())
            assert isinstance(ready, wire.Readiness)
            assert ("kitchen" in ready.state) is learns
            with pytest.raises(NotServing) as refused:
                await standby.handle(caller, wire.GetModelInfo(request_id="2", timeout_seconds=1.0), ())
            assert ("kitchen" in str(refused.value)) is learns


async def nothing_to_copy() -> AsyncGenerator[Reply, None]:
    while True:
        yield Reply(wire.LeaderAlive(name="kitchen", is_complete=False, configuration=None))
        await asyncio.sleep(0.05)


@asynccontextmanager
async def leading(
    home: HomeKey, state: Callable[[], AsyncGenerator[Reply, None]] = nothing_to_copy
) -> AsyncIterator[int]:
    """A leader called "kitchen" that sends this state to each standby; yields its port."""

    async def handle(caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        return state() if isinstance(message, wire.Follow) else wire.CoordinatorWelcome(version="0", name="kitchen")

    async with rpc_server(derive_keypair(home.key_bytes(), "coordinator"), handle) as server:
        yield server.port


async def test_forged_records_do_not_keep_a_standby_from_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody who has a key of this home can advertise coordinators."""
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 1.0)
    home = new_home_key()
    own = derive_keypair(home.key_bytes(), "coordinator").public
    records: dict[str, DiscoveredService] = {}
    num_followed = 0

    async def nothing() -> None:
        return

    async def state() -> AsyncGenerator[Reply, None]:
        """The standby has to follow again and again."""
        nonlocal num_followed
        num_followed += 1
        yield Reply(wire.LeaderAlive(name="kitchen", is_complete=False, configuration=None))
        yield Reply(wire.Done())

    browser = SimpleNamespace(services=records, start=nothing, stop=nothing)
    monkeypatch.setattr(module, "Browser", lambda *_, **__: browser)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
        async with leading(home, state) as leader_port, standby_of(home, tmp_path) as standby:
            for port in (silent.getsockname()[1], *range(1, 40), leader_port):  # none listens at the ports up to 39
                records[str(port)] = DiscoveredService.of(own, str(port), ("127.0.0.1",), port)
            async with running(standby):
                await until("the leader", lambda: "kitchen" in standby.state, seconds=20)
                records.clear()  # as when forged records have displaced it
                before = num_followed
                await until("it follows again", lambda: num_followed > before + 1, seconds=20)


async def test_standby_asks_for_everything_again_after_its_disk_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it confirms no change of keys."""
    monkeypatch.setattr(module, "_FIRST_COPY_PAUSE_SECONDS", 0.1)
    home = new_home_key()
    in_the_way = tmp_path / "profiles"
    num_copies = 0

    async def profiles() -> AsyncGenerator[Reply, None]:
        nonlocal num_copies
        num_copies += 1
        yield Reply(wire.ReplicaPart(path="profiles/a.json", num_bytes=2, offset=0, is_last=True), [b"{}"])
        async for alive in nothing_to_copy():
            yield alive

    async with leading(home, profiles) as port, standby_of(home, tmp_path, [f"127.0.0.1:{port}"]) as standby:
        in_the_way.touch()  # the folder cannot be made
        async with running(standby):
            await until("two copies", lambda: num_copies >= 2, seconds=20)
            in_the_way.unlink()
            await until("the file", (in_the_way / "a.json").is_file, seconds=20)


async def test_standby_looks_for_its_leader_on_a_network_that_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ADDRESS_POLL_SECONDS", 0.05)
    addresses = ["127.0.0.1"]
    monkeypatch.setattr("hearth.platform.network.all_addresses", lambda: list(addresses))
    searched: list[str] = []  # services

    class Search(AsyncServiceBrowser):
        def __init__(self, zeroconf: Any, service: str, **settings: Any) -> None:
            searched.append(service)
            super().__init__(zeroconf, service, **settings)

    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Search)
    async with standby_of(new_home_key(), tmp_path) as standby:
        task = asyncio.create_task(standby.run())
        await until("the search", lambda: COORDINATOR_SERVICE in searched)
        addresses.append("127.0.0.2")
        await until("new sockets", lambda: searched.count(COORDINATOR_SERVICE) == 2, seconds=20)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task is None
