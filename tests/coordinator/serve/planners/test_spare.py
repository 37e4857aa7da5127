"""Idle planner processes: used once, replaced, not used when they died, and ended with the coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from support.checkpoints import write_model
from support.controllers import serving
from support.fleets import TransformerFleet
from support.plans import BERT_LARGE, cluster, device_profile
from support.waiting import until

from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.planners import process
from coordinator.serve.planners.process import SparePlanners, solve_transformer, start_planner
from coordinator.serve.state import TransformerGoal
from hearth.platform.child import Child

SMALL = BERT_LARGE.model_copy(update={"num_layers": 2, "name": "small"})
REQUEST = PlanRequest(
    SMALL, cluster([device_profile(index, speed) for index, speed in enumerate((1.0, 2.0))], 1000), 284
)


@pytest.fixture(autouse=True)
def start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_REST_SECONDS", 0.0)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules that were run in a fresh process."""
    started: list[str] = []
    run_module = process.run_module

    async def run(module: str, *rest: object) -> object:
        started.append(module)
        return await run_module(module, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(process, "run_module", run)
    return started


@asynccontextmanager
async def kept(kind: process.PlannerKind = "transformer") -> AsyncIterator[SparePlanners]:
    """With one process that is ready."""
    spares = SparePlanners()
    spares.keep(kind)
    try:
        await ready(spares, kind)
        yield spares
    finally:
        await spares.close()


async def ready(spares: SparePlanners, kind: process.PlannerKind = "transformer") -> Child:
    await until("a planner process is ready", lambda: kind in spares.ready)
    return spares.ready[kind]


async def test_first_plan_waits_for_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_REST_SECONDS", 1e9)

    spares = SparePlanners()
    spares.keep("transformer", at_once=True)
    try:
        assert (await ready(spares)).runs
    finally:
        await spares.close()


async def test_idle_process_makes_one_plan_and_is_replaced(fresh: list[str]) -> None:
    async with kept() as spares:
        first = await ready(spares)
        assert await solve_transformer(REQUEST, spares) == plan_transformer(REQUEST)
        assert not fresh
        assert not psutil.pid_exists(first.pid)
        assert (await ready(spares)).pid != first.pid


@pytest.mark.parametrize("noticed", [True, False])
async def test_process_that_died_is_not_used(fresh: list[str], noticed: bool) -> None:
    async with kept() as spares:
        dead = await ready(spares)
        os.kill(dead.pid, signal.SIGKILL)
        if noticed:
            await until("its death is noticed", lambda: not dead.runs)
        assert await solve_transformer(REQUEST, spares) == plan_transformer(REQUEST)
        assert fresh
        assert (await ready(spares)).pid != dead.pid


async def test_fresh_process_plans_while_none_of_its_kind_is_ready(fresh: list[str]) -> None:
    async with kept("graph") as spares:
        other = await ready(spares, "graph")
        assert await solve_transformer(REQUEST, spares) == plan_transformer(REQUEST)
        assert fresh
        assert (other.runs, spares.take("transformer")) == (True, None)  # that kind is not served


async def test_process_that_cannot_start_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_MODULES", {"transformer": ("no_such_module",)})
    monkeypatch.setattr(process, "_ATTEMPTS", 2)
    spares = SparePlanners()
    spares.keep("transformer")
    await until("its start failed", lambda: caplog.text.count("no planner process is kept ready") == 2)
    assert "No module named 'no_such_module'" in caplog.text
    assert spares.take("transformer") is None
    await spares.close()


async def test_stop_leaves_no_process() -> None:
    before = psutil.Process().children()
    async with kept() as spares:
        idle = await ready(spares)
    assert not psutil.pid_exists(idle.pid)
    spares.keep("transformer")
    await asyncio.sleep(0)
    await spares.close()  # while one starts
    assert [child for child in psutil.Process().children() if child not in before] == []


_COORDINATOR = """
import asyncio
from coordinator.serve.planners import process

async def main():
    process._REST_SECONDS = 0
    spares = process.SparePlanners()
    spares.keep("transformer")
    while not spares.ready:
        await asyncio.sleep(0.01)
    print(spares.ready["transformer"].pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_death_of_the_coordinator_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", _COORDINATOR], stdout=subprocess.PIPE, text=True) as coordinator:
        pid = int(coordinator.stdout.readline())
        assert psutil.pid_exists(pid)
        coordinator.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)
    assert not alive


async def test_serving_keeps_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = TransformerGoal(model_dir=str(write_model(tmp_path / "model")), strategy="hmp")
    async with serving(TransformerFleet("ab"), tmp_path / "state", goal) as home:
        with monkeypatch.context() as patch:  # its end comes before that of `serving`, which patches this, too
            patch.setattr(process, "start_planner", start_planner)  # `serving` starts none
            home.tools.spare_planners.replace("transformer")  # as after a plan: only what is kept is replaced
            await ready(home.tools.spare_planners)
            await home.tools.spare_planners.close()
