"""Tables and text lines for plans of operator graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from coordinator.cli.render.tables import (
    alternatives_table,
    device_count_text,
    make_table,
    memory_table,
    right_column,
    work_table,
)
from coordinator.plan.graph.predict import GraphPrediction
from coordinator.plan.graph.request import GraphRequest, objective_seconds
from coordinator.plan.graph.tasks import tensor_transfers
from coordinator.plan.methods import LOCAL
from coordinator.plan.simulator import ResourceKind
from coordinator.plan.solution import Candidate, PlanningResult
from coordinator.serve.state import GraphGoal
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes, format_seconds

_NUM_TRANSFERS = 12  # transfers listed by --explain, the largest first; they fit on one screen
_NEGLIGIBLE_DIFFERENCE = 0.0005  # relative; smaller differences print as 0.0%


def graph_plan_tables(plan: GraphPlan, peaks: Mapping[str, int] = {}) -> tuple[Table, Table]:
    """Per device: operators, segments and busy time per request; and bytes against the budget (`memory_table`)."""
    title = f"Plan: {plan.model.name} by {plan.planner} {device_count_text(plan)}, for {plan.body.objective}"
    segments = [plan.body.segments_of(rank) for rank in range(plan.num_ranks)]
    work: dict[str, Iterable[object]] = {
        "operators": [sum(len(segment.operators) for segment in own) for own in segments],
        "segments": [len(own) for own in segments],
        "busy per request": [format_seconds(device.compute_seconds) for device in plan.devices],
    }
    return work_table(plan, title, work), memory_table(plan, ("weights", "activations", "workspace"), peaks)


def prediction_line(plan: GraphPlan) -> str:
    """Predicted latency of one request, and throughput of a full pipeline."""
    predicted = plan.predicted
    rate = 1 / predicted.bottleneck_seconds if predicted.bottleneck_seconds > 0 else float("inf")
    return (
        f"predicted: {format_seconds(predicted.latency_seconds)} for one request alone; "
        f"{format_seconds(predicted.bottleneck_seconds)} per request of a full pipeline ({rate:.3g} per second)"
    )


def proof_line(chosen: Candidate[GraphPlan], unit: str) -> str:
    """The planner's objective value and proof, and how much the plan's prediction differs from it."""
    solution = chosen.solution
    assert solution is not None
    value, took = _format_value(solution.value, unit), f"found in {format_seconds(solution.seconds)}"
    difference = chosen.seconds / solution.value - 1 if chosen.plan is not None and solution.value > 0 else 0.0
    if abs(difference) >= _NEGLIGIBLE_DIFFERENCE:
        value += " by its own objective (operators and transfers only)"
        side = "above" if difference > 0 else "below"
        took += f"; the prediction, with whole segments and the workers' overheads, is {abs(difference):.1%} {side} it"
    if solution.proven:
        return f"{chosen.strategy}: {value}, proven optimal, {took}"
    if solution.bound > 0:
        bound = _format_value(solution.bound, unit)
        return f"{chosen.strategy}: {value}, at most {solution.gap:.1%} above the optimum (bound {bound}), {took}"
    return f"{chosen.strategy}: {value}, {took}"


def one_device_line(planned: PlanningResult[GraphPlan]) -> str:
    """A note if one device is as good as several; otherwise empty."""
    with_plan = [each for each in planned.candidates if each.plan is not None]
    shared = [each for each in with_plan if each.num_devices > 1]
    if planned.chosen.num_devices > 1 or all(each.strategy == LOCAL for each in with_plan):
        return ""
    if not shared:
        return "one device is faster: every strategy places the whole graph on one device"
    best, alone = min(shared, key=lambda each: each.seconds), planned.chosen.seconds
    if alone <= best.seconds:
        factor = f"{best.seconds / alone:.2f}x as long" if alone > 0 else "longer"
        return f"one device is faster: the best plan on several ({best.label}) takes {factor}"
    took = format_seconds(best.seconds)
    return f"one device is nearly as fast: the best plan on several ({best.label}) takes {took}"


def candidates_table(
    planned: PlanningResult[GraphPlan], objective: Objective, unit: str, max_alternatives: int | None = None
) -> Table:
    """All candidates, the chosen one first; with `max_alternatives`, at most that many of the others instead."""
    heading = "one request" if objective == "latency" else "per request"
    if max_alternatives is not None:
        return alternatives_table(planned, max_alternatives, heading, "Not chosen", partial(_format_value, unit=unit))
    numbers = (right_column(heading, no_wrap=True), right_column("devices"), right_column("planned in"))
    table = make_table("strategy", *numbers, "why", title="Candidates, priced by the same simulator")
    for each in planned.candidates:
        why = "[green]chosen[/]" if each is planned.chosen else each.reason
        if each.solution is None:
            table.add_row(each.label, "-", "-", "-", why)
            continue
        took = format_seconds(each.solution.seconds)
        table.add_row(each.label, _format_value(each.seconds, unit), str(each.num_devices), took, why)
    return table


def explanation_lines(plan: GraphPlan, spec: GraphSpec, prediction: GraphPrediction) -> list[str]:
    """The bottleneck, and the largest transfers."""
    busiest = prediction.bottleneck[0]
    names = [device.name for device in plan.devices]
    what = {
        ResourceKind.COMPUTE: "the compute of",
        ResourceKind.CPU: "the CPU of",
        ResourceKind.SEND: "the outgoing transfers of",
        ResourceKind.RECEIVE: "the incoming transfers of",
        ResourceKind.MEDIUM: "the shared medium",
    }[busiest.kind]
    where = "" if busiest.kind is ResourceKind.MEDIUM else f" {names[busiest.rank]}"
    share = prediction.bottleneck_seconds / prediction.latency_seconds if prediction.latency_seconds > 0 else 0.0
    lines = [
        f"bottleneck of a full pipeline: {what}{where}, {format_seconds(prediction.bottleneck_seconds)} per "
        f"request ({share:.0%} of the time of one request alone)"
    ]
    transfers = sorted(tensor_transfers(spec, plan.body.segments, plan.wire.values), key=lambda each: -each.num_bytes)
    if transfers:
        total = sum(each.num_bytes for each in transfers)
        lines.append(f"{len(transfers)} transfers per request, {format_bytes(total)} in total:")
        lines += [
            f"  {names[each.source]} to {names[each.target]}: {each.tensor}, {format_bytes(each.num_bytes)}"
            for each in transfers[:_NUM_TRANSFERS]
        ]
        if len(transfers) > _NUM_TRANSFERS:
            lines.append(f"  and {len(transfers) - _NUM_TRANSFERS} smaller ones")
    return lines


def segment_lines(plan: GraphPlan, spec: GraphSpec) -> Sequence[str]:
    """One line per segment, in execution order."""
    lines = []
    for index, segment in enumerate(plan.body.segments):
        first, last = (spec.operators[segment.operators[end]].name for end in (0, -1))
        span = first if len(segment.operators) == 1 else f"{first} … {last}"
        device = plan.devices[segment.rank].name
        lines.append(
            f"  {index}: {len(segment.operators)} operators on {device}, {format_seconds(segment.seconds)}: {span}"
        )
    return lines


def planned_as_json(
    planned: PlanningResult[GraphPlan], request: GraphRequest | GraphGoal, devices: Sequence[str], unit: str
) -> dict[str, Any]:
    """The JSON output of `hearth plan` for a graph."""
    chosen, solution = planned.chosen, planned.chosen.solution
    assert solution is not None
    return {
        "objective": request.objective,
        "strategy": chosen.strategy,
        "asked_for": request.strategy,
        "congestion": request.congestion,
        "unit": unit,
        "objective_value": solution.value,
        "bound": solution.bound,
        "proven_optimal": solution.proven,
        "planning_seconds": solution.seconds,
        "devices": list(devices),
        "assignment": list(solution.assignment.devices),
        "starts": list(solution.assignment.starts),
        "candidates": [
            {
                "strategy": each.label,
                "objective_value": each.solution.value if each.solution else None,
                "bound": each.solution.bound if each.solution else None,
                "predicted_seconds": each.seconds if each.plan else None,
                "planning_seconds": each.solution.seconds if each.solution else None,
                "num_devices": each.num_devices,
                "reason": each.reason or None,
            }
            for each in planned.candidates
        ],
    }


def picture_title(plan: GraphPlan) -> str:
    """Title of a picture."""
    what = "one request" if plan.body.objective == "latency" else "per request"
    return f"{plan.model.name} by {plan.planner}: {format_seconds(objective_seconds(plan))} {what}"


def _format_value(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else f"{value:.6g}"
