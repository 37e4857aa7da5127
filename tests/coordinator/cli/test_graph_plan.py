"""`hearth plan` and its kin for graphs, as a person types them: what they print, draw and save, and every mistake told."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graphs import save_graph, save_two_branch_model, two_branches
from typer.testing import CliRunner

from coordinator.cli import graph_plan
from coordinator.cli.app import app
from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.auto import plan_graph, plan_instance
from coordinator.plan.graph.latency.schedule import schedule
from coordinator.plan.graph.request import GraphRequest, Planned
from hearth.plan.plan import plan_from_json
from tools.bench.schedule_checker import violations

# Two devices; 0 -> 1, 0 -> 2, 1 and 2 -> 3. Each holds two of the four operators.
INSTANCE = {
    "name": "diamond", "K": 2,
    "devices": [{"id": 0, "name": "fast", "mem": 20}, {"id": 1, "name": "slow", "mem": 20}],
    "nodes": [
        {"id": index, "name": f"task{index}", "task": index, "time": [2, 3], "memory": 10} for index in range(4)
    ],
    "edges": [
        [a, b, index, [0, 1, 1, 0], None] for index, (a, b) in enumerate([(0, 1), (0, 2), (1, 3), (2, 3)])
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's process takes a second to start, and is tested with the plans."""

    async def solve(request: GraphRequest, progress: Any) -> Planned:
        return plan_graph(request, time.monotonic, progress)

    async def solve_instance(path: str, strategy: str, congestion: bool, seconds: float, progress: Any) -> Planned:
        return plan_instance(read_instance(path, congestion), strategy, seconds, time.monotonic, progress)

    monkeypatch.setattr(graph_plan, "solve", solve)
    monkeypatch.setattr(graph_plan, "solve_instance", solve_instance)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """graph.json, model.onnx, instance.json and cluster.json in a folder."""
    save_graph(tmp_path / "graph.json", two_branches(flops=1e6, out_bytes=1000, weights=1 << 20))
    save_two_branch_model(tmp_path / "model.onnx", batch="batch")
    (tmp_path / "instance.json").write_text(json.dumps(INSTANCE))
    device = {"memory": "100MiB", "flops_per_second": 1e8}
    devices = [{"name": "kitchen", **device}, {"name": "hall", **device}]
    (tmp_path / "cluster.json").write_text(json.dumps({"mbit_per_second": 100, "devices": devices}))
    return tmp_path


def run(files: Path, *arguments: str) -> Any:
    """Names of files stand for themselves; others are options."""
    given = [str(files / each) if (files / each).exists() else each for each in arguments]
    return CliRunner().invoke(app, ["plan", *given], env={"COLUMNS": "120"})


