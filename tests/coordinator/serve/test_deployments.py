"""The deployments of a coordinator: which are kept at a start, and which of them go before others where memory is short."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_model
from support.controllers import tools_for
from support.devices import with_telemetry
from support.fleets import TransformerFleet
from support.graphs import save_two_branch_model
from support.hostile_models import CORPUS
from support.planning import in_process_planning
from support.waiting import until

from coordinator.plan.limits import parse_limit
from coordinator.serve import deployments
from coordinator.serve.deployments import Deployments
from coordinator.serve.goal import open_model
from coordinator.serve.model import lifecycle
from coordinator.serve.model.controller import Controller
from coordinator.serve.state import StateFile, TransformerGoal
from hearth.errors import BadCheckpoint, HearthError, MemoryTaken, NotServing, UnknownModel
from hearth.platform.asyncio_tools import cancel_all
from hearth.wire.framing import pack_array
from hearth.wire.messages import GetHiddenStates, Unload


@pytest.fixture(autouse=True)
def _be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry soon, and open these models without the process that takes a second to start."""
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(deployments, "open_checked", lambda goal, state_dir: open_model(goal))


def goal_of(folder: Path, name: str = "model", **settings: Any) -> TransformerGoal:
    return TransformerGoal(model_dir=str(write_model(folder / name)), **{"strategy": "hmp", **settings})


def deployments_of(folder: Path, fleet: TransformerFleet, lines: list[str] | None = None) -> Deployments:
    return Deployments(tools_for(folder / "state", fleet, [] if lines is None else lines))


@asynccontextmanager
async def running(deployments: Deployments) -> AsyncIterator[None]:
    with in_process_planning():
        task = asyncio.create_task(deployments.run())
        try:
            yield
        finally:
            await cancel_all([task])


@asynccontextmanager
async def running_model(
    folder: Path, fleet: TransformerFleet, name: str = "model", **settings: Any
) -> AsyncIterator[tuple[Deployments, Controller]]:
    """One model with these settings of its goal."""
    deployments = deployments_of(folder, fleet)
    await deployments.create(goal_of(folder, name, **settings), None)
    async with running(deployments):
        yield deployments, deployments.controllers[name]


def serves(controller: Controller) -> bool:
    return controller.lifecycle.phase == "serving" and controller.requests.admission.is_open


def num_failures(controller: Controller) -> int:
    """Number of attempts to serve that have failed."""
    return sum(move.times for move in controller.history() if move.phase == "failed")


def device_of(controller: Controller) -> str:
    """The one device of its plan."""
    (device,) = controller.plan.devices
    return device.device_id


async def ask(controller: Controller, timeout_seconds: float = 10.0) -> None:
    handler = controller.kind.handlers[GetHiddenStates]
    await handler(GetHiddenStates(timeout_seconds=timeout_seconds), pack_array(np.ones(16, np.int32)))


def limit_memory(fleet: TransformerFleet, num_bytes: int) -> None:
    """Limit the memory of all devices."""
    for name, device in fleet.devices.items():
        fleet.devices[name] = with_telemetry(device, memory_budget_bytes=num_bytes)


# ---- which ones there are at a start --------------------------------------------------------------------------------


async def test_start_with_a_model_keeps_those_that_were_added_and_forgets_the_one_of_another_command_line(
    tmp_path: Path,
) -> None:
    first = deployments_of(tmp_path, TransformerFleet("a"))
    await first.create(goal_of(tmp_path, "old"), None)
    await first.add(goal_of(tmp_path, "added"), None)
    lines: list[str] = []
    second = deployments_of(tmp_path, TransformerFleet("a"), lines)
    await second.create(goal_of(tmp_path, "new"), None)
    assert list(second.controllers) == ["new", "added"]
    assert list(StateFile(tmp_path / "state").current.deployments) == ["new", "added"]
    assert "old is served no longer" in lines
    third = deployments_of(tmp_path, TransformerFleet("a"))
    await third.restore()
    assert list(third.controllers) == ["new", "added"]
    # The options of a unit name the same model at every start, and may name one that was added.
    await (again := deployments_of(tmp_path, TransformerFleet("a"))).create(goal_of(tmp_path, "new"), None)
    assert list(again.controllers) == ["new", "added"]
    await (other := deployments_of(tmp_path, TransformerFleet("a"))).create(goal_of(tmp_path, "added"), None)
    assert list(other.controllers) == ["added"]


