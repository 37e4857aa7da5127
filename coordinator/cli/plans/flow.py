"""The steps of `hearth plan`: profile, plan, save and show, for both kinds of model, and for published placement problems."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from coordinator.cli.model_options import GRAPH, INSTANCE, TRANSFORMER
from coordinator.cli.options import AsJsonOption
from coordinator.cli.output import out, print_json, write_file
from coordinator.cli.plans.graph import NUM_ALTERNATIVES, GraphPlanning, PlannedGraph, report_strategy
from coordinator.cli.plans.live import ConnectionOptions, connect_devices, select_devices
from coordinator.cli.plans.transformer import TransformerPlanning
from coordinator.cli.render.graph_tables import candidates_table, planned_as_json, proof_line
from coordinator.cli.render.picture import dot_graph
from coordinator.devices.cluster_file import read_instance
from coordinator.devices.registry import RECONNECT_SECONDS
from coordinator.plan.redundancy import MAX_EXAMINED_DEVICES, describe_losses, describe_spares
from coordinator.serve.config import load_coordinator_settings
from coordinator.serve.planners.process import solve_instance
from coordinator.serve.state import GraphGoal
from hearth.errors import BadSetting
from hearth.trace import chrome_trace

Planning: TypeAlias = TransformerPlanning | GraphPlanning


@dataclass(frozen=True)
class OutputOptions:
    """How to show a plan, and the files to write."""

    explain: Annotated[
        bool, typer.Option("--explain", help="Show every candidate plan, and why it was not chosen.")
    ] = False
    save: Annotated[
        Path | None, typer.Option(help="Save the plan as JSON, for `hearth serve --plan`."), TRANSFORMER | GRAPH
    ] = None
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Save the predicted timeline as a Chrome trace, like the measured one of `hearth embed --trace`.",
            metavar="FILE",
        ),
        TRANSFORMER | GRAPH,
    ] = None
    picture: Annotated[
        Path | None,
        typer.Option(help="(graph) Save the graph, coloured by device, for Graphviz (.dot).", metavar="FILE"),
        GRAPH | INSTANCE,
    ] = None
    save_profile: Annotated[
        Path | None,
        typer.Option(help="Save the measurements of devices and links as JSON.", metavar="FILE"),
        TRANSFORMER | GRAPH,
    ] = None
    as_json: AsJsonOption = False


async def plan_model(
    planning: Planning, profile: Path | None, devices: Path | None, connection: ConnectionOptions, output: OutputOptions
) -> None:
    """Plan for the devices of a saved profile, of a cluster file (`devices`), or for live ones. Raises HearthError."""
    cluster: Any = planning.cluster_from_files(profile, devices)
    if cluster is None:
        async with connect_devices(planning.goal, connection, load_coordinator_settings({})) as live:
            cluster = await planning.profile(live)
    else:
        remaining = select_devices(planning.goal, cluster.devices, cluster.devices)
        cluster = cluster.subset(tuple(device.device_id for device in remaining))
    if output.save_profile is not None:
        write_file("--save-profile", output.save_profile, planning.saved_profile(cluster).model_dump_json(indent=1))
    planned = await planning.plan(cluster)
    if output.save is not None:
        write_file("--save", output.save, planned.plan.model_dump_json(indent=1))
    if output.timeline is not None:
        write_file("--timeline", output.timeline, json.dumps(chrome_trace(planned.timeline())))
    if output.picture is not None and isinstance(planned, PlannedGraph):
        write_file("--picture", output.picture, planned.picture())
    if output.as_json:
        print_json(planned.as_json(output.explain))
        return
    planned.show(output.explain)
    for note in planned.result.notes:
        out.print(note, markup=False)
    if planned.plan.num_ranks <= MAX_EXAMINED_DEVICES:
        losses = await planned.losses()
        out.print(f"loss of a device: {describe_losses(losses, RECONNECT_SECONDS)}", markup=False)
        if spares := describe_spares(losses):
            out.print(f"weights that others store for a loss: {spares}", markup=False)
    if output.picture is not None:
        out.print(f"wrote {output.picture}")


async def plan_problem(goal: GraphGoal, output: OutputOptions) -> None:
    """Solve a placement problem and print the result, without a unit: the file names none. Raises HearthError."""
    path = Path(goal.model_file)
    if goal.objective != "latency":
        reason = f"{path} is a placement problem with its own devices; only latency is supported"
        raise BadSetting(setting="--objective", reason=reason)
    problem = read_instance(path, goal.congestion)
    planned = await solve_instance(goal, report_strategy)
    solution = planned.chosen.solution
    assert solution is not None
    assignment = solution.assignment.devices
    used = problem.used_bytes(assignment)
    rows = []
    for device, name in enumerate(problem.devices):
        own = [operator for operator, rank in enumerate(assignment) if rank == device]
        busy = sum(problem.seconds[operator][device] for operator in own)
        memory = f"memory {used[device]} of {problem.budget_bytes[device]}"
        rows.append(f"{name}: {len(own)} operators, busy {busy:.6g}, {memory}")
    if output.picture is not None:
        title = f"{problem.name} by {planned.chosen.strategy}: {solution.value:.6g}"
        edges = [(flow.source, target) for flow in problem.flows for target in flow.targets]
        operators = [(name,) for name in problem.operators]
        write_file("--picture", output.picture, dot_graph(title, rows, operators, assignment, edges))
    if output.as_json:
        print_json({**planned_as_json(planned, goal, problem.devices, "as in the file"), "model": problem.name})
        return
    out.print(f"{problem.name}: {problem.num_operators} operators on {problem.num_devices} devices")
    out.print(*rows, sep="\n", markup=False)
    out.print(proof_line(planned.chosen, ""))
    out.print(candidates_table(planned, "latency", "", None if output.explain else NUM_ALTERNATIVES))
    if output.picture is not None:
        out.print(f"wrote {output.picture}")
