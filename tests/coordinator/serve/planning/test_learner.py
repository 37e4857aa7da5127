"""Learning while serving: slow devices are found, plans are tried beside the deployed one, bad changes are taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.controllers import ServedController, serving
from support.fleets import GraphFleet
from support.graphs import save_two_branch_model, two_branches

from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.plan.graph.learning.elites import Elite
from coordinator.plan.graph.learning.measured_plans import add_trials
from coordinator.plan.graph.request import POLICIES_FOLDER, GraphRequest
from coordinator.serve.kinds import graph as graphs
from coordinator.serve.kinds.graph import Alternatives
from coordinator.serve.planning import learner as learning
from coordinator.serve.planning.measurements import FOLDER, Measurements
from coordinator.serve.planning.trials import TrialRunner
from coordinator.serve.state import GraphGoal
from hearth.errors import BadRequest, StepFailed
from hearth.plan.plan import GraphPlan
from hearth.wire.framing import pack_array
from hearth.wire.messages import Infer, Load, Message, Run, Unload
from hearth.wire.rpc import Reply

SPEC = two_branches()
_SHORT_SECONDS, _LONG_SECONDS = 0.01, 0.05  # of a request


class SleepingFleet(GraphFleet):
    """A request takes `_LONG_SECONDS` on plans with the device `tardy`, else `_SHORT_SECONDS`; `slow` only shows in times."""

    tardy = ""
    broken_trials = False

    async def call(self, device_id: str, message: Message, payload: Any = (), timeout_seconds: float = 10.0) -> Reply:
        if isinstance(message, Run):
            names = [device.name for device in self.loaded(device_id, message).plan.devices]
            if self.broken_trials and message.deployment.endswith(".trial"):
                raise StepFailed(device=device_id, reason="no memory")
            await asyncio.sleep(_LONG_SECONDS if self.tardy in names else _SHORT_SECONDS)
        return await super().call(device_id, message, payload, timeout_seconds)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFile:
    return read_graph_file(save_two_branch_model(tmp_path_factory.mktemp("model") / "model.onnx", channels=40), {})


@asynccontextmanager
async def learning_home(
    folder: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch, slow: str = "", tardy: str = "", **goal: Any
) -> AsyncIterator[ServedController]:
    monkeypatch.setattr(learning, "_POLL_SECONDS", 0.002)
    fleet = SleepingFleet("abc", graph)
    fleet.tardy = tardy
    if slow:
        fleet.slow[slow] = 3.0
    wishes = GraphGoal.model_validate({"model_file": str(graph.path), "strategy": "heft", **goal})
    async with serving(monkeypatch, fleet, folder / "state", wishes, queue_limit=5) as home:
        yield home


async def ask(home: ServedController, count: int = 1) -> None:
    """Requests one after the other."""
    for _ in range(count):
        await home.kind.infer(Infer(names=("image",)), pack_array(np.zeros((1, 3, 16, 16), np.float32)))


def first_device(home: ServedController) -> str:
    return str(home.plan.devices[0].name)


def saved(folder: Path) -> Measurements:
    (path,) = (folder / "state" / FOLDER).glob("*.json")
    return Measurements(path, SPEC, lambda device: 1.0)


def test_device_that_is_slower_than_profiled_gets_less_work(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with learning_home(tmp_path, graph, monkeypatch, slow="a", tardy="a") as home:
            assert "a" in home.names()
            await home.until_replanned(lambda: ask(home))
            assert "a" not in home.names()
            assert home.count_lines("with the measured times") == 1
            await ask(home, 15)
            await home.until(lambda: home.count_lines("the new plan is kept"))
            assert home.controller.requests.num_failed == 0
        factors = saved(tmp_path).calibration.device_factors()
        assert factors["a"] == pytest.approx(3.0, rel=0.05)
        assert saved(tmp_path).remaining_time < 0.9
        # After a restart, the first plan knows the slow device.
        async with learning_home(tmp_path, graph, monkeypatch, slow="a") as home:
            assert "a" not in home.names()

    asyncio.run(main())


def test_change_that_makes_requests_slower_is_taken_back(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with learning_home(tmp_path, graph, monkeypatch, slow="a") as home:
            before = home.plan
            home.fleet.tardy = "c"
            await home.until_replanned(lambda: ask(home))
            assert "c" in home.names()
            await home.until_replanned(lambda: ask(home))
            assert home.plan.body == before.body
            assert home.count_lines("the new plan is taken back") == 1
            await ask(home, 20)
            assert home.plan.body == before.body

    asyncio.run(main())


def moved(plan: GraphPlan, old: str, new: str) -> GraphPlan:
    """The same plan with a device in place of another."""
    devices = tuple(
        device.model_copy(update={"device_id": new, "name": new}) if device.name == old else device
        for device in plan.devices
    )
    return plan.model_copy(update={"devices": devices, "planner": "test"})


async def offer(home: ServedController, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.02) -> None:
    """Let searches find the deployed plan with `c` instead of `a`, with weights in place and `seconds` against 1."""
    plan = home.plan
    async with home.kind.weights(plan) as weights:
        chunks = {chunk.hash for own in weights.chunks for chunk in own}
    home.fleet.stored["c"] |= chunks

    async def alternatives(cluster: Any, deployment: Any, seed: int, learn_seconds: float) -> Alternatives:
        found = [Elite(moved(plan, "a", "c"), seconds)] if deployment.plan.with_epoch(1) == plan.with_epoch(1) else []
        budgets = {device.device_id: device.budget_bytes for device in cluster.devices}
        return Alternatives(found, Elite(deployment.plan, 1.0), budgets)

    monkeypatch.setattr(home.kind, "alternatives", alternatives)


def test_policy_learns_once_for_the_same_devices_and_measured_plans_while_the_first_plan_serves(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of each search, the time to learn and the numbers of devices and of measured plans.
    asked: list[tuple[float, int, int]] = []

    async def nothing_found(request: GraphRequest) -> None:
        assert request.policies_dir == str(tmp_path / "state" / POLICIES_FOLDER)
        asked.append((request.learn_seconds, len(request.cluster.devices), len(request.measured)))

    monkeypatch.setattr(graphs, "result_or_none", nothing_found)

    async def main() -> None:
        async with learning_home(tmp_path, graph, monkeypatch, learn_seconds=5.0) as home:
            await home.until(lambda: asked)
            assert home.controller.requests.num_served == 0
            await ask(home, 15)
            await home.until(lambda: len(asked) == 2)
            home.kind.measurements(home.plan).plans = add_trials((), home.plan, [])
            await home.until(lambda: len(asked) == 3)
            home.kill(first_device(home))
            await home.until(lambda: len(asked) == 4)
        assert asked == [(5.0, 3, 0), (0.0, 3, 0), (5.0, 3, 1), (5.0, 2, 1)]

    asyncio.run(main())


def test_plan_that_is_clearly_faster_after_learning_is_deployed(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with learning_home(tmp_path, graph, monkeypatch) as home:
            await offer(home, monkeypatch, 0.5)
            await asyncio.sleep(0.01)
            assert "a" in home.names()  # without a time to learn, requests must be measured first
            monkeypatch.setattr(type(home.kind), "learn_seconds", 5.0)
            await home.until_replanned(lambda: asyncio.sleep(0.001))
            assert "a" not in home.names()
            assert home.count_lines("after learning") == 1

    asyncio.run(main())


def test_plan_that_is_measured_to_be_faster_is_deployed(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with learning_home(tmp_path, graph, monkeypatch, tardy="a") as home:
            assert "a" in home.names()
            await offer(home, monkeypatch)
            home.controller.learn(600.0)
            await home.until_replanned(lambda: asyncio.sleep(0.001))
            assert "c" in home.names()
            assert "a" not in home.names()
            (trial,) = home.controller.learner.status().trials
            assert (trial.outcome, trial.planner) == ("deployed", "test")
            assert trial.num_requests >= 10
            assert trial.gain > 0.3
            kinds = [type(message) for device, message in home.fleet.asked if device == "c"]
            assert kinds.count(Load) == 2  # once for the trial, once for good
            assert Unload in kinds
            await home.until(lambda: not home.controller.learner.is_asked)  # nothing is left to try
            assert home.controller.requests.num_served == 0
        assert [each.trial for each in saved(tmp_path).trials] == [trial]
        assert [each.relative_seconds for each in saved(tmp_path).plans] == [1.0, 1 - trial.gain]

    asyncio.run(main())


def test_plan_that_fails_or_is_slower_leaves_the_deployed_one_alone(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        for tardy, broken, outcome, num_requests in (("c", False, "not better", 3), ("", True, "failed", 0)):
            async with learning_home(tmp_path / outcome, graph, monkeypatch, tardy=tardy) as home:
                home.fleet.broken_trials = broken
                before = home.plan
                await offer(home, monkeypatch)
                home.controller.learn(600.0)
                await home.until(lambda home=home: home.controller.learner.status().trials)
                await home.until(lambda home=home: not home.controller.learner.is_asked)
                await ask(home)
                (trial,) = home.controller.learner.status().trials
                assert (trial.outcome, trial.num_requests) == (outcome, num_requests)
                assert (home.plan, home.ready, home.controller.requests.num_failed) == (before, True, 0)
            # Nothing is learnt from failed requests.
            assert len(saved(tmp_path / outcome).plans) == (0 if broken else 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_requests", "num_trial_requests", "num_waiting", "is_asked", "may_begin"),
    [
        (199, 0, 0, False, False),  # a trial is at least ten requests, and at most one in twenty
        (200, 0, 0, False, True),
        (399, 10, 0, False, False),
        (400, 10, 0, False, True),
        (1000, 0, 1, False, False),  # a client waits
        (0, 50, 0, True, True),
        (0, 0, 1, True, False),
    ],
)
def test_trials_begin_only_in_an_idle_home_and_within_their_share(
    tmp_path: Path, num_requests: int, num_trial_requests: int, num_waiting: int, is_asked: bool, may_begin: bool
) -> None:
    measured = Measurements(tmp_path / "file.json", SPEC, lambda device: 1.0)
    measured.num_requests, measured.num_trial_requests = num_requests, num_trial_requests
    parts: Any = SimpleNamespace(num_waiting=num_waiting)
    now = [0.0]
    runner = TrialRunner(parts, parts, parts, lambda: is_asked, lambda: now[0])
    now[0] = 10.0
    assert runner.may_begin(measured) == (may_begin and is_asked)  # clients have asked since
    now[0] = 14.9
    assert runner.may_begin(measured) == (may_begin and is_asked)
    now[0] = 15.0
    assert runner.may_begin(measured) == may_begin


def test_without_learning_nothing_is_measured(
    tmp_path: Path, graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with learning_home(tmp_path, graph, monkeypatch, slow="a", learn=False) as home:
            await ask(home, 15)
            assert home.controller.learner is None
            with pytest.raises(BadRequest, match="--no-learn"):
                home.controller.learn(60.0)
        assert not (tmp_path / "state" / FOLDER).exists()

    asyncio.run(main())


def test_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"version": 2}')
    assert Measurements(path, SPEC, lambda device: 1.0).trials == []
    assert [each.name for each in tmp_path.iterdir()] == ["file.unreadable"]