async def test_start_with_a_model_that_cannot_be_read_forgets_nothing(tmp_path: Path) -> None:
    await deployments_of(tmp_path, TransformerFleet("a")).create(goal_of(tmp_path, "old"), None)
    bad = goal_of(tmp_path, "bad")
    (tmp_path / "bad" / "config.json").write_text("{}")
    with pytest.raises(HearthError):
        await deployments_of(tmp_path, TransformerFleet("a")).create(bad, None)
    assert list(StateFile(tmp_path / "state").current.deployments) == ["old"]


async def test_hostile_model_is_refused_while_another_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (hostile := tmp_path / "hostile" / "model").mkdir(parents=True)
    CORPUS["template-doubling"](hostile)
    async with running_model(tmp_path, TransformerFleet("a")) as (served, controller):
        await until("the model is served", lambda: serves(controller))
        adding = asyncio.create_task(served.add(TransformerGoal(model_dir=str(hostile)), None))
        num_answers = 0
        while not adding.done():
            await ask(controller, timeout_seconds=5.0)
            num_answers += 1
        with pytest.raises(BadCheckpoint, match="480 MiB"):
            await adding
        assert num_answers > 10
        assert list(served.controllers) == ["model"]


@pytest.mark.parametrize("strategy", ["placeto", "random", "joint", "getf", "m-sct"])
async def test_saved_settings_that_no_longer_exist_are_reported_and_plans_are_made_by_auto(
    strategy: str, tmp_path: Path
) -> None:
    goal = {"kind": "graph", "model_file": str(save_two_branch_model(tmp_path / "graph.onnx")), "learn_seconds": 30.0}
    deployments = {
        "policy": {"goal": {**goal, "strategy": strategy}},
        "plain": {"goal": {**goal, "learn_seconds": 0.0}, "plan": None},
    }
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "serving.json").write_text(json.dumps({"version": 2, "deployments": deployments}))

    lines: list[str] = []
    home = deployments_of(tmp_path, TransformerFleet("a"), lines)
    await home.restore()
    assert lines == [
        "policy: the saved setting learn_seconds no longer exists and is ignored",
        f"policy: the strategy {strategy} no longer exists; plans are made by auto",
    ]
    assert [each.goal.strategy for each in home.controllers.values()] == ["auto", "auto"]
    # What is saved from now on has no such setting.
    assert await home._services.state.file.saved()
    lines.clear()
    await deployments_of(tmp_path, TransformerFleet("a"), lines).restore()
    assert not lines


async def test_saved_model_that_cannot_be_read_stays_saved_while_the_others_are_served(tmp_path: Path) -> None:
    first = deployments_of(tmp_path, TransformerFleet("a"))
    await first.create(goal_of(tmp_path, "chat"), None)
    await first.add(goal_of(tmp_path, "gone"), None)
    shutil.rmtree(tmp_path / "gone")
    lines: list[str] = []
    second = deployments_of(tmp_path, TransformerFleet("a"), lines)
    await second.restore()
    assert list(second.controllers) == ["chat"]
    assert any(line.startswith("gone is not served now, but stays saved: ") for line in lines)
    assert await second.remove("gone") == "gone"
    with pytest.raises(UnknownModel):
        await second.remove("gone")
    assert await second._services.state.file.saved()
    assert list(StateFile(tmp_path / "state").current.deployments) == ["chat"]
    shutil.rmtree(tmp_path / "chat")
    with pytest.raises(BadCheckpoint):  # none is left that could be served
        await deployments_of(tmp_path, TransformerFleet("a")).restore()


async def test_pin_and_keep_alive_time_change_without_a_new_plan(tmp_path: Path) -> None:
    fleet = TransformerFleet("a")
    first = deployments_of(tmp_path, fleet)
    await first.create(goal_of(tmp_path), None)
    async with running(first):
        await until("serving", lambda: serves(first.controllers["model"]))
    saved = StateFile(tmp_path / "state").current.deployments["model"].plan
    second = deployments_of(tmp_path, TransformerFleet("a"))
    await second.create(goal_of(tmp_path, pinned=True), None)
    found = StateFile(tmp_path / "state").current.deployments["model"]
    assert saved is not None
    assert (found.goal.pinned, found.plan) == (True, saved)
    third = deployments_of(tmp_path, TransformerFleet("a"))
    await third.restore()
    assert third.controllers["model"].goal.pinned


# ---- unloading ------------------------------------------------------------------------------------------------------


