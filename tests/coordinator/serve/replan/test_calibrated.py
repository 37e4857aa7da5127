"""Plans of a served graph with the times of its requests: slow devices get less work, bad changes are taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.controllers import ServedController, serving
from support.fleets import GraphFleet
from support.graphs import save_two_branch_model, two_branches

from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.serve.kinds.measurements import FOLDER, Measurements
from coordinator.serve.replan import calibrated
from coordinator.serve.state import GraphGoal
from hearth.wire.framing import pack_array
from hearth.wire.messages import Infer, Message, Run
from hearth.wire.rpc import Reply

SPEC = two_branches()
_SHORT_SECONDS, _LONG_SECONDS = 0.01, 0.05  # of a request


class SleepingFleet(GraphFleet):
    """A request takes `_LONG_SECONDS` on plans with the device `tardy`, else `_SHORT_SECONDS`; `slow` only shows in times."""

    tardy = ""

    async def call(self, device_id: str, message: Message, payload: Any = (), timeout_seconds: float = 10.0) -> Reply:
        if isinstance(message, Run):
            names = [device.name for device in self.loaded(device_id, message).plan.devices]
            await asyncio.sleep(_LONG_SECONDS if self.tardy in names else _SHORT_SECONDS)
        return await super().call(device_id, message, payload, timeout_seconds)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFile:
    return read_graph_file(save_two_branch_model(tmp_path_factory.mktemp("model") / "model.onnx", channels=40), {})


@asynccontextmanager
async def measured_home(
    folder: Path, graph: GraphFile, slow: str = "", tardy: str = "", **goal: Any
) -> AsyncIterator[ServedController]:
    fleet = SleepingFleet("abc", graph)
    fleet.tardy = tardy
    if slow:
        fleet.slow[slow] = 3.0
    wishes = GraphGoal.model_validate({"model_file": str(graph.path), "strategy": "heft", **goal})
    with mock.patch.object(calibrated, "_POLL_SECONDS", 0.002):
        async with serving(fleet, folder / "state", wishes, queue_limit=5) as home:
            yield home


async def ask(home: ServedController, count: int = 1) -> None:
    """Requests one after the other."""
    for _ in range(count):
        await home.kind.infer(Infer(names=("image",)), pack_array(np.zeros((1, 3, 16, 16), np.float32)))


async def saved(folder: Path) -> Measurements:
    (path,) = (folder / "state" / FOLDER).glob("*.json")
    measured = Measurements(path, SPEC, lambda device: 1.0)
    await measured.reading.settled(20.0)
    return measured


async def test_device_that_is_slower_than_profiled_gets_less_work(tmp_path: Path, graph: GraphFile) -> None:
    async with measured_home(tmp_path, graph, slow="a", tardy="a") as home:
        assert "a" in home.names()
        await home.until_replanned(lambda: ask(home))
        assert "a" not in home.names()
        assert home.count_lines("with the measured times") == 1
        await ask(home, 15)
        await home.until(lambda: home.count_lines("the new plan is kept"))
        assert home.controller.requests.num_failed == 0
    factors = (await saved(tmp_path)).calibration.device_factors()
    assert factors["a"] == pytest.approx(3.0, rel=0.05)
    # After a restart, the first plan knows the slow device.
    async with measured_home(tmp_path, graph, slow="a") as home:
        assert "a" not in home.names()


async def test_change_that_makes_requests_slower_is_taken_back(tmp_path: Path, graph: GraphFile) -> None:
    async with measured_home(tmp_path, graph, slow="a") as home:
        before = home.plan
        home.fleet.tardy = "c"
        await home.until_replanned(lambda: ask(home))
        assert "c" in home.names()
        await home.until_replanned(lambda: ask(home))
        assert home.plan.body == before.body
        assert home.count_lines("the new plan is taken back") == 1
        await ask(home, 20)
        assert home.plan.body == before.body


async def test_without_calibration_nothing_is_measured(tmp_path: Path, graph: GraphFile) -> None:
    async with measured_home(tmp_path, graph, slow="a", learn=False) as home:
        await ask(home, 15)
    assert not (tmp_path / "state" / FOLDER).exists()


def test_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"version": 2}')
    assert Measurements(path, SPEC, lambda device: 1.0).calibration.device_factors() == {}
    assert [each.name for each in tmp_path.iterdir()] == ["file.unreadable"]
