"""`hearth plan` and related commands for graphs: what they print, draw and save, and their error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_model
from support.graph_plans import make_graph_plan
from support.graphs import cluster_of, save_graph, save_two_branch_model, two_branches
from support.onnx_models import graph, node, save_two_products, saved, value, weight
from support.planning import in_process_planning
from support.schedule_checker import violations
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.render.graph_tables import proof_line
from coordinator.devices.cluster_file import read_instance
from coordinator.devices.profile_file import read_graph_profile, saved_graph_profile
from coordinator.models.graph_file import read_graph_file
from coordinator.models.onnx.cutting import check_segments
from coordinator.plan.graph.latency.schedule import schedule
from coordinator.plan.solution import Candidate, OperatorAssignment, Solution
from coordinator.serve.kinds.tiled_graphs import tiled_as
from hearth.plan.plan import GraphPlan, plan_from_json
from hearth.plan.profile import WireCost
from hearth.platform.security import new_home_key, save_credential

# Two devices; 0 -> 1, 0 -> 2, 1 and 2 -> 3. Each device can hold two of the four operators.
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
def _plan_here() -> Iterator[None]:
    with in_process_planning():
        yield


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
    """Run a command; names of files in the folder stand for their paths."""
    given = [str(files / each) if (files / each).exists() else each for each in arguments]
    return CliRunner().invoke(app, ["plan", *given], env={"COLUMNS": "120"})


def error_of(files: Path, *arguments: str) -> str:
    """The error of a command that must fail, in one line."""
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
def test_json_has_the_plan_its_objective_and_bound(files: Path, objective: str, value: float) -> None:
    found = as_json(files, "graph.json", "--cluster", "cluster.json", "--objective", objective, "--time-limit", "2")
    assert found["objective_value"] == pytest.approx(value, rel=0.05)
    assert 0 < found["bound"] <= found["objective_value"] + 1e-12
    assert isinstance(found["proven_optimal"], bool)
    assert found["planning_seconds"] >= 0
    assert len(found["assignment"]) == 6
    assert set(found["assignment"]) == {0, 1}
    assert found["devices"] == ["kitchen", "hall"]
    assert found["predicted"]["latency_seconds"] >= found["predicted"]["bottleneck_seconds"]


def test_graph_is_planned_explained_drawn_and_saved_offline(files: Path) -> None:
    result = run(
        files, "graph.json", "--cluster", "cluster.json", "--time-limit", "2", "--explain",
        "--picture", str(files / "plan.dot"), "--save", str(files / "plan.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in (
        "on 2 devices, for latency",
        "predicted:",
        "transfers per request",
        "segments:",
        "local on hall",
        "loss of a device: yes, any one device; predicted pause about",
        "weights that others store for a loss: ",
        " on all disks together",
        "wrote",
    ):
        assert text in " ".join(result.output.split())
    assert (files / "plan.dot").read_text().startswith("digraph {")
    assert plan_from_json((files / "plan.json").read_text()).body.objective == "latency"


def test_proof_and_prediction_are_distinguished() -> None:
    plan = make_graph_plan([(0, ["image"], ["scores"])], ["image"], ["scores"])
    solution = Solution(OperatorAssignment((0,)), 0.0146, bound=0.0146, proven=True)
    same = Candidate("moirai", "moirai", ("kitchen",), 0.0146, plan, solution)
    assert proof_line(same, "s").startswith("moirai: 14.6 ms, proven optimal, found in ")
    assert "prediction" not in proof_line(same, "s")
    line = proof_line(replace(same, seconds=0.0203), "s")
    assert line.startswith("moirai: 14.6 ms by its own objective (operators and transfers only), proven optimal")
    assert line.endswith("the prediction, with whole segments and the workers' overheads, is 39.0% above it")


def test_single_device_choice_is_explained_on_slow_links(files: Path) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    (files / "cluster.json").write_text(json.dumps({**cluster, "latency_seconds": 10}))
    result = run(files, "graph.json", "--cluster", "cluster.json", "--time-limit", "1")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "on 1 device, for latency" in output
    assert "one device is faster" in output
    answer = as_json(files, "graph.json", "--cluster", "cluster.json", "--strategy", "critical-path")
    assert answer["strategy"] == "critical-path"


def test_onnx_file_is_planned_for_devices_of_a_cluster_file(files: Path) -> None:
    found = as_json(files, "model.onnx", "--dim", "batch=2", "--cluster", "cluster.json", "--strategy", "heft")
    placed = [operator for segment in found["plan"]["body"]["segments"] for operator in segment["operators"]]
    assert sorted(placed) == list(range(len(found["assignment"])))
    assert found["plan"]["model"]["sha256"]
    assert found["plan"]["model"]["inputs"] == ["image"]


def test_published_instance_brings_its_own_devices(files: Path) -> None:
    for strategy in ("auto", "moirai"):
        found = as_json(files, "instance.json", "--strategy", strategy, "--time-limit", "5")
        problem = read_instance(files / "instance.json")
        # Two operators on each device: 2, then 2 | 1 + 3, then 1 + 2 on the fast one; or with the devices exchanged.
        assert found["unit"] == "as in the file"
        assert problem.overflow_bytes(found["assignment"]) == 0
        assert found["bound"] <= found["objective_value"]
        order = sorted(range(4), key=lambda each: (found["starts"][each], each))
        priced = schedule(problem, found["assignment"], order)
        assert violations(problem, priced) == []
        assert priced.makespan == pytest.approx(found["objective_value"])
    free = as_json(files, "instance.json", "--no-congestion", "--time-limit", "5", "--strategy", "moirai")
    assert free["objective_value"] <= found["objective_value"]


CLUSTER = ("--cluster", "cluster.json", "--strategy", "heft")
DOPPLER = ("graph.json", "--cluster", "cluster.json", "--strategy", "doppler")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("graph.json", "--cluster", "cluster.json", "--strategy", "best"), "'best' is none of auto, moirai"),
        (("graph.json", "--cluster", "cluster.json", "--objective", "power"), "'power' is none of latency, throughput"),
        (("graph.json", "--cluster", "cluster.json", "--strategy", "pipeline"), "pipeline is not for latency"),
        (("graph.json", "--cluster", "none.toml"), "none.toml cannot be read"),
        (("graph.json", "--cluster", "cluster.json", "--dim", "batch=1"), "has no dynamic dimensions"),
        (("graph.json", "--cluster", "cluster.json", "--picture", "plan.svg"), "Graphviz draws it: dot -Tsvg plan.dot"),
        (("graph.json",), "has no weights to run on live devices; name a cluster"),
        (("model.onnx", "--cluster", "cluster.json"), "batch"),
        (("model.onnx", "--cluster", "cluster.json", "--dim", "batch"), "not of the form NAME=N"),
        (("nothing.onnx", "--cluster", "cluster.json"), "nothing.onnx"),
        (("nothing.json", "--cluster", "cluster.json"), "nothing.json"),
        (("instance.json", "--cluster", "cluster.json"), "with its own devices"),
        (("instance.json", "--objective", "throughput", "--strategy", "pipeline"), "with its own devices; only latency"),
        ((*DOPPLER, "--learn", "soon"), "'soon' is not a time such as 30s or 5min"),
        ((*DOPPLER, "--learn", "0s"), "more than 0 and at most 24h"),
        ((*DOPPLER, "--learn", "25h"), "more than 0 and at most 24h"),
        (("graph.json", "--cluster", "cluster.json", "--learn", "30s"), "only the policy of --strategy doppler learns"),
        (("graph.json", *CLUSTER, "--learn", "30s"), "only the policy of --strategy doppler learns"),
        (("instance.json", "--strategy", "doppler", "--learn", "30s"), "a placement problem, with its own devices"),
    ],
)  # fmt: skip
def test_invalid_input_is_reported_in_a_sentence(files: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in error_of(files, *arguments)


def test_damaged_files_are_reported(files: Path) -> None:
    model = (files / "model.onnx").read_bytes()
    (files / "model.onnx").write_bytes(model[: len(model) // 2])
    assert "model.onnx cannot be used" in error_of(files, "model.onnx", "--dim", "batch=1", "--cluster", "cluster.json")
    (files / "graph.json").write_text('{"name": "g", "nodes": [], "edges": []}')
    assert "graph.json cannot be used" in error_of(files, "graph.json", "--cluster", "cluster.json")


def test_saved_profile_gives_the_same_plan_offline(files: Path) -> None:
    profile = str(files / "profile.json")
    first = as_json(files, "model.onnx", "--dim", "batch=1", *CLUSTER, "--save-profile", profile)
    again = as_json(files, "model.onnx", "--dim", "batch=1", "--load-profile", "profile.json", "--strategy", "heft")
    for found in (first, again):
        for each in (found, *found["candidates"]):
            each.pop("planning_seconds")
    assert again == first
    saved = json.loads((files / "profile.json").read_text())
    assert (saved["version"], saved["kind"]) == (1, "graph")
    assert "Infinity" not in (files / "profile.json").read_text()  # not valid JSON
    assert "with another --dim" in error_of(files, "model.onnx", "--dim", "batch=2", "--load-profile", "profile.json")
    assert "another graph than" in error_of(files, "graph.json", "--load-profile", "profile.json")
    assert "--cluster already names the devices" in error_of(
        files, "model.onnx", "--dim", "batch=1", *CLUSTER, "--load-profile", profile
    )


def test_profile_of_measured_devices_is_saved_completely(tmp_path: Path) -> None:
    graph = read_graph_file(save_graph(tmp_path / "graph.json", two_branches()), {})
    wire = WireCost(seconds_per_message=1e-5, convert_seconds_per_value={"fp16": 1e-9})
    cluster = cluster_of(
        graph.spec, (3.0, 7.0, 11.0), 1e7 / 3, latency_seconds=1e-4 / 3, process_bytes=5, load_bytes=6, loading_bytes=7,
        run_bytes=8, wire=wire,
    )  # fmt: skip
    (tmp_path / "profile.json").write_text(saved_graph_profile(graph, cluster).model_dump_json())
    assert read_graph_profile(tmp_path / "profile.json", graph) == cluster


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_predicted_timeline_is_saved_as_a_chrome_trace(files: Path, objective: str) -> None:
    timeline = files / "timeline.json"
    result = run(
        files, "graph.json", "--cluster", "cluster.json", "--objective", objective, "--timeline", str(timeline),
        "--time-limit", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"kitchen", "hall"}
    bars = [event for event in events if event["ph"] == "X"]
    assert {bar["tid"] for bar in bars} >= {"compute", "from kitchen"}
    assert any("request 1" in bar["name"] for bar in bars) == (objective == "throughput")


def test_exclusions_and_limits_apply_to_cluster_files(files: Path) -> None:
    found = as_json(files, "graph.json", *CLUSTER, "--exclude", "kitchen")
    assert found["devices"] == ["hall"]
    found = as_json(files, "graph.json", *CLUSTER[:2], "--strategy", "local", "--limit", "kitchen=1MiB")
    assert [device["name"] for device in found["plan"]["devices"]] == ["hall"]
    assert "no device here is called cellar" in error_of(files, "graph.json", *CLUSTER, "--exclude", "cellar")
    everyone = ("--exclude", "kitchen", "--exclude", "hall")
    assert "no device is left" in error_of(files, "graph.json", *CLUSTER, *everyone)


def test_profile_cannot_be_served_as_a_plan(files: Path) -> None:
    as_json(files, "model.onnx", "--dim", "batch=1", *CLUSTER, "--save-profile", str(files / "p.json"))
    save_credential(files / "key", new_home_key())
    result = CliRunner().invoke(
        app,
        ["serve", str(files / "model.onnx"), "--plan", str(files / "p.json"), "--key", str(files / "key"),
         "--state-dir", str(files / "state")],
    )  # fmt: skip
    assert result.exit_code != 0
    output = re.sub(r"\s+", " ", result.output)
    assert "p.json is a profile of devices for a graph of operators, not a saved plan" in output


def test_wrong_file_type_is_recognised(files: Path) -> None:
    as_json(files, "graph.json", *CLUSTER, "--save", str(files / "plan.json"), "--save-profile", str(files / "p.json"))
    transformer = {"devices": [], "links": []}
    (files / "transformer.json").write_text(json.dumps(transformer))
    model = str(write_model(files / "model"))
    for arguments, reason in (
        (
            ("graph.json", "--cluster", "p.json"),
            "p.json is a profile of devices for a graph of operators, not a cluster",
        ),
        (("graph.json", "--cluster", "plan.json"), "plan.json is a saved plan, not a cluster file"),
        (("graph.json", "--load-profile", "cluster.json"), "is a cluster file, not a profile of devices for a graph"),
        (("graph.json", "--load-profile", "transformer.json"), "is a profile of devices for a transformer, not"),
        (("graph.json", "--load-profile", "instance.json"), "is a placement problem, not a profile"),
        ((model, "--load-profile", "p.json"), "for a graph of operators, not a profile of devices for a transformer"),
        (("plan.json",), "plan.json cannot be used: it is a saved plan"),
        (("p.json", "--cluster", "cluster.json"), "it is a profile of devices for a graph"),
    ):
        assert reason in error_of(files, *arguments)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "is not a valid profile (version:"),
        ({"links": []}, "lacks the link from kitchen to hall"),
        ({"seconds": [[1.0, 2.0]]}, "must have 6 rows of 2 seconds"),
        ({"seconds": [[-1.0, 2.0]]}, "is not a valid profile (seconds.0.0:"),
        ({"devices": None}, "is not a valid profile (devices:"),
    ],
)
def test_damaged_profile_is_reported(files: Path, fields: dict[str, Any], reason: str) -> None:
    as_json(files, "graph.json", *CLUSTER, "--save-profile", str(files / "profile.json"))
    saved = json.loads((files / "profile.json").read_text())
    (files / "profile.json").write_text(json.dumps({**saved, **fields}))
    assert reason in error_of(files, "graph.json", "--load-profile", "profile.json")


def test_missing_bytes_are_reported_if_the_model_does_not_fit(files: Path) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    for device in cluster["devices"]:
        device["memory"] = "2MiB"
    (files / "cluster.json").write_text(json.dumps(cluster))
    result = run(files, "graph.json", "--cluster", "cluster.json", "--json")
    found = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    assert (found["error"], found["details"]["missing_bytes"]) == ("ModelDoesNotFit", 2 << 20)


def test_invalid_input_arrays_are_reported(files: Path) -> None:
    for command in (["infer", str(files / "graph.json")], ["bench-model", "--inputs", str(files / "graph.json")]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        assert "not an .npz file of plain arrays" in re.sub(r"\s+", " ", result.output)
    np.savez(files / "objects.npz", x=np.array([{}], dtype=object))
    result = CliRunner().invoke(app, ["infer", str(files / "objects.npz")])
    assert "not an .npz file of plain arrays" in re.sub(r"\s+", " ", result.output)


def test_serve_rejects_options_of_the_other_kind_of_model(files: Path) -> None:
    save_credential(files / "key", new_home_key())
    for arguments, reason in (
        ((str(files / "model.onnx"), "--context", "9"), "it applies to transformers"),
        ((str(files), "--objective", "latency"), "it applies to graphs of operators"),
        ((str(files / "model.onnx"), "--strategy", "hmp"), "'hmp' is none of auto, moirai"),
        (("--objective", "latency"), "it needs a MODEL"),
    ):
        result = CliRunner().invoke(
            app, ["serve", *arguments, "--key", str(files / "key"), "--state-dir", str(files / "state")]
        )
        assert result.exit_code == 2, result.output
        assert reason in re.sub(r"\s+", " ", result.output)


def tiled(files: Path, *arguments: str) -> dict[str, Any]:
    path = save_two_products(files / "heavy.onnx")
    result = CliRunner().invoke(
        app, ["plan", str(path), "--cluster", str(files / "cluster.json"), "--strategy", "heft", "--json", *arguments]
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_tiles_share_an_operator_among_devices(files: Path) -> None:
    """5.4 s of computation on one of two equal devices; the tiles wait only for the output, 1 MiB at 100 Mbit/s."""
    whole, cut, fixed = (tiled(files, "--tiles", each) for each in ("off", "auto", "4"))
    assert whole["objective_value"] > 5
    assert cut["objective_value"] < 0.55 * whole["objective_value"]
    assert (len(whole["assignment"]), len(fixed["assignment"])) == (3, 17)
    assert set(cut["assignment"]) == {0, 1}


def test_a_saved_plan_of_tiles_names_them(files: Path) -> None:
    tiled(files, "--tiles", "4", "--save", str(files / "plan.json"))
    plan = plan_from_json((files / "plan.json").read_text(), GraphPlan)
    graph = read_graph_file(files / "heavy.onnx", {})
    again = tiled_as(graph, plan.model.tiles)
    assert (len(plan.model.tiles), again.fingerprint) == (3, plan.model.sha256)
    check_segments(again.spec, plan.body.segments)


@pytest.mark.parametrize(
    ("num_devices", "memory", "seconds"),
    [
        (2, 1_250_000, 3.0),  # whole, each of two weights of 1 MiB is on another device; cut, both devices compute both
        (4, 600_000, 1.9),  # no device has room for one weight
    ],
)
def test_weights_are_cut_where_devices_are_small(files: Path, num_devices: int, memory: int, seconds: float) -> None:
    cluster = json.loads((files / "cluster.json").read_text())
    small = [{**cluster["devices"][0], "name": f"d{index}", "memory": memory} for index in range(num_devices)]
    (files / "cluster.json").write_text(json.dumps({**cluster, "devices": small}))
    planned = tiled(files, "--tiles", "auto")
    assert planned["objective_value"] < seconds
    assert set(planned["assignment"]) == set(range(num_devices))


def test_auto_keeps_operators_whole_if_tiles_are_not_faster(files: Path) -> None:
    slow = json.loads((files / "cluster.json").read_text()) | {"mbit_per_second": 0.01}
    (files / "cluster.json").write_text(json.dumps(slow))
    whole, cut = (tiled(files, "--tiles", each) for each in ("off", "auto"))
    assert cut["assignment"] == whole["assignment"]


@pytest.mark.parametrize(
    ("model", "arguments", "reason"),
    [
        ("heavy.onnx", ("--tiles", "many"), "auto, off, or a number"),
        ("heavy.onnx", ("--tiles", "2", "--load-profile", "plan.json"), "cannot be combined with --tiles"),
        ("graph.json", ("--tiles", "2"), "is no ONNX file"),
        ("small.onnx", ("--tiles", "7"), "The operator y (MatMul) cannot be cut into tiles: none of its axes"),
    ],
)
def test_invalid_tiles_are_reported(files: Path, model: str, arguments: tuple[str, ...], reason: str) -> None:
    save_two_products(files / "heavy.onnx")
    saved(
        files / "small.onnx",
        graph([node("MatMul", "x w", "y")], [value("x", [2, 3])], [value("y", None)], [weight("w", 3, 3)]),
    )
    assert reason in error_of(files, model, "--cluster", "cluster.json", *arguments)