async def test_idle_model_is_unloaded_and_stays_so_over_a_restart_until_a_request_comes(tmp_path: Path) -> None:
    fleet = TransformerFleet("ab")
    async with running_model(tmp_path, fleet, keep_alive_seconds=0.05) as (_, controller):
        await until("unloaded", lambda: controller.lifecycle.phase == "unloaded")
        plan = controller.plan

        def unloaded() -> list[str]:
            return sorted(name for name, message in fleet.asked if isinstance(message, Unload))

        await until("no workers", lambda: len(unloaded()) == 2)
        assert unloaded() == ["a", "b"]
        await ask(controller)  # waits until the model is loaded again
        assert controller.plan is not None
        assert controller.plan == plan.with_epoch(controller.plan.epoch)
        await until("unloaded again", lambda: controller.lifecycle.phase == "unloaded")
        saved = tmp_path / "state"
        await until("saved as unloaded", lambda: StateFile(saved).current.deployments["model"].unloaded)
        assert controller.requests.num_failed == 0
    again = deployments_of(tmp_path, fleet)
    await again.restore()
    controller = again.controllers["model"]
    fleet.asked.clear()
    async with running(again):
        await until("unloaded", lambda: controller.lifecycle.phase == "unloaded")
        await asyncio.sleep(0.05)
        assert fleet.asked == []
        fleet.kill("b")
        await ask(controller)  # on the device that is left, without a wait for the other one
        assert [device.device_id for device in controller.plan.devices] == ["a"]


async def test_model_is_not_unloaded_while_a_request_runs(tmp_path: Path) -> None:
    fleet = TransformerFleet("a")
    async with running_model(tmp_path, fleet, keep_alive_seconds=0.02) as (_, controller):
        await until("unloaded", lambda: controller.lifecycle.phase == "unloaded")
        request = asyncio.create_task(ask(controller))
        await until("serving", lambda: serves(controller))
        fleet.released.clear()
        second = asyncio.create_task(ask(controller))
        await until("running", lambda: fleet.running["a"] > 0)
        await asyncio.sleep(0.3)  # many times as long as it stays loaded without a request
        assert controller.lifecycle.phase == "serving"
        fleet.released.set()
        await asyncio.gather(request, second)
        await until("unloaded", lambda: controller.lifecycle.phase == "unloaded")


async def test_client_chooses_until_the_next_request_when_the_idle_model_is_unloaded(tmp_path: Path) -> None:
    fleet = TransformerFleet("a")
    async with running_model(tmp_path, fleet) as (_, controller):

        def is_unloaded() -> bool:
            return controller.lifecycle.phase == "unloaded"

        await until("serving", lambda: serves(controller))
        controller.keep_alive.keep_loaded(0.0)
        await until("unloaded", is_unloaded)
        await ask(controller)
        await asyncio.sleep(0.3)  # the request has taken it back: the model stays loaded
        assert serves(controller)
        fleet.released.clear()
        request = asyncio.create_task(ask(controller))
        await until("running", lambda: fleet.running["a"] > 0)
        controller.keep_alive.keep_loaded(0.0)  # after the answer
        await asyncio.sleep(0.3)
        assert serves(controller)
        fleet.released.set()
        await request
        await until("unloaded", is_unloaded)


@pytest.mark.parametrize("of_goal", [{"pinned": True}, {"keep_alive_seconds": 0.1}])
async def test_pinned_model_stays_loaded_and_a_client_may_keep_another(tmp_path: Path, of_goal: dict[str, Any]) -> None:
    fleet = TransformerFleet("a")
    async with running_model(tmp_path, fleet, **of_goal) as (_, controller):
        await until("serving", lambda: serves(controller))
        controller.keep_alive.keep_loaded(0.0 if of_goal.get("pinned") else -1.0)
        await asyncio.sleep(0.4)
        assert serves(controller)


# ---- pins -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_models_on_two_devices(
    folder: Path, pinned: str | None
) -> AsyncIterator[tuple[TransformerFleet, Deployments]]:
    """The models `old` and `new`, each on one of two devices, which have memory for one."""
    fleet = TransformerFleet("a")
    async with running_model(folder, fleet, "old", strategy="auto", pinned=pinned == "old") as (deployments, old):
        await until("serving", lambda: serves(old))
        plan = old.plan
        assert plan is not None
        fleet.add("b")
        limit_memory(fleet, int(1.5 * plan.devices[0].memory.total))
        await deployments.add(goal_of(folder, "new", strategy="auto", pinned=pinned == "new"), None)
        await until("both serving", lambda: all(map(serves, deployments.controllers.values())))
        yield fleet, deployments


