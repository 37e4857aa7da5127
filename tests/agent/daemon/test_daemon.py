"""The daemon with a fake worker and store: what happens to a plan while its chunks are hashed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chunks import chunk
from support.devices import ready_device
from support.messages import EXAMPLES
from support.waiting import until

pytest.importorskip("psutil")

from agent.daemon import daemon as daemon_module
from agent.daemon.config import AgentSettings
from agent.daemon.configuration import StoredConfiguration
from agent.daemon.daemon import AgentDaemon
from agent.daemon.lease import Lease
from agent.daemon.spawner import Spawner
from agent.daemon.store import ShardStore
from hearth.errors import AgentBusy, BadRequest, LeaseLost, StepFailed, StoreFailed
from hearth.platform import disk
from hearth.platform.asyncio_tools import cancel_all
from hearth.protocol import CLOSED_LEASE_SECONDS
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Response

BOUND = wire.WorkerBound(port=1, public_key="0" * 40, num_bytes_loaded=0)
LOAD = next(message for message in EXAMPLES if isinstance(message, wire.Load))


class SlowStore:
    """Hashes chunks until `finish` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_verified = 0
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()

    def finish(self) -> None:
        self._finished.set()

    def verify(self, hashes: Iterable[str]) -> tuple[str, ...]:
        self.num_verified += 1
        asyncio.run_coroutine_threadsafe(self._finished.wait(), self._loop).result(20)
        return ()

    def num_bytes(self, hashes: Iterable[str]) -> int:
        return 0

    def pin(self, deployment: str, hashes: Iterable[str]) -> None:
        pass

    def note_use(self, hashes: Iterable[str]) -> None:
        pass

    def unpin(self, deployment: str) -> None:
        pass


class Worker:
    """Stands for the supervisor of a process. `started` lists the epochs of all plans that were loaded."""

    started: list[int]
    abandoned = False
    state = "loading"

    def __init__(self, *arguments: Any) -> None:
        self.epoch = 0
        self.late_rank: int | None = None
        self.change: Callable[[], None] = arguments[-1]

    def status(self, deployment: str) -> wire.WorkerStatus:
        return wire.WorkerStatus(deployment=deployment, state="ready", epoch=self.epoch, late_rank=self.late_rank)

    async def start(self, request: wire.Start) -> wire.WorkerBound:
        self.epoch = request.load.plan.epoch
        self.started.append(self.epoch)
        return BOUND

    def can_reload(self, request: wire.Start) -> bool:
        return False

    def give_up_load(self, request: wire.Start) -> bool:
        return False

    async def stop(self) -> None:
        pass


class Agent:
    """A daemon of which a coordinator holds the lease."""

    def __init__(self, folder: Path) -> None:
        settings = AgentSettings(name="kitchen", state_dir=folder, store_dir=folder, key_path=folder / "key")
        self.store = SlowStore(folder)
        telemetry = SimpleNamespace(read=lambda now: ready_device("a").telemetry, has_room=lambda num_bytes: True)
        telemetry.free_memory_bytes = lambda: 1000
        parts: list[Any] = [
            SimpleNamespace(),
            self.store,
            StoredConfiguration(folder),
            telemetry,
            SimpleNamespace(),
            None,
        ]
        self.daemon = AgentDaemon(settings, *parts, coordinator_public_key="c")

    async def ask(self, message: wire.Message, is_connected: Callable[[], bool] = lambda: True) -> Response:
        return await self.daemon.handle(Caller("c", is_connected), message, [])

    def load(self, epoch: int, deployment: str = LOAD.deployment) -> asyncio.Task[Response]:
        plan = LOAD.plan.model_copy(update={"epoch": epoch})
        return asyncio.create_task(self.ask(LOAD.model_copy(update={"plan": plan, "deployment": deployment})))

    async def load_two(self) -> None:
        """Load epoch 1 of the deployment "chat" and epoch 2 of "camera", which are ready then."""
        self.store.finish()
        for epoch, deployment in enumerate(("chat", "camera"), 1):
            await self.load(epoch, deployment)
        for worker in self.daemon._workers.values():
            worker.state = "ready"

    async def workers(self, holder: str = LOAD.holder) -> list[tuple[str, int]]:
        """The deployments and epochs of the workers, which the holder of the lease hears."""
        state = await self.ask(wire.Heartbeat(holder=holder))
        assert isinstance(state, wire.AgentState)
        return [(worker.deployment, worker.epoch) for worker in state.workers]


