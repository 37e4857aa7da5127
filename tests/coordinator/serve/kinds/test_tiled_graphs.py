"""A graph served in tiles: cut for the devices at hand, made again from the plan after a restart, placed again after a loss."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
from support.controllers import ServedController, serving
from support.fleets import GraphFleet
from support.onnx_models import save_two_products

from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.serve.replan.drift import MAX_PRESENCE_SECONDS, REPLAN_SECONDS
from coordinator.serve.state import GraphGoal, StateFile
from hearth.errors import BadPlan, CannotTile
from hearth.plan.graph import CutOperator
from hearth.plan.plan import Plan
from hearth.wire.messages import Profile, SegmentParts


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFile:
    """Three operators of 10 ms, two of which have weights of 64 KiB, which are cut since one row cannot be."""
    return read_graph_file(save_two_products(tmp_path_factory.mktemp("model") / "model.onnx", 1, 128), {})


@asynccontextmanager
async def serving_tiles(
    folder: Path, graph: GraphFile, names: str = "abc", plan: Plan | None = None, **wishes: Any
) -> AsyncIterator[ServedController]:
    fields = {"model_file": str(graph.path), "strategy": "heft", "tiles": "auto", **wishes}
    goal, fleet = GraphGoal.model_validate(fields), GraphFleet(names, graph)
    async with serving(fleet, folder / "state", goal, plan) as home:
        yield home


def held_bytes(home: ServedController, device: str) -> int:
    """The weights that a device has loaded, without those within the graphs of its segments."""
    parts = home.fleet.loads[device].parts
    assert isinstance(parts, SegmentParts)
    arrays = {array.name: array for files in parts.files for array in files.initializers}
    return sum(4 * prod(array.shape) for array in arrays.values())


async def test_a_device_holds_only_the_weights_of_its_tiles(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_tiles(tmp_path, graph, "ab") as home:
        held = [held_bytes(home, each) for each in home.names()]
        assert len(held) == 2
        assert min(held) >= 32 << 10
        assert sum(held) == 128 << 10
        assert any("operators in tiles" in line for line in home.lines)


async def test_tiles_survive_a_restart_and_a_loss(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_tiles(tmp_path, graph) as home:
        plan = home.plan
        assert plan.model.tiles
        assert home.names() == "abc"
    saved = StateFile(tmp_path / "state").current.deployments["default"]
    assert isinstance(saved.goal, GraphGoal)
    assert (saved.goal.tiles, saved.plan) == ("auto", plan)
    async with serving_tiles(tmp_path, graph, plan=saved.plan) as home:
        assert home.plan == plan.with_epoch(2)
        assert not any("planned by" in line for line in home.lines)
        before = len(home.fleet.asked)
        home.kill("b")
        await home.until(lambda: home.ready and home.names() == "ac")
        assert home.plan.model.tiles == plan.model.tiles
        assert not any(isinstance(message, Profile) for _, message in home.fleet.asked[before:])


async def test_auto_serves_whole_operators_on_one_device_and_cuts_them_once_others_join(
    tmp_path: Path, graph: GraphFile
) -> None:
    async with serving_tiles(tmp_path, graph, "a") as home:
        assert home.plan.model.tiles == ()
        home.fleet.add("b")
        while home.names() != "ab":
            await home.until(lambda: home.ready)
            home.now += REPLAN_SECONDS + MAX_PRESENCE_SECONDS
            await home.wait_for_replanner()
        assert home.plan.model.tiles


async def test_tiles_of_another_graph_are_refused(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_tiles(tmp_path, graph) as home:
        plan = home.plan
        first, *others = plan.model.tiles
        for tiles, reason in (
            ((), "another graph"),
            (tuple(others), "another graph"),
            ((CutOperator(operator=first.operator, pieces=(1, 999, 1)), *others), "its tiles do not fit"),
        ):
            model = plan.model.model_copy(update={"tiles": tiles})
            with pytest.raises(BadPlan, match=reason):
                home.kind.check(plan.model_copy(update={"model": model}))
        home.kind.check(plan)


async def test_a_graph_that_cannot_be_cut_as_asked_is_rejected(tmp_path: Path, graph: GraphFile) -> None:
    small = save_two_products(tmp_path / "small.onnx", 2, 3)
    with pytest.raises(CannotTile, match=r"The operator [ay] \(MatMul\) cannot be cut into tiles: none of its axes"):
        ServedController(GraphFleet("a", graph), tmp_path, GraphGoal(model_file=str(small), tiles=7), None)