@pytest.mark.parametrize("pinned", ["old", "new"])
async def test_pinned_model_is_served_after_a_loss_and_the_other_says_what_is_missing(
    tmp_path: Path, pinned: str
) -> None:
    async with two_models_on_two_devices(tmp_path, pinned) as (fleet, deployments):
        first = deployments.controllers[pinned]
        (other,) = (each for each in deployments.controllers.values() if each is not first)
        lost, kept = device_of(first), device_of(other)
        deployments.device_changed(fleet.kill(lost))
        await until("that the pinned one is served", lambda: serves(first) and device_of(first) == kept)
        await until("that the other is not", lambda: other.missing_bytes)
        await ask(first)
        assert any(move.cause == f"{pinned}, which is pinned, needs the memory" for move in other.history())
        say = f"{other.missing_bytes} bytes are missing; {pinned} holds "
        await until("that it says so", lambda: say in other.state)
        with pytest.raises(MemoryTaken) as taken:
            await ask(other, 0.1)
        assert taken.value.missing_bytes == other.missing_bytes
        assert pinned in taken.value.holders
        fleet.add(lost)
        limit_memory(fleet, 8 << 30)
        await until("both", lambda: all(map(serves, deployments.controllers.values())))
        await ask(other)


async def test_new_pinned_model_takes_the_memory_of_one_that_is_not_pinned_without_a_failed_request(
    tmp_path: Path,
) -> None:
    fleet = TransformerFleet("a")
    async with running_model(tmp_path, fleet, "old") as (deployments, old):
        await until("serving", lambda: serves(old))
        limit_memory(fleet, int(1.5 * old.plan.devices[0].memory.total))
        fleet.released.clear()
        request = asyncio.create_task(ask(old))
        await until("running", lambda: fleet.running["a"] > 0)
        await deployments.add(goal_of(tmp_path, "new", pinned=True), None)
        new = deployments.controllers["new"]
        fleet.released.set()
        await until("new", lambda: serves(new))
        await until("what is missing", lambda: old.missing_bytes)
        await deployments.remove("new")
        await request  # it waited for the memory
        assert old.requests.num_failed == 0


async def test_model_that_is_too_large_in_any_case_ends_no_other(tmp_path: Path) -> None:
    fleet = TransformerFleet("a")
    async with running_model(tmp_path, fleet, "old") as (deployments, old):
        await until("serving", lambda: serves(old))
        limit_memory(fleet, int(1.5 * old.plan.devices[0].memory.total))
        write_model(tmp_path / "large", vocab_size=1 << 24)  # 1.5 GiB
        await deployments.add(TransformerGoal(model_dir=str(tmp_path / "large"), strategy="hmp", pinned=True), None)
        large = deployments.controllers["large"]
        await until("attempts", lambda: num_failures(large) >= 3)
        assert large.missing_bytes > 1 << 30
        assert [move.phase for move in old.history()].count("serving") == 1


async def test_model_that_is_in_vain_given_room_gets_it_once(tmp_path: Path) -> None:
    """Where nobody can tell before: it does not fit on the device because of a limit of its own."""
    fleet = TransformerFleet("a")
    async with running_model(tmp_path, fleet, "old") as (deployments, old):
        await until("serving", lambda: serves(old))
        limited = goal_of(tmp_path, "new", pinned=True, limits=(parse_limit("a=10MB"),))
        await deployments.add(limited, None)
        new = deployments.controllers["new"]
        await until("attempts", lambda: num_failures(new) >= 3)
        await until("serving again", lambda: serves(old))
        assert [move.phase for move in old.history()].count("serving") <= 2


async def test_without_pins_no_model_makes_room(tmp_path: Path) -> None:
    async with two_models_on_two_devices(tmp_path, None) as (fleet, deployments):
        out, other = deployments.controllers.values()
        deployments.device_changed(fleet.kill(device_of(out)))
        await until("what is missing", lambda: out.missing_bytes)
        assert [move.phase for move in other.history()].count("serving") == 1
        assert serves(other)


async def test_request_for_a_model_that_is_not_ready_yet_does_not_speak_of_memory(tmp_path: Path) -> None:
    deployments = deployments_of(tmp_path, TransformerFleet(""))
    await deployments.create(goal_of(tmp_path), None)
    with pytest.raises(NotServing):
        await ask(deployments.controllers["model"], 0.05)