@pytest.fixture
@asynccontextmanager
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    monkeypatch.setattr(daemon_module, "WorkerProcess", Worker)
    monkeypatch.setattr(Worker, "started", [], raising=False)
    agent = Agent(tmp_path)
    await agent.ask(wire.AcquireLease(holder=LOAD.holder, holder_name="c", seconds=30.0))
    yield agent  # noqa: PT022 (the context manager needs it)


async def test_lease_that_ends_while_chunks_are_hashed_leaves_no_worker(agent: Agent) -> None:
    loading = agent.load(epoch=1)
    await until("hashing has begun", lambda: agent.store.num_verified == 1)
    await agent.ask(wire.ReleaseLease(holder=LOAD.holder))
    agent.store.finish()
    with pytest.raises(LeaseLost):
        await loading
    assert Worker.started == []


async def test_heartbeat_takes_a_lease_again_that_ended_without_a_rival(agent: Agent) -> None:
    agent.store.finish()
    await agent.load(epoch=1)
    ended = wire.AcquireLease(holder=LOAD.holder, holder_name="c", seconds=0.05, adopt={LOAD.deployment: 1})
    await agent.ask(ended)
    await asyncio.sleep(0.1)
    with pytest.raises(LeaseLost):
        await agent.ask(wire.FindMissing(holder=LOAD.holder, hashes=()))
    assert await agent.workers() == [(LOAD.deployment, 1)]
    await asyncio.sleep(0.1)
    assert isinstance(await agent.ask(STANDBY), wire.LeaseGranted)
    with pytest.raises(LeaseLost):
        await agent.workers()


STANDBY = wire.AcquireLease(holder="s", holder_name="standby", seconds=2.0, ended="c")


async def test_standby_gets_the_lease_of_a_coordinator_that_has_ended_before_it_runs_out(agent: Agent) -> None:
    connected = True
    await agent.ask(wire.Heartbeat(holder=LOAD.holder), lambda: connected)
    with pytest.raises(AgentBusy):
        await agent.ask(STANDBY)
    connected = False
    with pytest.raises(AgentBusy):
        await agent.ask(STANDBY.model_copy(update={"ended": None}))
    with pytest.raises(AgentBusy):
        await agent.ask(STANDBY.model_copy(update={"ended": "another"}))
    began = asyncio.get_running_loop().time()
    assert isinstance(await agent.ask(STANDBY), wire.LeaseGranted)
    assert CLOSED_LEASE_SECONDS <= asyncio.get_running_loop().time() - began < 2 * CLOSED_LEASE_SECONDS
    with pytest.raises(LeaseLost):
        await agent.ask(wire.Heartbeat(holder=LOAD.holder))


async def test_coordinator_that_connects_again_keeps_its_lease(agent: Agent) -> None:
    await agent.ask(wire.Heartbeat(holder=LOAD.holder), lambda: False)
    asking = asyncio.create_task(agent.ask(STANDBY))
    await asyncio.sleep(0.5 * CLOSED_LEASE_SECONDS)
    await agent.ask(wire.Heartbeat(holder=LOAD.holder), lambda: False)  # the connection was reset once more
    with pytest.raises(AgentBusy):
        await asking
    await agent.ask(wire.Heartbeat(holder=LOAD.holder))


