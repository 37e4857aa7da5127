"""The controller, for both kinds of model: fatal errors, planned stops, re-planning of graphs, its history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest
from support.checkpoints import write_model
from support.controllers import ServedController, serving
from support.devices import with_telemetry
from support.fleets import FakeFleet, GraphFleet, TransformerFleet
from support.graphs import save_two_branch_model
from support.planning import in_process_planning
from support.waiting import let_tasks_run

from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.serve.model import lifecycle
from coordinator.serve.recovery import preparer
from coordinator.serve.replan.drift import MIN_PRESENCE_SECONDS, REPLAN_SECONDS
from coordinator.serve.state import Goal, GraphGoal, StateFile, TransformerGoal
from hearth import errors
from hearth.plan.graph import GraphSegments
from hearth.plan.plan import plan_hash
from hearth.platform.asyncio_tools import loop_time
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array
from hearth.wire.rpc import Reply

KINDS = ("transformer", "graph")
NewCase: TypeAlias = "Callable[..., Case]"  # of a kind, by default with the devices a and b


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFile:
    return read_graph_file(save_two_branch_model(tmp_path_factory.mktemp("model") / "model.onnx", channels=40), {})


class Case:
    """One kind of model: a goal, a fleet, and a client request."""

    def __init__(
        self, folder: Path, graph: GraphFile, kind: str, names: str = "ab", fleet: FakeFleet | None = None
    ) -> None:
        self.goal: Goal
        self.fleet: FakeFleet
        self.folder = folder
        if kind == "graph":
            path = str(graph.path)
            self.goal = GraphGoal(model_file=path, objective="throughput", time_limit_seconds=60.0)
            self.fleet = GraphFleet(names, graph)
        else:
            self.goal = TransformerGoal(model_dir=str(write_model(folder / "model")), strategy="hmp")
            self.fleet = fleet or TransformerFleet(names)

    def serving(self, **settings: Any) -> AbstractAsyncContextManager[ServedController]:
        return serving(self.fleet, self.folder / "state", self.goal, **settings)

    async def ask(self, home: ServedController, timeout_seconds: float = 10.0) -> Any:
        if isinstance(self.goal, GraphGoal):
            payload = pack_array(np.zeros((1, 3, 16, 16), np.float32))
            return await home.kind.infer(wire.Infer(names=("image",), timeout_seconds=timeout_seconds), payload)
        return await home.hidden_states(16, timeout_seconds)


@pytest.fixture
def new_case(tmp_path: Path, graph: GraphFile) -> NewCase:
    return partial(Case, tmp_path, graph)


@pytest.fixture(autouse=True)
def _plan_here() -> Iterator[None]:
    with in_process_planning(lambda: 0.0):
        yield


prepares_at_once = mock.patch.multiple(preparer, _REST_SECONDS=0.02, _POLL_SECONDS=0.02)


async def until_prepared(home: ServedController) -> None:
    """Wait until there is a plan for the loss of each device."""
    await home.until(lambda: home.controller.redundancy.startswith("yes, any one device"))


@asynccontextmanager
async def prepared_home(case: Case) -> AsyncIterator[tuple[Case, ServedController]]:
    """A home with a plan for the loss of each of its devices."""
    with prepares_at_once:
        async with case.serving() as home:
            await until_prepared(home)
            yield case, home


# ---- fatal and temporary errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (errors.BadSetting(setting="--strategy", reason="sp needs a context that is prefilled in one step"), True),
        (errors.BadPlan(reason="it was made for another model"), True),
        (errors.ModelDoesNotFit(model="m", missing_bytes=5), False),
        (errors.NoPlacement(graph="m", strategy="heft"), False),
        (errors.NoDevices(seconds=1), False),
        (errors.DeviceLost(device="a", reason="no answer"), False),
        (errors.StoreFull(device="a", needed_bytes=2, free_bytes=1), False),
        (errors.BadCheckpoint(path="m", reason="the disk is not mounted yet"), False),
        (errors.UnsupportedWeights(device="a", weights="int4", compute_device="cuda"), False),
        (ValueError("a fault of ours"), False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_contradictions_end_the_controller(
    kind: str, error: Exception, ends: bool, new_case: NewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.001)

    case = new_case(kind)
    home = ServedController(case.fleet, case.folder, case.goal, None)
    working, attempts = home.kind.plan, 0

    async def plan(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 2:
            raise error
        return await working(*arguments)

    home.kind.plan = plan
    running = asyncio.create_task(home.controller.run())
    if ends:
        with pytest.raises(type(error)):
            await running
        assert (attempts, home.controller.lifecycle.phase) == (1, "failed")
        assert home.controller.state == str(error)
        return
    await home.until(lambda: home.ready)
    assert attempts == 3
    assert [(move.phase, move.times) for move in home.controller.history() if move.phase == "failed"] == [("failed", 2)]
    home.controller.stop()
    await running


# ---- planned stops --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stopping(case: Case, **settings: Any) -> AsyncIterator[tuple[ServedController, asyncio.Task[None]]]:
    home = ServedController(case.fleet, case.folder, case.goal, None, **settings)
    running = asyncio.create_task(home.controller.run())
    await home.until(lambda: home.ready)
    yield home, running
    await asyncio.wait_for(running, 60)
    assert not case.fleet.running.total()
    assert isinstance(case.fleet.asked[-1][1], wire.Unload)
    assert case.fleet.running_epochs == {}  # a device that returns does not keep the worker of a plan that was unloaded


@pytest.mark.parametrize("kind", KINDS)
async def test_stop_drains_running_requests_and_refuses_others(kind: str, new_case: NewCase) -> None:
    case = new_case(kind)
    async with stopping(case) as (home, running):
        case.fleet.released.clear()
        room = home.kind.capacity(home.controller.deployment)
        asked = [asyncio.create_task(case.ask(home)) for _ in range(room + 1)]
        await home.until(lambda: case.fleet.running.total() == 2 * room)
        home.controller.stop()
        with pytest.raises(errors.NotServing, match="stopping: running requests finish, new ones are refused"):
            await asked.pop()  # it was queued
        with pytest.raises(errors.NotServing, match="stopping"):
            await case.ask(home)
        await let_tasks_run()
        assert (home.controller.lifecycle.phase, running.done()) == ("draining", False)
        case.fleet.released.set()
        await asyncio.gather(*asked)
    assert [move.phase for move in home.controller.history()][-3:] == ["serving", "draining", "idle"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("twice", [True, False], ids=["second stop request", "after the deadline"])
async def test_stop_ends_requests_that_exceed_the_drain_timeout(kind: str, twice: bool, new_case: NewCase) -> None:
    case = new_case(kind)
    async with stopping(case, drain_seconds=3600 if twice else 0.01) as (home, _):
        case.fleet.released.clear()
        asked = asyncio.create_task(case.ask(home))
        await home.until(lambda: case.fleet.running.total() == 2)
        home.controller.stop()
        if twice:
            home.controller.stop()
        with pytest.raises(errors.NotServing, match="stop"):
            await asked


@pytest.mark.parametrize(("kind", "library"), [("transformer", "torch"), ("graph", "onnxruntime")])
async def test_agents_import_what_workers_need_while_the_first_plan_is_made(
    kind: str, library: str, new_case: NewCase
) -> None:
    case = new_case(kind)
    async with case.serving():
        messages = [each for _, each in case.fleet.asked]
        pushed = next(
            index for index, each in enumerate(messages) if isinstance(each, wire.FindMissing) and each.verify
        )
        prepared = [
            device
            for device, each in case.fleet.asked[:pushed]
            if isinstance(each, wire.FindMissing) and each.prepare_worker == library
        ]
        assert set(prepared) == set(case.fleet.devices)


async def test_controller_that_leaves_its_workers_to_another_one_loads_nothing_for_running_requests(
    new_case: NewCase,
) -> None:
    case = new_case("transformer")
    home = ServedController(case.fleet, case.folder, case.goal, None)
    running = asyncio.create_task(home.controller.run())
    await home.until(lambda: home.ready)
    case.fleet.released.clear()
    asked = asyncio.create_task(case.ask(home))
    await home.until(lambda: case.fleet.running.total() == 2)
    home.controller.keep_workers = True
    before = len(case.fleet.asked)
    running.cancel()
    await asyncio.gather(running, asked, return_exceptions=True)
    await let_tasks_run()
    assert not [
        message
        for _, message in case.fleet.asked[before:]
        if isinstance(message, wire.FindMissing | wire.Load | wire.Unload)
    ]
    assert home.phases()[-1] == "serving"


async def test_stop_before_serving_takes_effect_immediately(new_case: NewCase, tmp_path: Path) -> None:
    for begun in (True, False):
        home = ServedController(TransformerFleet(""), tmp_path, new_case("transformer").goal, None)
        running = asyncio.create_task(home.controller.run())
        if begun:
            await home.until(lambda home=home: home.controller.lifecycle.phase == "failed")  # there is no device
        home.controller.stop()
        await asyncio.wait_for(running, 60)
        with pytest.raises(errors.NotServing, match="stopped"):
            await home.hidden_states(1, 1.0)


async def test_work_that_ends_during_a_stop_is_ignored(new_case: NewCase) -> None:
    case = new_case("transformer")
    settling, settled = asyncio.Event(), asyncio.Event()

    async def settle(*_: float) -> Any:
        settling.set()
        await settled.wait()

    case.fleet.settle = settle  # type: ignore[method-assign]
    home = ServedController(case.fleet, case.folder, case.goal, None)
    running = asyncio.create_task(home.controller.run())
    await settling.wait()
    settled.set()
    home.controller.stop()
    await asyncio.wait_for(running, 60)
    assert home.phases() == ["settling", "idle"]


# ---- faults of devices and links --------------------------------------------------------------------------------------


class FaultyFleet(TransformerFleet):
    """Devices a and b. While the link between them is `cut`, no plan of both works. `load_error`: of device b."""

    cut = False
    load_error: errors.HearthError | None = None

    async def call(
        self, device_id: str, message: wire.Message, payload: Sequence[Any] = (), timeout_seconds: float = 10.0
    ) -> Reply:
        if self.cut and isinstance(message, wire.MeasureLink):
            raise errors.Unreachable(endpoint="b", seconds=1)
        if self.cut and isinstance(message, wire.Run) and self.loads[device_id].plan.num_ranks > 1:
            rank = self.loads[device_id].rank
            raise errors.StepFailed(device=f"rank {rank}", reason="a tile did not arrive", peer=f"rank {1 - rank}")
        if self.load_error is not None and isinstance(message, wire.Load) and device_id == "b":
            raise self.load_error
        return await super().call(device_id, message, payload, timeout_seconds)


async def test_home_serves_without_a_pair_of_devices_whose_link_is_cut_and_with_it_once_it_heals(
    new_case: NewCase,
) -> None:
    fleet = FaultyFleet("ab")
    case = new_case("transformer", fleet=fleet)
    async with case.serving() as home:
        assert home.names() == "ab"
        fleet.cut = True
        await home.hidden_states(16)
        await home.until(lambda: home.ready)
        assert len(home.names()) == 1
        home.now += REPLAN_SECONDS + MIN_PRESENCE_SECONDS
        await home.wait_for_replanner()
        home.now += REPLAN_SECONDS + MIN_PRESENCE_SECONDS
        await home.wait_for_replanner()
        assert len(home.names()) == 1
        fleet.cut = False
        home.now += REPLAN_SECONDS + MIN_PRESENCE_SECONDS
        await home.until(lambda: home.ready and home.names() == "ab")


@pytest.mark.parametrize(
    "error",
    [
        errors.StoreFull(device="b", needed_bytes=2, free_bytes=1),
        errors.StoreFailed(device="b", reason="Read-only file system"),
        errors.StepFailed(device="this device", reason="out of memory"),
        errors.WorkerDied(device="b", reason="killed"),
        errors.DeadlineExceeded(action="Load", seconds=1),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_device_that_fails_while_loading_is_left_out_of_the_next_plan(
    error: errors.HearthError, new_case: NewCase
) -> None:
    fleet = FaultyFleet("ab")
    case = new_case("transformer", fleet=fleet)
    fleet.load_error = error
    async with case.serving() as home:
        assert home.names() == "a"
        assert fleet.devices["b"].is_quarantined(loop_time())


async def test_model_that_does_not_fit_without_a_quarantined_device_uses_it(
    new_case: NewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.001)

    fleet = FaultyFleet("ab")
    case = new_case("transformer", fleet=fleet)
    async with case.serving() as home:
        working = home.kind.plan

        async def plan(cluster: Any, recovering: bool, held: Any = None) -> Any:
            if len(cluster.devices) < 2:
                raise errors.ModelDoesNotFit(model="m", missing_bytes=5)
            return await working(cluster, recovering, held)

        home.kind.plan = plan
        fleet.failures = [errors.WorkerDied(device="b", reason="killed")]
        await home.hidden_states(16)
        assert home.names() == "ab"


# ---- drift and re-planning ----------------------------------------------------------------------------------


def work_of(home: ServedController) -> dict[str, int]:
    """The number of heads or operators of each device."""
    body, devices = home.plan.body, home.plan.devices
    if isinstance(body, GraphSegments):
        shares = [sum(len(segment.operators) for segment in body.segments_of(rank)) for rank in range(len(devices))]
    else:
        shares = body.heads
    return {device.name: share for device, share in zip(devices, shares, strict=True)}


@pytest.mark.parametrize(("kind", "slowdown"), [("transformer", 8.0), ("graph", 3.0)])
async def test_slower_device_gets_less_work(kind: str, slowdown: float, new_case: NewCase) -> None:
    case = new_case(kind)
    if kind == "graph":
        case.goal = case.goal.model_copy(update={"learn": False})  # learning may find the same plan before
    async with case.serving() as home:
        for _ in range(10):
            await case.ask(home)
        share = work_of(home)
        case.fleet.slow["a"] = slowdown
        await home.until_replanned(lambda: case.ask(home))
        assert home.count_lines(f"a takes {slowdown:.2f}x its time: changing the plan") == 1
        assert home.tools.profiler.slowdown("a") == pytest.approx(slowdown)
        assert work_of(home)["a"] < share["a"]
        assert kind == "graph" or work_of(home) == {"a": 0, "b": 3}
        # The new plan's prediction holds, so nothing more is done.
        case.fleet.slow["a"] = 1.0  # the fake's factor is relative to the plan, which now includes the slowdown
        home.now += 2 * REPLAN_SECONDS
        for _ in range(30):
            await case.ask(home)
        await home.wait_for_replanner()
        assert home.count_lines("changing the plan") == 1
        assert home.controller.requests.num_failed == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_returning_device_joins_without_failing_requests(kind: str, new_case: NewCase) -> None:
    case = new_case(kind)
    async with case.serving() as home:
        there = case.fleet.devices["b"]
        home.kill("b")
        await home.until(lambda: home.ready and home.names() == "a")
        home.now = 100.0
        case.fleet.devices["b"] = there
        await home.wait_for_replanner()
        home.now += MIN_PRESENCE_SECONDS - 1
        await home.wait_for_replanner()
        assert home.names() == "a"
        home.now += 1

        async def ask() -> None:
            for _ in range(60):
                await case.ask(home)

        asking = asyncio.gather(*(ask() for _ in range(3)))  # none of them fails
        await home.until(lambda: home.ready and home.names() == "ab")
        await asking
        assert home.controller.requests.num_failed == 0
        assert home.count_lines("b can join: changing the plan") == 1
        assert not home.count_lines("trying again")
        assert home.phases()[-6:] == ["serving", "draining", "pushing", "loading", "warming", "serving"]
        assert StateFile(case.folder / "state").current.deployments["default"].plan == home.plan
        kinds = [type(message) for _, message in case.fleet.asked]
        assert kinds.index(wire.Unload) < len(kinds) - 1 - kinds[::-1].index(wire.Run)


async def test_requests_run_while_the_links_of_a_new_device_are_measured(
    new_case: NewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = new_case("graph")
    new_device = case.fleet.devices.pop("b")
    async with case.serving() as home:
        profiler = home.tools.profiler
        measure, begun, released = profiler.measure_links, asyncio.Event(), asyncio.Event()

        async def measure_slowly(devices: Sequence[Any], *traffic: Any) -> Any:
            if len(devices) > 1:
                begun.set()
                await released.wait()
            return await measure(devices, *traffic)

        monkeypatch.setattr(profiler, "measure_links", measure_slowly)
        case.fleet.devices["b"] = new_device
        await home.wait_for_replanner()
        home.now += REPLAN_SECONDS + MIN_PRESENCE_SECONDS
        await asyncio.wait_for(begun.wait(), 10)
        await case.ask(home, timeout_seconds=3.0)
        assert home.names() == "a"
        released.set()
        await home.until(lambda: home.ready and home.names() == "ab")


@pytest.mark.parametrize("kind", KINDS)
async def test_workers_that_survive_a_loss_go_on_in_the_next_plan(kind: str, new_case: NewCase) -> None:
    case = new_case(kind)
    async with case.serving() as home:
        lost, already = home.plan, len(case.fleet.asked)
        held: list[Any] = []
        working = home.kind.plan

        async def plan(cluster: Any, recovering: bool, deployed: Any = None) -> Any:
            held.append(deployed)
            return await working(cluster, recovering, deployed)

        home.kind.plan = plan
        home.kill("b")
        await home.until(lambda: home.ready and home.plan is not lost)
        assert held == [lost]  # what the survivors' workers hold counts as free
        asked = [message for _, message in case.fleet.asked[already:]]
        new_load = next(index for index, message in enumerate(asked) if isinstance(message, wire.Load))
        assert not any(isinstance(message, wire.Unload) for message in asked[:new_load])
        await home.until(lambda: any(isinstance(message, wire.Unload) for _, message in case.fleet.asked[already:]))
        unloads = [message for _, message in case.fleet.asked[already:] if isinstance(message, wire.Unload)]
        assert {message.epoch for message in unloads} == {lost.epoch}


LEASES_LOST = errors.LeaseLost(device="most devices of this home")


def changes_of_workers(case: Case, since: int) -> list[wire.Message]:
    """The commands to load and to unload."""
    return [message for _, message in case.fleet.asked[since:] if isinstance(message, wire.Load | wire.Unload)]


@pytest.mark.parametrize("kind", KINDS)
async def test_workers_run_on_while_leases_are_lost_and_serve_the_waiting_request(kind: str, new_case: NewCase) -> None:
    case = new_case(kind)
    async with case.serving() as home:
        plan, already = home.plan, len(case.fleet.asked)
        case.fleet.released.clear()
        asked = asyncio.create_task(case.ask(home))
        await home.until(lambda: case.fleet.running)
        case.fleet.has_majority = False
        home.controller.lose_deployment(LEASES_LOST)
        case.fleet.released.set()
        await home.until(lambda: home.controller.lifecycle.phase == "adopting")
        await let_tasks_run(200)
        assert home.controller.lifecycle.phase == "adopting"
        assert not asked.done()
        case.fleet.has_majority = True
        await home.until(lambda: home.ready)
        await asked
        assert home.plan is plan
        assert changes_of_workers(case, already) == []
        assert home.controller.requests.num_failed == 0


async def test_device_that_lost_its_lease_and_its_worker_is_planned_for_again(new_case: NewCase) -> None:
    case = new_case("transformer")
    async with case.serving() as home:
        plan = home.plan
        case.fleet.without_lease = {"b"}
        home.controller.lose_deployment(errors.LeaseLost(device="b"))
        await home.until(lambda: home.controller.lifecycle.phase == "adopting")
        device = case.fleet.devices["b"]
        case.fleet.devices["b"] = replace(device, state=wire.AgentState(boot_id=device.welcome.boot_id, workers=()))
        case.fleet.without_lease = set()
        await home.until(lambda: home.ready and home.plan is not plan)
        await case.ask(home)


async def test_no_plan_is_made_without_a_majority(new_case: NewCase) -> None:
    case = new_case("transformer", "abc")
    async with case.serving() as home:
        already = len(case.fleet.asked)
        case.fleet.has_majority = False
        asked = asyncio.create_task(case.ask(home))
        for name in "bc":
            home.kill(name)
        await home.until(lambda: home.count_lines("waiting for the leases on most devices of this home"))
        await let_tasks_run(200)
        assert changes_of_workers(case, already) == []
        case.fleet.has_majority = True
        await home.until(lambda: home.ready)
        await asked
        assert home.names() == "a"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "during", [wire.FindMissing, wire.Load, wire.ConnectPeers, wire.Run], ids=lambda message: message.__name__
)
async def test_workers_that_survive_a_loss_during_a_repair_go_on_in_the_plan_after_it(
    kind: str, during: type[wire.Message], new_case: NewCase
) -> None:
    case = new_case(kind, "abc")
    async with case.serving() as home:
        first, already = home.plan, len(case.fleet.asked)
        working = case.fleet.call

        async def call(device_id: str, message: wire.Message, *arguments: Any, **options: Any) -> Reply:
            if isinstance(message, during) and device_id == "c" and home.controller.lifecycle.phase != "serving":
                home.kill("c")
            return await working(device_id, message, *arguments, **options)

        case.fleet.call = call  # type: ignore[method-assign]
        home.kill("b")
        await home.until(lambda: home.ready and home.names() == "a")
        assert "failed" not in home.phases()
        since = [message for _, message in case.fleet.asked[already:]]
        last_load = max(index for index, message in enumerate(since) if isinstance(message, wire.Load))
        assert not any(isinstance(message, wire.Unload) for message in since[:last_load])
        retired = {first.epoch} if during is wire.FindMissing else {first.epoch, first.epoch + 1}
        await home.until(
            lambda: {m.epoch for _, m in case.fleet.asked[already:] if isinstance(m, wire.Unload)} == retired
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_device_that_is_lost_while_the_plan_is_made_is_asked_nothing(kind: str, new_case: NewCase) -> None:
    case = new_case(kind, "abc")
    async with case.serving() as home:
        make_plan = home.kind.plan
        asked_before: list[int] = []

        async def plan(*arguments: Any) -> Any:
            made = await make_plan(*arguments)
            if not asked_before:
                home.kill("c")
                asked_before.append(len(case.fleet.asked))
            return made

        with mock.patch.object(home.kind, "plan", plan):
            home.kill("b")
            await home.until(lambda: home.ready and home.names() == "a")
        assert "c" not in {device_id for device_id, _ in case.fleet.asked[asked_before[0] :]}
        assert "failed" not in home.phases()


async def test_device_without_a_heartbeat_since_its_return_gets_its_part_of_the_plan(new_case: NewCase) -> None:
    case = new_case("transformer", "abc")
    async with case.serving() as home:
        make_plan, planned = home.kind.plan, []

        async def plan(*arguments: Any) -> Any:
            if not planned:
                case.fleet.devices["c"] = replace(case.fleet.devices["c"], state=None)
            planned.append(await make_plan(*arguments))
            return planned[-1]

        with mock.patch.object(home.kind, "plan", plan):
            home.kill("b")
            await home.until(lambda: home.ready and home.names() == "ac")
        assert len(planned) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_plan_that_was_made_ahead_is_deployed_at_once_after_a_loss(kind: str, new_case: NewCase) -> None:
    async with prepared_home(new_case(kind, "abc")) as (case, home):
        lost = home.plan.devices[-1].name
        assert home.count_lines("planned by") == (kind == "graph")  # not for the plans made ahead
        already = len(case.fleet.asked)
        home.kill(lost)
        await home.until(lambda: home.ready and lost not in home.names())
        assert home.phases()[-5:] == ["settling", "pushing", "loading", "warming", "serving"]
        since = [message for _, message in case.fleet.asked[already:]]
        first_load = next(index for index, message in enumerate(since) if isinstance(message, wire.Load))
        asked = [message for message in since[:first_load] if isinstance(message, wire.FindMissing)]
        assert all(message.read_ahead for message in asked)  # the chunks are known to be there
        assert home.count_lines("the plan that was made ahead for this loss is loaded") == 1
        await case.ask(home)


@pytest.mark.parametrize("kind", KINDS)
async def test_plan_that_was_made_ahead_for_one_end_of_a_link_is_deployed_at_once_when_the_link_is_cut(
    kind: str, new_case: NewCase
) -> None:
    async with prepared_home(new_case(kind, "abc")) as (case, home):
        one, other = home.plan.devices[0].name, home.plan.devices[1].name
        home.tools.profiler.link_is_cut(one, other)
        home.controller.lose_deployment(errors.LinkLost(device=one, peer=other, reason="they cannot connect"))
        await home.until(lambda: home.ready and not {one, other} <= set(home.names()))
        assert home.phases()[-5:] == ["settling", "pushing", "loading", "warming", "serving"]
        assert home.count_lines("is loaded, since it does not use the link") == 1
        await case.ask(home)


async def test_request_whose_step_failed_goes_on_when_the_plan_is_lost_during_the_check_of_its_link(
    new_case: NewCase,
) -> None:
    class HangingFleet(FaultyFleet):
        checks = 0

        async def call(self, device_id: str, message: wire.Message, *arguments: Any, **options: Any) -> Reply:
            if self.cut and isinstance(message, wire.MeasureLink):
                self.checks += 1
                await asyncio.sleep(60)
            return await super().call(device_id, message, *arguments, **options)

    fleet = HangingFleet("ab")
    case = new_case("transformer", fleet=fleet)
    async with case.serving() as home:
        fleet.cut = True
        asking = asyncio.create_task(home.hidden_states(16))
        await home.until(lambda: fleet.checks)
        home.tools.profiler.link_is_cut("a", "b")
        home.controller.lose_deployment(errors.LinkLost(device="a", peer="b", reason="they cannot connect"))
        await asyncio.wait_for(asking, 5)
        assert len(home.names()) == 1


@prepares_at_once
async def test_chunks_that_were_sent_ahead_are_read_into_memory_ahead(
    new_case: NewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparer, "_READ_AHEAD_EVERY_SECONDS", 0.05)

    case = new_case("transformer", "abc")
    async with case.serving() as home:
        await home.until(lambda: "; spare weights: " in home.controller.redundancy)
        assert all(each.is_prepared for each in home.controller.losses)
        assert all(each.spare_bytes > 0 and each.missing_bytes == 0 for each in home.controller.losses)

        def read_ahead() -> list[tuple[str, tuple[str, ...]]]:
            asked = [(device, each) for device, each in case.fleet.asked if isinstance(each, wire.FindMissing)]
            assert all((each.prepare_worker is not None) is each.read_ahead for _, each in asked if each.hashes)
            return [(device, each.hashes) for device, each in asked if each.read_ahead]

        first = read_ahead()
        assert first
        for device, hashes in first:
            assert not set(hashes) & set(case.fleet.loads[device].parts.hashes)
            assert set(hashes) <= case.fleet.stored[device]
        await home.until(lambda: len(read_ahead()) >= 2 * len(first))  # other programs displace them


@prepares_at_once
async def test_chunks_that_are_sent_ahead_do_not_fill_a_small_disk(new_case: NewCase) -> None:
    case = new_case("transformer", "abc")
    for name, known in case.fleet.devices.items():
        case.fleet.devices[name] = with_telemetry(known, disk_free_bytes=1000)
    async with case.serving() as home:
        stored = {name: set(hashes) for name, hashes in case.fleet.stored.items()}
        await home.until(lambda: home.controller.redundancy.startswith("cannot lose"))
        assert " would have to store " in home.controller.redundancy
        assert " ahead, and 250 B are allowed" in home.controller.redundancy
        assert case.fleet.stored == stored
        home.kill("a")  # the plan that is made now may use the whole disk
        await home.until(lambda: home.ready and home.names() == "bc")


@pytest.mark.parametrize("kind", KINDS)
async def test_device_whose_store_has_no_room_gets_no_weights_and_the_log_says_so(kind: str, new_case: NewCase) -> None:
    case = new_case(kind, "abc")
    case.fleet.devices["b"] = with_telemetry(case.fleet.devices["b"], store_room_bytes=0)
    async with case.serving() as home:
        assert home.names() == "ac"
        assert home.count_lines("the store of b has room for 0 B of the ") == 1
        assert not case.fleet.stored["b"]


@prepares_at_once
@pytest.mark.parametrize("kind", KINDS)
async def test_plans_are_made_ahead_while_requests_never_stop(kind: str, new_case: NewCase) -> None:
    case = new_case(kind, "abc")
    async with case.serving() as home:
        case.fleet.released.clear()  # no request ends, and others wait
        room = home.kind.capacity(home.controller.deployment)
        asked = [asyncio.create_task(case.ask(home, 60.0)) for _ in range(room + 3)]
        await home.until(lambda: home.controller.requests.admission.num_waiting == 3)
        await until_prepared(home)
        case.fleet.released.set()
        await asyncio.gather(*asked)


@pytest.mark.parametrize("kind", KINDS)
async def test_worker_that_died_starts_again_in_the_same_plan_and_the_second_one_is_left_out(
    kind: str, new_case: NewCase
) -> None:
    async with prepared_home(new_case(kind, "abc")) as (case, home):
        # Pauses are predicted with what is read ahead.
        await home.until(lambda: "on disk" in home.controller.redundancy)
        plan, losses = home.plan, home.controller.losses
        victim = plan.devices[-1].name
        case.fleet.failures = [errors.WorkerDied(device=victim, reason="killed")]
        await case.ask(home)
        await home.until(lambda: home.ready)
        assert home.phases()[-5:] == ["settling", "pushing", "loading", "warming", "serving"]
        assert home.plan == plan.with_epoch(plan.epoch + 1)
        assert home.count_lines("the same plan is loaded again") == 1
        assert home.controller.redundancy.startswith("yes, any one device")  # at once
        await home.until(lambda: home.controller.losses == losses)
        case.fleet.failures = [errors.WorkerDied(device=victim, reason="killed")]
        await case.ask(home)
        await home.until(lambda: home.ready)
        assert victim not in home.names()
        assert home.phases()[-5:] == ["settling", "pushing", "loading", "warming", "serving"]


async def test_log_says_why_no_plan_made_ahead_was_used(new_case: NewCase) -> None:
    case = new_case("transformer", "abc")
    async with case.serving() as home:
        await case.ask(home)
        home.kill("b")
        await home.until(lambda: home.ready and home.names() == "ac")
        assert home.count_lines("made ahead can be used: the one for the loss of b was not ready yet") == 1


async def test_chunks_that_were_sent_ahead_and_evicted_are_sent_again(new_case: NewCase) -> None:
    async with prepared_home(new_case("transformer", "abc")) as (case, home):
        already, working = len(case.fleet.asked), case.fleet.call

        async def call(device_id: str, message: wire.Message, *arguments: Any, **options: Any) -> Reply:
            if isinstance(message, wire.Load) and not set(message.parts.hashes) <= case.fleet.stored[device_id]:
                raise errors.ChunkMissing(chunk="0", device=device_id)
            return await working(device_id, message, *arguments, **options)

        case.fleet.call = call  # type: ignore[method-assign]
        case.fleet.stored["a"].clear()
        home.kill("b")
        await home.until(lambda: home.ready and "b" not in home.names())
        assert "failed" not in home.phases()
        assert any(isinstance(message, wire.PutChunk | wire.FetchChunks) for _, message in case.fleet.asked[already:])


async def test_history_is_described(new_case: NewCase) -> None:
    case = new_case("transformer")
    async with case.serving() as home:
        home.now = 7.0
        home.kill("b")
        await home.until(lambda: home.ready)
        home.now = 10.0
        history = home.controller.history()
        assert [(move.phase, move.seconds_ago, move.cause) for move in history[6:9]] == [
            ("serving", 10.0, "warm-up request completed"),
            ("settling", 3.0, "The device b was lost: no answer."),
            ("profiling", 3.0, "devices: a"),
        ]
        assert home.controller.state.startswith("serving")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", ["", "b"])
async def test_running_workers_are_taken_over_if_all_of_them_run(kind: str, missing: str, new_case: NewCase) -> None:
    case = new_case(kind)
    async with case.serving(settle_seconds=0) as home:
        await case.ask(home)
        running = home.plan
    steps = {}
    for rank, device in enumerate(running.devices):
        steps[device.name] = 40 + rank
        worker = wire.RunningWorker(epoch=running.epoch, plan_hash=plan_hash(running), rank=rank, last_step=40 + rank)
        if device.name != missing:
            case.fleet.devices[device.name] = replace(
                case.fleet.devices[device.name], taken_over={DEFAULT_DEPLOYMENT: worker}
            )
    case.fleet.asked.clear()
    async with case.serving(running=running) as home:
        await case.ask(home)
        sent = [message for _, message in case.fleet.asked]
        if missing in {device.name for device in running.devices}:
            assert home.phases()[:2] == ["adopting", "settling"]
            assert home.plan.epoch == running.epoch + 1
        else:
            assert home.phases() == ["adopting", "warming", "serving"]
            assert home.plan == running
            assert not any(isinstance(message, wire.Load | wire.ConnectPeers | wire.PutChunk) for message in sent)
            assert min(message.step for message in sent if isinstance(message, wire.Run)) > max(steps.values())
            await home.until(lambda: home.controller.deployment.parts)
            assert len(home.controller.deployment.parts) == running.num_ranks  # so these chunks are not spare
