"""The fleet against agents that answer over real sockets: lost connections and silent devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.devices import ready_device
from support.servers import rpc_server
from support.waiting import until

from coordinator.devices import connections, registry
from coordinator.devices import fleet as fleet_module
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import MAX_DEAD_SECONDS, RECONNECT_SECONDS, Device
from hearth.errors import DeviceLost
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.curve import KeyPair, new_keypair
from hearth.platform.discovery import Browser, DiscoveredService
from hearth.platform.security import Access
from hearth.protocol import (
    CLOSED_LEASE_SECONDS,
    DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    STANDBY_LEASE_SECONDS,
)
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Response, RpcClient

AGENT, COORDINATOR = new_keypair(), new_keypair()


@pytest.fixture(autouse=True)
def _silent_agents_keep_their_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are silent at the end of a test would otherwise delay it."""
    monkeypatch.setattr(fleet_module, "_RELEASE_SECONDS", 0.2)


class FakeAgent:
    """Answers what a fleet asks. `FindMissing` is never answered, and nothing is while it is `silent`."""

    def __init__(self) -> None:
        self.silent = False
        self.late_seconds = 0.0  # of each answer
        self.grants = True
        self.boot_id = "b"  # of its heartbeats; nothing is answered after one that is new
        self.leases: list[float] = []  # durations of the leases that it was asked for
        self.adopted: list[dict[str, int] | None] = []  # epochs that they were to take over
        self.workers: tuple[wire.RunningWorker, ...] = ()
        self.searches = asyncio.Event()  # for what it was asked to find
        self.tells_telemetry = asyncio.Event()
        self.tells_telemetry.set()
        self.worker_failed = asyncio.Event()  # reported to those that watch, but not with heartbeats

    async def handle(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        device = ready_device("a")
        if isinstance(message, wire.FindMissing):
            self.searches.set()
        await asyncio.sleep(self.late_seconds)
        if self.silent or isinstance(message, wire.FindMissing):
            await asyncio.sleep(60)
        match message:
            case wire.Hello():
                return device.welcome
            case wire.GetTelemetry():
                await self.tells_telemetry.wait()
                assert device.telemetry is not None
                return device.telemetry
            case wire.AcquireLease():
                self.leases.append(message.seconds)
                self.adopted.append(message.adopt)
                if not self.grants:
                    await asyncio.sleep(60)
                return wire.LeaseGranted(last_epoch=0, workers=self.workers)
            case wire.Heartbeat():
                self.silent = self.silent or self.boot_id != "b"
                return wire.AgentState(boot_id=self.boot_id, workers=self._worker_states())
            case wire.WatchWorkers():
                return self._report()
        return wire.Done()

    def _worker_states(self) -> tuple[wire.WorkerStatus, ...]:
        return tuple(
            wire.WorkerStatus(deployment=worker.deployment, state="ready", epoch=worker.epoch)
            for worker in self.workers
        )

    async def _report(self) -> AsyncGenerator[wire.Message, None]:
        yield wire.AgentState(boot_id="b", workers=self._worker_states())
        await self.worker_failed.wait()
        yield wire.AgentState(boot_id="b", workers=(wire.WorkerStatus(state="failed", epoch=1, failure="killed"),))
        await asyncio.sleep(60)

    @asynccontextmanager
    async def listening(self, port: int = 0, keypair: KeyPair = AGENT) -> AsyncIterator[int]:
        """Listen until the context ends; yields the port."""
        async with rpc_server(keypair, self.handle, port) as server:
            yield server.port


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


def fleet_of(port: int, lease_name: str | None = "test", server_key: str = AGENT.public, **options: Any) -> Fleet:
    """A fleet with a device at a static address."""
    access = Access(COORDINATOR, server_key)
    return Fleet(access, lease_name, static_devices=f"127.0.0.1:{port}", browse=False, **options)


@pytest.fixture
@asynccontextmanager
async def fleet(agent: FakeAgent) -> AsyncIterator[Fleet]:
    """A fleet whose device, the agent, is there."""
    async with agent.listening() as port, fleet_of(port) as fleet:
        await until("the device is there", fleet.usable)
        yield fleet


FIND = wire.FindMissing(holder="test", hashes=())


async def fleet_with_a_broken_connection(agent: FakeAgent) -> tuple[Fleet, int]:
    """A fleet, entered, whose device has closed its connections while it was asked, and the device's port."""
    async with agent.listening() as port:
        fleet = fleet_of(port)
        await fleet.__aenter__()
        await until("the device is there", fleet.usable)
        asked = asyncio.create_task(fleet.call("a", FIND, timeout_seconds=20))
        await agent.searches.wait()
    with pytest.raises(DeviceLost):
        await asked
    return fleet, port


async def test_device_whose_connection_breaks_is_out_of_plans_at_once_and_back_when_it_answers(
    agent: FakeAgent,
) -> None:
    fleet, port = await fleet_with_a_broken_connection(agent)
    assert fleet.usable() == []
    began = loop_time()
    await until("the device is dead", lambda: fleet.devices["a"].health == "dead")
    assert loop_time() - began < RECONNECT_SECONDS + 1.0
    async with agent.listening(port):
        await until("the device is back", fleet.usable)
        await fleet.__aexit__()


async def test_lease_counts_only_for_a_moment_after_its_connection_was_closed(agent: FakeAgent) -> None:
    async with agent.listening() as port:
        fleet = fleet_of(port)
        await fleet.__aenter__()
        await until("the lease is there", fleet.leased)
    closed = loop_time()
    await until("the lease counts no longer", lambda: not fleet.leased(), seconds=5)
    assert loop_time() - closed < CLOSED_LEASE_SECONDS
    async with agent.listening(port):
        await until("the lease counts again", fleet.leased, seconds=10)
        await fleet.__aexit__()


async def test_workers_of_all_deployments_are_known_once_the_lease_is_granted_again(agent: FakeAgent) -> None:
    chat = wire.RunningWorker(deployment="chat", epoch=3, plan_hash="0" * 64, rank=0, last_step=5)
    camera = chat.model_copy(update={"deployment": "camera", "epoch": 4})
    agent.workers = (chat, camera)
    async with agent.listening() as port:
        async with fleet_of(port) as fleet:
            fleet.running_epochs |= {"chat": 3, "camera": 4}
            await until("the device", lambda: fleet.usable())
            (device,) = fleet.usable()
            assert device.taken_over == {"chat": chat, "camera": camera}
            for worker in agent.workers:
                known = device.worker(worker.deployment)
                assert (known.state, known.epoch) == ("ready", worker.epoch)
            del fleet.running_epochs["chat"]
            agent.workers = (camera,)
            await fleet.acquire_again("a")
            assert fleet.devices["a"].taken_over == {"camera": camera}
            assert fleet.devices["a"].worker("chat") is None
            assert agent.adopted == [{"chat": 3, "camera": 4}, {"camera": 4}]


async def test_device_that_is_reached_over_a_new_connection_answers_again(agent: FakeAgent) -> None:
    fleet, port = await fleet_with_a_broken_connection(agent)
    assert not await fleet.answers_again("a")
    async with agent.listening(port):
        await until("the device is back", fleet.usable)
        assert await fleet.answers_again("a")
        await fleet.__aexit__()


async def test_calls_to_a_silent_device_end_once_it_is_dead(agent: FakeAgent, fleet: Fleet) -> None:
    async with fleet.bulk_connection("a") as bulk:
        agent.silent = True
        with pytest.raises(DeviceLost):
            await asyncio.gather(fleet.call("a", FIND, timeout_seconds=20), bulk.call(FIND, timeout_seconds=20))
    assert fleet.devices["a"].health == "dead"
    agent.silent = False
    await until("the device is back", fleet.usable)


@pytest.mark.parametrize("lease_name", [None, "test"])
async def test_round_trip_of_the_link_decides_whether_it_is_radio_and_not_how_late_the_agent_answers(
    agent: FakeAgent, lease_name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.late_seconds = 0.05
    async with agent.listening() as port, fleet_of(port, lease_name=lease_name) as fleet:

        def round_trip() -> float | None:
            return fleet.devices["a"].round_trip_seconds if "a" in fleet.devices else None

        await until("its round trip is known", lambda: round_trip() is not None)
        assert not fleet.devices["a"].is_on_radio
        monkeypatch.setattr(RpcClient, "round_trip_seconds", 0.005)
        await until("a longer one is known", lambda: fleet.devices["a"].is_on_radio)
        assert registry.dead_seconds(fleet.devices["a"], loop_time()) == MAX_DEAD_SECONDS


async def test_device_that_falls_silent_before_it_grants_its_lease_is_in_no_plan(agent: FakeAgent) -> None:
    agent.grants = False
    async with agent.listening() as port, fleet_of(port) as fleet:
        await until("the device is known", lambda: fleet.devices)
        assert fleet.usable() == []
        agent.grants = True
        await until("the device is there", fleet.usable)


async def test_device_that_is_silent_when_its_agent_starts_again_is_lost(
    agent: FakeAgent, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last heartbeat shows another boot, and the hello that follows has no answer."""
    monkeypatch.setattr(fleet_module, "_HELLO_SECONDS", 0.5)
    asked = asyncio.create_task(fleet.call("a", FIND, timeout_seconds=20))
    agent.boot_id = "another"
    with pytest.raises(DeviceLost):
        await asked
    assert fleet.devices["a"].health == "dead"


async def test_forged_records_neither_use_up_sockets_nor_keep_a_real_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who has a key of this home can advertise agents."""
    monkeypatch.setattr(connections, "_MAX_SILENT_CONNECTIONS", 8)
    monkeypatch.setattr(connections, "_TURN_SECONDS", 0.2)
    monkeypatch.setattr(connections, "_TURN_CHECK_SECONDS", 0.05)
    records = [DiscoveredService.of(AGENT.public, f"{n}", ("127.0.0.9",), 10_000 + n) for n in range(80)]
    monkeypatch.setattr(Browser, "start", _no_network)
    monkeypatch.setattr(Browser, "stop", _no_network)

    async with FakeAgent().listening() as port, FakeAgent().listening() as static_port:
        access = Access(COORDINATOR, AGENT.public)
        async with Fleet(access, None, static_devices=f"127.0.0.1:{static_port}") as fleet:
            for record in records:
                fleet._connections.on_discovered(record)
            real = DiscoveredService.of(AGENT.public, "real", ("127.0.0.1",), port)
            fleet._connections._browser.services["real"] = real
            while not any(device.port == port for device in fleet.devices.values()):
                assert len(fleet._connections.by_address) <= 8 + 2
                await asyncio.sleep(0.02)
            assert ("127.0.0.1", static_port) in fleet._connections.by_address


async def _no_network(self: Browser) -> None:
    return


def found_at(port: int) -> DiscoveredService:
    return DiscoveredService.of(AGENT.public, f"record-{port}", ("127.0.0.1",), port)


async def test_record_of_a_stranger_is_no_candidate() -> None:
    """It shows the fingerprint of this home, which everybody can read."""
    async with Fleet(Access(COORDINATOR, AGENT.public), "test", browse=False) as fleet:
        fleet._connections.on_discovered(found_at(4711)._replace(hosts=("127.0.0.9",)))
        assert not fleet._connections.by_address


async def test_agents_are_found_while_another_one_has_only_said_hello(agent: FakeAgent) -> None:
    agent.tells_telemetry.clear()
    async with Fleet(Access(COORDINATOR, AGENT.public), "test", browse=False) as fleet, agent.listening() as port:
        fleet._connections.on_discovered(found_at(port))
        await until("it has said hello", lambda: "a" in fleet._connections.by_device)
        fleet._connections.on_discovered(found_at(port + 1))
        agent.tells_telemetry.set()
        await until("the device is there", fleet.usable)


async def test_device_with_a_new_address_is_asked_there_and_its_old_one_no_longer_matters(agent: FakeAgent) -> None:
    healths: list[str] = []
    access = Access(COORDINATOR, AGENT.public)
    async with (
        Fleet(access, "test", browse=False, on_change=lambda device: healths.append(device.health)) as fleet,
        agent.listening() as new_port,
    ):
        async with agent.listening() as old_port:
            fleet._connections.on_discovered(found_at(old_port))
            await until("the device is there", fleet.usable)
            fleet._connections.on_discovered(found_at(new_port))
            await until("its new address is known", lambda: fleet.devices["a"].port == new_port)
            await asyncio.sleep(HEARTBEAT_SECONDS + 0.1)  # the old address takes its last heartbeat
        await asyncio.sleep(3 * HEARTBEAT_SECONDS)
        await fleet.call("a", wire.Heartbeat(holder="test"))
        assert set(healths) == {"alive"}
        assert fleet.refusals == []


async def test_key_that_was_revoked_before_its_agent_answered_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "_HELLO_SECONDS", 0.05)
    monkeypatch.setattr(fleet_module, "_RETRY_SECONDS", 0.01)
    home, admitted = new_keypair(), [AGENT.public]

    async with fleet_of(1, server_key=home.public, device_keys=lambda: admitted) as fleet:
        (connection,) = fleet._connections.by_address.values()
        await until("the device's key to be tried", lambda: connection.client.server_key == AGENT.public)
        admitted.clear()
        await fleet.drop_revoked()
        (connection,) = fleet._connections.by_address.values()
        assert (connection.client.server_key, connection.server_keys) == (home.public, [home.public])


async def fleet_that_admits(admitted: list[str], port: int) -> Fleet:
    """A fleet with a device at a static address, which is there, that admits these device keys. The caller ends it."""
    fleet = fleet_of(port, server_key=new_keypair().public, device_keys=lambda: admitted)
    await fleet.__aenter__()
    await until("the device is there", fleet.usable)
    return fleet


@pytest.mark.parametrize("is_revoked", [True, False])
async def test_device_at_a_static_address_comes_back_with_a_key_that_is_admitted_later(
    agent: FakeAgent, is_revoked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_HELLO_SECONDS", 0.5)
    monkeypatch.setattr(fleet_module, "_RETRY_SECONDS", 0.01)
    first, second = new_keypair(), new_keypair()
    admitted = [first.public]

    async with agent.listening(keypair=first) as port:
        fleet = await fleet_that_admits(admitted, port)
        if is_revoked:
            admitted.clear()
            await fleet.drop_revoked()
            assert (fleet.usable(), fleet.devices["a"].reason) == ([], "its key was revoked")
        admitted.append(second.public)
        fleet.key_admitted(second.public)
    await until("the device is lost", lambda: not fleet.usable())
    async with agent.listening(port, second):
        await until("the device is back", fleet.usable)
        await fleet.__aexit__()


async def test_key_that_is_revoked_while_the_leases_are_released_leaves_no_connection(agent: FakeAgent) -> None:
    admitted = [AGENT.public]

    async with agent.listening() as port:
        fleet = await fleet_that_admits(admitted, port)
        agent.silent = True
        ending = asyncio.create_task(fleet.__aexit__())
        await asyncio.sleep(0.05)
        admitted.clear()
        await fleet.drop_revoked()
        await ending
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("the connection to")]


def test_an_address_that_is_given_twice_gets_one_connection() -> None:
    async def leave() -> set[str]:
        access = Access(COORDINATOR, AGENT.public)
        async with Fleet(access, "test", static_devices="127.0.0.1:1,127.0.0.1:1", browse=False):
            await asyncio.sleep(0.01)
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert asyncio.run(leave()) == set()


async def test_worker_that_dies_is_known_before_the_next_heartbeat(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def note(device: Device) -> None:
        heard.extend(each.state for each in device.state.workers) if device.state is not None else None

    async with agent.listening() as port:
        monkeypatch.setattr("coordinator.devices.registry.HEARTBEAT_SECONDS", 20.0)
        async with fleet_of(port, on_change=note) as fleet:
            await until("the device is there", fleet.usable)
            agent.worker_failed.set()
            await until("the report", lambda: heard == ["failed"], seconds=15)


@pytest.mark.parametrize("num_witnesses", [1, 2])
async def test_device_that_others_wait_for_and_that_does_not_answer_is_dead_at_once(
    agent: FakeAgent, fleet: Fleet, num_witnesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LATE_SECONDS", 1.0)  # the tests' processes may be busy
    assert not await fleet.is_lost("a", lambda: num_witnesses)
    calling = asyncio.create_task(fleet.call("a", FIND, timeout_seconds=20))
    agent.silent = True
    began = loop_time()
    assert await fleet.is_lost("a", lambda: num_witnesses)
    assert loop_time() - began < (0.9 if num_witnesses == 1 else 0.6) * DEAD_SECONDS
    assert fleet.devices["a"].health == "dead"
    with pytest.raises(DeviceLost):
        await calling
    await asyncio.sleep(0.2)
    assert fleet.devices["a"].health == "dead"  # a heartbeat that was on its way changes nothing
    agent.silent = False
    await until("the device is back", fleet.usable)


async def test_second_witness_that_reports_while_the_device_is_asked_shortens_the_wait_for_its_answer(
    agent: FakeAgent, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LATE_SECONDS", 1.0)
    agent.silent = True
    began = loop_time()
    assert await fleet.is_lost("a", lambda: 1 if loop_time() - began < 0.1 else 2)
    assert loop_time() - began < 0.6 * DEAD_SECONDS


async def test_lease_lasts_longer_on_a_device_that_is_often_silent_if_a_standby_waits_for_its_end(
    agent: FakeAgent, fleet: Fleet
) -> None:
    fleet.devices["a"] = replace(fleet.devices["a"], watched_since=loop_time() - 60, silences=((loop_time(), 1.5),))
    await asyncio.sleep(2 * HEARTBEAT_SECONDS)
    fleet.lease_seconds = STANDBY_LEASE_SECONDS
    await until("a lease for a silent device", lambda: agent.leases == [LEASE_SECONDS, 4.5], seconds=5)
    fleet.devices["a"] = replace(fleet.devices["a"], silences=((loop_time(), 0.6),))
    await until("a shorter lease", lambda: agent.leases[2:] == [STANDBY_LEASE_SECONDS], seconds=5)
    assert fleet.leased() == {"a"}