def told(files: Path, *arguments: str) -> str:
    """The error of a command that must not work, in one line."""
    result = run(files, *arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return re.sub(r"\s+", " ", result.output)


def as_json(files: Path, *arguments: str) -> dict[str, Any]:
    result = run(files, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{") :])
    return found


@pytest.mark.parametrize(("objective", "value"), [("latency", 0.04), ("throughput", 0.03)])
def test_json_says_what_was_found_and_how_good_it_is(files: Path, objective: str, value: float) -> None:
    found = as_json(files, "graph.json", "--cluster", "cluster.json", "--objective", objective, "--time-limit", "2")
    assert found["objective_value"] == pytest.approx(value, rel=0.05)
    assert 0 < found["bound"] <= found["objective_value"] + 1e-12
    assert isinstance(found["proven_optimal"], bool)
    assert found["planning_seconds"] >= 0
    assert len(found["assignment"]) == 6
    assert set(found["assignment"]) == {0, 1}
    assert found["devices"] == ["kitchen", "hall"]
    assert found["predicted"]["latency_seconds"] >= found["predicted"]["bottleneck_seconds"]


def test_a_graph_is_planned_told_drawn_and_saved_without_devices(files: Path) -> None:
    result = run(
        files, "graph.json", "--cluster", "cluster.json", "--time-limit", "2", "--explain",
        "--picture", str(files / "plan.svg"), "--save", str(files / "plan.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("on 2 devices, for latency", "predicted:", "transfers of", "segments:", "local on hall", "drew"):
        assert text in " ".join(result.output.split())
    assert (files / "plan.svg").read_text().startswith("<svg")
    assert plan_from_json((files / "plan.json").read_text()).body.objective == "latency"


def test_one_device_is_said_in_so_many_words_where_links_are_slow(files: Path) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    (files / "cluster.json").write_text(json.dumps({**cluster, "latency_seconds": 10}))
    result = run(files, "graph.json", "--cluster", "cluster.json", "--time-limit", "1")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "on 1 device, for latency" in said
    assert "one device is faster" in said
    answer = as_json(files, "graph.json", "--cluster", "cluster.json", "--strategy", "critical-path")
    assert answer["strategy"] == "critical-path"


def test_an_onnx_file_is_planned_for_devices_of_a_file(files: Path) -> None:
    found = as_json(files, "model.onnx", "--dim", "batch=2", "--cluster", "cluster.json", "--strategy", "heft")
    placed = [operator for segment in found["plan"]["body"]["segments"] for operator in segment["operators"]]
    assert sorted(placed) == list(range(len(found["assignment"])))
    assert found["plan"]["model"]["sha256"]
    assert found["plan"]["model"]["inputs"] == ["image"]


def test_a_published_placement_problem_brings_its_own_devices(files: Path) -> None:
    for strategy in ("auto", "moirai"):
        found = as_json(files, "instance.json", "--strategy", strategy, "--time-limit", "5")
        problem = read_instance(files / "instance.json")
        # Two operators on each device: 2, then 2 | 1 + 3, then 1 + 2 on the fast one; or the other way round.
        assert found["unit"] == "as in the file"
        assert problem.overflow(found["assignment"]) == 0
        assert found["bound"] <= found["objective_value"]
        order = sorted(range(4), key=lambda each: (found["starts"][each], each))
        priced = schedule(problem, found["assignment"], order)
        assert violations(problem, priced) == []
        assert priced.makespan == pytest.approx(found["objective_value"])
    free = as_json(files, "instance.json", "--no-congestion", "--time-limit", "5", "--strategy", "moirai")
    assert free["objective_value"] <= found["objective_value"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("graph.json", "--cluster", "cluster.json", "--strategy", "best"), "'best' is none of auto, moirai"),
        (("graph.json", "--cluster", "cluster.json", "--objective", "power"), "'power' is none of latency, throughput"),
        (("graph.json", "--cluster", "cluster.json", "--strategy", "pipeline"), "pipeline is not for latency"),
        (("graph.json", "--cluster", "none.toml"), "none.toml cannot be read"),
        (("graph.json", "--cluster", "cluster.json", "--dim", "batch=1"), "has no dynamic dimensions"),
        (("graph.json", "--cluster", "cluster.json", "--picture", "plan.gif"), "ends neither in .svg nor in .png"),
        (("graph.json", "--cluster", "cluster.json", "--seq-len", "8"), "--seq-len cannot be used: it is for transformers"),
        (("graph.json",), "has no weights to run anywhere; name a cluster"),
        (("model.onnx", "--cluster", "cluster.json"), "batch"),
        (("model.onnx", "--cluster", "cluster.json", "--dim", "batch"), "not of the form NAME=N"),
        (("nothing.onnx", "--cluster", "cluster.json"), "nothing.onnx"),
        (("nothing.json", "--cluster", "cluster.json"), "nothing.json"),
        (("instance.json", "--cluster", "cluster.json"), "with its own devices"),
        (("instance.json", "--objective", "throughput", "--strategy", "pipeline"), "for latency, with its own devices"),
        ((".", "--objective", "latency"), "it is for graphs of operators"),
        ((".", "--picture", "plan.svg"), "it is for graphs of operators"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_sentence(files: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in told(files, *arguments)


def test_files_that_are_damaged_are_told(files: Path) -> None:
    model = (files / "model.onnx").read_bytes()
    (files / "model.onnx").write_bytes(model[: len(model) // 2])
    assert "model.onnx cannot be used" in told(files, "model.onnx", "--dim", "batch=1", "--cluster", "cluster.json")
    (files / "graph.json").write_text('{"name": "g", "nodes": [], "edges": []}')
    assert "graph.json cannot be used" in told(files, "graph.json", "--cluster", "cluster.json")


def test_a_model_larger_than_all_devices_says_by_how_many_bytes(files: Path) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    for device in cluster["devices"]:
        device["memory"] = "2MiB"
    (files / "cluster.json").write_text(json.dumps(cluster))
    result = run(files, "graph.json", "--cluster", "cluster.json", "--json")
    found = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    assert (found["error"], found["details"]["missing_bytes"]) == ("ModelDoesNotFit", 2 << 20)


def test_inputs_that_are_no_arrays_are_told(files: Path) -> None:
    for command in (["infer", str(files / "graph.json")], ["bench-model", "--inputs", str(files / "graph.json")]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        assert "no .npz file of plain arrays" in re.sub(r"\s+", " ", result.output)
    np.savez(files / "objects.npz", x=np.array([{}], dtype=object))
    result = CliRunner().invoke(app, ["infer", str(files / "objects.npz")])
    assert "no .npz file of plain arrays" in re.sub(r"\s+", " ", result.output)


def test_serving_refuses_what_is_for_the_other_kind_of_model(files: Path) -> None:
    from hearth.platform.security import new_home_key, save_credential

    save_credential(files / "key", new_home_key())
    for arguments, reason in (
        ((str(files / "model.onnx"), "--context", "9"), "it is for transformers"),
        ((str(files), "--objective", "latency"), "it is for graphs of operators"),
        ((str(files / "model.onnx"), "--strategy", "hmp"), "'hmp' is none of auto, moirai"),
        (("--objective", "latency"), "it needs the MODEL"),
    ):
        result = CliRunner().invoke(
            app, ["serve", *arguments, "--key", str(files / "key"), "--state-dir", str(files / "state")]
        )
        assert result.exit_code == 1, result.output
        assert reason in re.sub(r"\s+", " ", result.output)
