"""`hearth plan` where MODEL is a graph of operators: an ONNX file, a graph's JSON, or a published placement problem."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.cli.cluster import Reach, reached
from coordinator.cli.output import err, out, print_json
from coordinator.cli.render.graph_tables import (
    candidates_table,
    explanation_lines,
    graph_plan_tables,
    one_device_line,
    prediction_line,
    proof_line,
    segment_lines,
    title_of,
)
from coordinator.cli.render.picture import check_picture, drawing_of, save_picture
from coordinator.devices.cluster_file import read_cluster, read_instance
from coordinator.devices.graph_profiling import GraphProfiler
from coordinator.models.graph_file import Graph, kind_of, open_graph
from coordinator.plan.graph.cluster import GraphCluster, with_limits
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.price import price
from coordinator.plan.graph.request import Planned, check_strategy
from coordinator.serve.config import load_settings
from coordinator.serve.goal import graph_request
from coordinator.serve.solving import solve, solve_instance
from coordinator.serve.state import GraphGoal
from hearth.errors import BadSetting
from hearth.files import write_atomically
from hearth.platform.units import format_bytes, format_seconds

_NUM_OTHERS = 4  # that are shown without --explain


@dataclass(frozen=True)
class GraphOutput:
    """What to make of the plan."""

    explain: bool
    picture: Path | None
    save: Path | None
    as_json: bool


def plan_graph_command(goal: GraphGoal, reach: Reach, cluster_file: Path | None, output: GraphOutput) -> None:
    """Plan, print, draw, save. Raises HearthError."""
    path = Path(goal.model_file)
    check_strategy(goal.strategy, goal.objective)
    if output.picture is not None:
        check_picture(output.picture)
    if kind_of(path) == "instance":
        _plan_instance(goal, path, cluster_file, output)
        return
    graph = open_graph(path, goal.dims)
    if cluster_file is not None:
        cluster = read_cluster(cluster_file, graph.spec)
        planned = asyncio.run(solve(graph_request(goal, graph, cluster), _progress))
    else:
        planned, cluster = asyncio.run(_live(goal, graph, reach))
    _show(graph, cluster, planned, goal, output)


async def _live(goal: GraphGoal, graph: Graph, reach: Reach) -> tuple[Planned, GraphCluster]:
    if graph.model is None:
        raise BadSetting(setting="--cluster", reason=f"{graph.path} has no weights to run anywhere; name a cluster")
    settings = load_settings({})
    async with reached(goal, reach, settings) as (fleet, profiler, devices):
        graphs = GraphProfiler(
            fleet, profiler, settings.state_dir / "profiles", lambda line: err.print(line, soft_wrap=True)
        )
        cluster = with_limits(await graphs.cluster(devices, graph), goal.limits)
    return await solve(graph_request(goal, graph, cluster), _progress), cluster


def _progress(strategy: str) -> None:
    err.print(f"planning: {strategy}")


# ---- what is shown ----------------------------------------------------------------------------------------------------


def _show(graph: Graph, cluster: GraphCluster, planned: Planned, goal: GraphGoal, output: GraphOutput) -> None:
    plan, answer, spec = planned.chosen.plan, planned.chosen.answer, graph.spec
    assert plan is not None
    assert answer is not None
    members = list(dict.fromkeys(answer.assignment))
    priced = price(spec, plan.body.segments, cluster, members, goal.congestion, plan.wire.values)
    if output.save is not None:
        _save(output.save, plan.model_dump_json(indent=1))
    if output.picture is not None:
        legend = [
            f"{device.name}: {sum(len(segment.operators) for segment in plan.body.segments_of(rank))} operators, "
            f"{format_seconds(device.compute_seconds)}, {format_bytes(device.memory.weights)} of weights"
            for rank, device in enumerate(plan.devices)
        ]
        rank_of = {member: rank for rank, member in enumerate(members)}
        edges = [(a, b) for b in range(spec.num_operators) for a in spec.predecessors[b]]
        names, kinds = zip(*((operator.name, operator.kind) for operator in spec.operators), strict=True)
        assignment = [rank_of[device] for device in answer.assignment]
        save_picture(output.picture, drawing_of(title_of(plan), legend, names, kinds, assignment, edges))
    if output.as_json:
        print_json(
            {
                **_as_json(planned, goal, [device.name for device in cluster.devices], "s"),
                "predicted": plan.predicted.model_dump(mode="json"),
                "bottleneck": " to ".join(map(str, priced.bottleneck)),
                "plan": plan.model_dump(mode="json"),
            }
        )
        return
    out.print(*graph_plan_tables(plan), sep="\n")
    out.print(prediction_line(plan), soft_wrap=True)
    out.print(proof_line(planned, "s"), soft_wrap=True)
    if line := one_device_line(planned):
        out.print(line, soft_wrap=True)
    if output.explain:
        out.print(*explanation_lines(plan, spec, priced), sep="\n", markup=False, soft_wrap=True)
        out.print("segments:", *segment_lines(plan, spec), sep="\n", markup=False, soft_wrap=True)
        out.print(candidates_table(planned, goal.objective, "s"))
    elif len(planned.candidates) > 1:
        out.print(candidates_table(planned, goal.objective, "s", _NUM_OTHERS))
    if output.picture is not None:
        out.print(f"drew {output.picture}")


def _as_json(planned: Planned, goal: GraphGoal, devices: Sequence[str], unit: str) -> dict[str, Any]:
    answer = planned.chosen.answer
    assert answer is not None
    return {
        "objective": goal.objective,
        "strategy": answer.strategy,
        "asked_for": goal.strategy,
        "congestion": goal.congestion,
        "unit": unit,
        "objective_value": answer.objective_value,
        "bound": answer.bound,
        "proven_optimal": answer.proven_optimal,
        "planning_seconds": answer.planning_seconds,
        "devices": list(devices),
        "assignment": list(answer.assignment),
        "starts": list(answer.starts),
        "candidates": [
            {
                "strategy": each.label,
                "objective_value": each.answer.objective_value if each.answer else None,
                "bound": each.answer.bound if each.answer else None,
                "predicted_seconds": each.seconds(goal.objective) if each.plan else None,
                "planning_seconds": each.answer.planning_seconds if each.answer else None,
                "num_devices": each.num_devices,
                "reason": each.reason or None,
            }
            for each in planned.candidates
        ],
    }


def _save(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise BadSetting(setting="--save", reason=f"{path} cannot be written ({error.strerror})") from None


# ---- published placement problems -------------------------------------------------------------------------------------


def _plan_instance(goal: GraphGoal, path: Path, cluster_file: Path | None, output: GraphOutput) -> None:
    """Its devices and times are in the file, in a unit that it does not name."""
    for option, given in (
        ("--cluster", cluster_file), ("--save", output.save), ("--dim", goal.dims), ("--exclude", goal.exclude),
        ("--limit", goal.limits), ("--objective", goal.objective != "latency"),
    ):  # fmt: skip
        if given:
            raise BadSetting(setting=option, reason=f"{path} is a placement problem, for latency, with its own devices")
    problem = read_instance(path, goal.congestion)
    planned = asyncio.run(solve_instance(str(path), goal.strategy, goal.congestion, goal.time_limit_seconds, _progress))
    answer = planned.chosen.answer
    assert answer is not None
    used = problem.memory_of(answer.assignment)
    busy = [0.0] * problem.num_devices
    for operator, device in enumerate(answer.assignment):
        busy[device] += problem.seconds[operator][device]
    rows = [
        f"{name}: {answer.assignment.count(device)} operators, busy {busy[device]:.6g}, "
        f"memory {used[device]} of {problem.budget_bytes[device]}"
        for device, name in enumerate(problem.devices)
    ]
    if output.picture is not None:
        title = f"{problem.name} by {answer.strategy}: {answer.objective_value:.6g}"
        save_picture(output.picture, drawing_of(title, rows, problem.operators, (), answer.assignment, _edges(problem)))
    if output.as_json:
        print_json({**_as_json(planned, goal, problem.devices, "as in the file"), "model": problem.name})
        return
    out.print(f"{problem.name}: {problem.num_operators} operators on {problem.num_devices} devices")
    out.print(*rows, sep="\n", markup=False)
    out.print(proof_line(planned, ""))
    out.print(candidates_table(planned, "latency", "", None if output.explain else _NUM_OTHERS))
    if output.picture is not None:
        out.print(f"drew {output.picture}")


def _edges(problem: PlacementProblem) -> list[tuple[int, int]]:
    return [(flow.source, target) for flow in problem.flows for target in flow.targets]