async def test_lease_that_ends_while_the_worker_is_stopped_is_not_granted(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ended = asyncio.Event(), asyncio.Event()

    async def stop(self: Worker) -> None:
        told.set()
        await ended.wait()

    monkeypatch.setattr(Worker, "stop", stop)

    agent.store.finish()
    await agent.load(epoch=1)
    asking = asyncio.create_task(
        agent.ask(STANDBY.model_copy(update={"holder": LOAD.holder, "adopt": {LOAD.deployment: 7}}))
    )
    await told.wait()
    await agent.ask(wire.ReleaseLease(holder=LOAD.holder, keep_workers=True))
    assert isinstance(await agent.ask(STANDBY), wire.LeaseGranted)
    ended.set()
    with pytest.raises(LeaseLost):
        await asking


@pytest.mark.parametrize(
    ("holder", "adopt", "kept"),
    [
        (LOAD.holder, None, [("chat", 1), ("camera", 2)]),
        (LOAD.holder, {"camera": 2}, [("camera", 2)]),
        ("s", None, []),
        ("s", {"chat": 1, "camera": 2}, [("chat", 1), ("camera", 2)]),
        ("s", {"chat": 1, "camera": 1, "another": 2}, [("chat", 1)]),
    ],
)
async def test_next_lease_takes_over_the_workers_that_it_names(
    agent: Agent, holder: str, adopt: dict[str, int] | None, kept: list[tuple[str, int]]
) -> None:
    await agent.load_two()
    if holder != LOAD.holder:
        await agent.ask(wire.ReleaseLease(holder=LOAD.holder, keep_workers=True))
    request = wire.AcquireLease(holder=holder, holder_name="next", seconds=30.0, adopt=adopt)
    granted = await agent.ask(request)
    assert isinstance(granted, wire.LeaseGranted)
    assert [(each.deployment, each.epoch) for each in granted.workers] == kept
    assert granted.last_epoch == 2
    assert await agent.workers(holder) == kept


async def test_worker_that_is_still_loading_is_kept_but_not_taken_over(agent: Agent) -> None:
    await agent.load_two()
    agent.daemon._workers["chat"].state = "loading"
    granted = await agent.ask(wire.AcquireLease(holder=LOAD.holder, holder_name="c", seconds=30.0))
    assert isinstance(granted, wire.LeaseGranted)
    assert [each.deployment for each in granted.workers] == ["camera"]
    assert await agent.workers() == [("chat", 1), ("camera", 2)]


async def test_lease_is_released_with_all_workers_or_without(agent: Agent) -> None:
    await agent.load_two()
    await agent.ask(wire.ReleaseLease(holder=LOAD.holder, keep_workers=True))
    with pytest.raises(LeaseLost):
        await agent.workers()
    assert set(agent.daemon._workers) == {"chat", "camera"}
    await agent.ask(STANDBY.model_copy(update={"adopt": {"chat": 1, "camera": 2}}))
    await agent.ask(wire.ReleaseLease(holder=STANDBY.holder))
    assert not agent.daemon._workers


async def test_workers_that_no_coordinator_takes_over_are_stopped(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "LEASE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(Lease, "is_abandoned", lambda lease, now: not lease.is_live(now))

    await agent.load_two()
    watching = asyncio.create_task(agent.daemon.watch_leases())
    await agent.ask(wire.ReleaseLease(holder=LOAD.holder, keep_workers=True))
    await until("both workers are stopped", lambda: not agent.daemon._workers)
    await cancel_all([watching])


async def test_one_deployment_is_unloaded_and_the_other_goes_on(agent: Agent) -> None:
    await agent.load_two()
    await agent.ask(wire.Unload(holder=LOAD.holder, deployment="chat", epoch=1))
    assert await agent.workers() == [("camera", 2)]
    await agent.load(2, "chat")  # each deployment has epochs of its own
    assert await agent.workers() == [("camera", 2), ("chat", 2)]
    assert Worker.started == [1, 2, 2]


async def test_agent_that_stops_while_chunks_are_hashed_leaves_no_worker(agent: Agent) -> None:
    loading = agent.load(epoch=1)
    await until("hashing has begun", lambda: agent.store.num_verified == 1)
    await agent.daemon.close()
    agent.store.finish()
    with pytest.raises(LeaseLost):
        await loading
    assert Worker.started == []


async def test_agent_that_stops_while_it_stops_a_worker_waits_for_that(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ended = asyncio.Event(), asyncio.Event()
    stopped = []

    async def stop(self: Worker) -> None:
        told.set()
        await ended.wait()
        stopped.append(self.epoch)

    monkeypatch.setattr(Worker, "stop", stop)

    agent.store.finish()
    await agent.load(epoch=1)
    unloading = asyncio.create_task(agent.ask(wire.Unload(holder=LOAD.holder, epoch=1)))
    await told.wait()
    await cancel_all([unloading])
    asyncio.get_running_loop().call_later(0.01, ended.set)
    await agent.daemon.close()
    assert stopped == [1]


async def test_disk_that_does_not_answer_fails_the_request_and_is_reported(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(daemon_module, "read_seconds", lambda *given: 0.05)

    with pytest.raises(StoreFailed, match=f"{tmp_path} has not answered for 0.05 s"):
        await agent.load(epoch=1)
    heartbeat = wire.Heartbeat(holder=LOAD.holder)
    state = await agent.ask(heartbeat)
    assert isinstance(state, wire.AgentState)
    assert state.num_hung == 1
    agent.store.finish()
    await until("the thread to end", lambda: not disk.hung_paths())
    assert (await agent.ask(heartbeat)).num_hung == 0  # type: ignore[union-attr]
    assert Worker.started == []


async def test_plan_that_is_unloaded_while_it_loads_leaves_no_worker(agent: Agent) -> None:
    loading = agent.load(epoch=1)
    await until("hashing has begun", lambda: agent.store.num_verified == 1)
    await agent.ask(wire.Unload(holder=LOAD.holder, epoch=1))
    agent.store.finish()
    with pytest.raises(BadRequest, match="unloaded before it had loaded"):
        await loading
    assert isinstance(await agent.load(epoch=2), wire.WorkerBound)
    assert Worker.started == [2]


async def test_newer_plan_does_not_wait_for_the_older_one_to_load(agent: Agent) -> None:
    older = agent.load(epoch=1)
    await until("hashing has begun", lambda: agent.store.num_verified == 1)
    newer = agent.load(epoch=2)
    await asyncio.sleep(0)
    agent.store.finish()
    with pytest.raises(BadRequest, match="replaced by that of epoch 2"):
        await older
    assert isinstance(await newer, wire.WorkerBound)
    assert Worker.started == [2]


async def test_newer_plan_is_loaded_by_the_process_that_still_loads_the_older_one(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = asyncio.Event()

    async def start(self: Worker, request: wire.Start) -> wire.WorkerBound:
        self.epoch = request.load.plan.epoch
        await given_up.wait()
        raise StepFailed(device="kitchen", reason="replaced")

    async def reload(self: Worker, request: wire.Start, seconds: float) -> wire.WorkerBound:
        self.started.append(request.load.plan.epoch)
        return BOUND

    def give_up(self: Worker, request: wire.Start) -> bool:
        given_up.set()
        return True

    monkeypatch.setattr(Worker, "start", start)
    monkeypatch.setattr(Worker, "reload", reload, raising=False)
    monkeypatch.setattr(Worker, "give_up_load", give_up)
    monkeypatch.setattr(Worker, "can_reload", lambda self, request: given_up.is_set())
    monkeypatch.setattr(Worker, "added_chunks", lambda self, request: [], raising=False)

    agent.store.finish()
    older = agent.load(epoch=1)
    await until("the process loads", lambda: any(each.epoch == 1 for each in agent.daemon._workers.values()))
    newer = agent.load(epoch=2)
    with pytest.raises(StepFailed, match="replaced"):
        await older
    assert isinstance(await newer, wire.WorkerBound)
    assert Worker.started == [2]


async def test_changes_of_a_worker_are_reported_at_once_while_the_lease_lasts(agent: Agent) -> None:
    reports = await agent.ask(wire.WatchWorkers(holder=LOAD.holder))
    assert isinstance(reports, AsyncGenerator)
    assert await anext(reports) == wire.AgentState(boot_id=agent.daemon.boot_id)
    agent.store.finish()
    await agent.load(epoch=1)
    worker = agent.daemon._workers[LOAD.deployment]
    assert isinstance(worker, Worker)
    for late_rank in (2, None):
        following = asyncio.ensure_future(anext(reports))
        await asyncio.sleep(0)
        worker.late_rank = late_rank
        worker.change()
        state = await asyncio.wait_for(following, 1)
        assert isinstance(state, wire.AgentState)
        assert [each.late_rank for each in state.workers] == [late_rank]
    await agent.ask(wire.ReleaseLease(holder=LOAD.holder))
    worker.change()
    with pytest.raises(LeaseLost):
        await anext(reports)


async def test_template_of_workers_is_started_when_one_is_expected(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(Spawner, "prepare", lambda spawner, library: prepared.append(library))

    agent.daemon._store = ShardStore(tmp_path / "chunks", 10_000, "kitchen")
    request = wire.FindMissing(holder=LOAD.holder, hashes=())
    await agent.ask(request)
    assert prepared == []
    await agent.ask(request.model_copy(update={"prepare_worker": "torch"}))
    assert prepared == ["torch"]


async def test_half_of_the_free_memory_is_used_for_chunks_that_are_read_ahead(agent: Agent, tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "chunks", 10_000, "kitchen")
    agent.daemon._store = store
    names = []
    for index, size in enumerate((400, 300, 50)):
        name, data = chunk(index, size)
        names.append(name)
        if index < 2:
            store.put(name, data)
    request = wire.FindMissing(holder=LOAD.holder, hashes=tuple(names))
    assert await agent.ask(request) == wire.ChunksMissing(hashes=(names[2],))
    found = await agent.ask(request.model_copy(update={"read_ahead": True}))
    assert found == wire.ChunksMissing(hashes=(names[2],), stored_bytes=700, read_ahead_bytes=400)
