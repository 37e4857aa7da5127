"""A graph served in tiles by real processes: right after a restart, a loss and a takeover, and larger than a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.home import LOOPBACK, TestHome
from support.onnx_models import graph, node, saved, value, weight
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

from hearth.client.sync import Home, connect
from hearth.plan.plan import GraphPlan, is_graph_plan

ort = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytestmark = pytest.mark.processes

_WEIGHT_BYTES = 32 << 20  # of the only product


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row times a matrix of 32 MiB, then Relu."""
    nodes = [node("MatMul", "x w", "product"), node("Relu", "product", "y")]
    made = graph(nodes, [value("x", [1, 2048])], [value("y", None)], [weight("w", 2048, 4096)])
    return saved(tmp_path_factory.mktemp("model") / "product.onnx", made)


def assert_right(home: Home, model: Path, seed: int) -> None:
    inputs = {"x": np.random.default_rng(seed).standard_normal((1, 2048)).astype(np.float32)}
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (expected,) = session.run(["y"], inputs)
    found: dict[str, Any] = home.infer(inputs, timeout_seconds=60.0)
    assert np.abs(found["y"] - expected).max() < 1e-4


def tiled_plan(home: Home) -> GraphPlan:
    plan = home.status().plan
    assert is_graph_plan(plan)
    assert plan.model.tiles[0].pieces == (1, 2, 1)  # columns: of one row, they move the fewest bytes
    return plan


@pytest.fixture(scope="module")
def running(model: Path, profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    with TestHome(tmp_path_factory.mktemp("home"), model, profiles) as running:
        yield running


@pytest.fixture(scope="module")
def limits(running: TestHome) -> list[str]:
    """Options of `hearth serve` by which neither device can hold the whole model."""
    with running.serving("ab", "--min-devices", "2", "--strategy", "local") as home:
        plan = home.status().plan
        assert is_graph_plan(plan)
        limit = plan.devices[0].memory.total - _WEIGHT_BYTES
    return [f"--limit={name}={limit}" for name in "ab"]


def test_tiles_run_where_no_device_holds_the_model_and_survive_a_restart_and_a_loss(
    model: Path, running: TestHome, limits: list[str], tmp_path: Path
) -> None:
    running.start_coordinator("--min-devices", "2", *limits)
    with running.connect() as home:
        wait_for("the refusal", lambda: "memory" in home.readiness().state)
    running.stop("coordinator")
    with running.serving("ab", "--min-devices", "2", "--tiles", "2", *limits) as home:
        assert_right(home, model, 0)
        saved_plan = tmp_path / "plan.json"
        saved_plan.write_text(tiled_plan(home).model_dump_json())
    # Without the limits, one device may be predicted to be faster: the plan for both is given.
    running.start_coordinator("--min-devices", "2", "--plan", str(saved_plan))
    with running.ready() as home:
        plan = tiled_plan(home)
        assert plan.num_ranks == 2
    running.kill("coordinator")
    running.start_coordinator(model=False)
    with running.ready() as home:
        assert tiled_plan(home) == plan  # with its epoch: the workers were taken over
        assert_right(home, model, 1)
        running.kill("b")
        wait_for("a plan for the device that is left", lambda: home.ready() and tiled_plan(home).num_ranks == 1)
        assert_right(home, model, 2)
    running.stop("coordinator", 60.0)


def test_standby_takes_over_tiles(model: Path, running: TestHome, limits: list[str]) -> None:
    # Without the limits, one device may be predicted to be faster.
    with running.serving("ab", "--min-devices", "2", "--tiles", "2", *limits) as home:
        plan = tiled_plan(home)
        assert plan.num_ranks == 2
        leader = f"{LOOPBACK}:{running.port('coordinator')}"
        running.start_coordinator("--standby", "--leader", leader, model=False, name="standby")
        wait_for("the copy of the state", lambda: "the standby of coordinator\n" in running.log("standby"))
        workers = [running.worker_pid(name) for name in "ab"]
        running.kill("coordinator")
        wait_for("the takeover", lambda: "took over from coordinator" in running.log("standby"))
    with connect(f"{LOOPBACK}:{running.port('standby')}", key=running.key) as home:
        home.wait_ready(30.0)
        assert tiled_plan(home) == plan  # with its epoch
        assert_right(home, model, 3)
    assert [running.worker_pid(name) for name in "ab"] == workers
