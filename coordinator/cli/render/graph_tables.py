"""Plans for graphs as tables and lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from coordinator.plan.graph.methods import LOCAL
from coordinator.plan.graph.price import Price, transfers_of
from coordinator.plan.graph.request import GraphRequest, seconds_of
from coordinator.plan.simulator import ResourceKind
from coordinator.plan.solution import Candidate, Planned
from coordinator.serve.state import GraphGoal
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_bytes, format_seconds

_NUM_TRANSFERS = 12  # that are listed, the largest first
_SAME = 0.0005  # relative difference of seconds that rounds to 0.0%


def graph_plan_tables(plan: GraphPlan, peaks: Mapping[str, int] = {}) -> tuple[Table, Table]:
    """Per device: what it runs and its busy time for a request; and its bytes by kind against the budget.

    `peaks` are the most bytes that a device's worker had in memory so far, by the device's id.
    """
    devices = "1 device" if plan.num_ranks == 1 else f"{plan.num_ranks} devices"
    title = f"Plan: {plan.model.name} by {plan.planner} on {devices}, for {plan.body.objective}"
    work = Table(title=title, title_justify="left", show_edge=False)
    memory = Table(title="Bytes on each device", title_justify="left", show_edge=False, pad_edge=False)
    work.add_column("device", overflow="fold")
    memory.add_column("device", overflow="fold")
    for heading in ("operators", "segments", "busy for a request"):
        work.add_column(heading, justify="right")
    for heading in ("weights", "activa-\ntions", "work-\nspace", "total", "budget"):
        memory.add_column(heading, justify="right", no_wrap=True)
    if peaks:
        memory.add_column("peak\nso far", justify="right", no_wrap=True)
    for rank, device in enumerate(plan.devices):
        segments = plan.body.segments_of(rank)
        num_operators = sum(len(segment.operators) for segment in segments)
        work.add_row(device.name, str(num_operators), str(len(segments)), format_seconds(device.compute_seconds))
        use = device.memory
        kinds = (use.weights, use.activations, use.workspace, use.total, device.budget_bytes)
        peak = (format_bytes(peaks.get(device.device_id, 0)),) if peaks else ()
        memory.add_row(device.name, *map(format_bytes, kinds), *peak)
    return work, memory


def prediction_line(plan: GraphPlan) -> str:
    predicted = plan.predicted
    rate = 1 / predicted.bottleneck_seconds if predicted.bottleneck_seconds > 0 else float("inf")
    return (
        f"predicted: {format_seconds(predicted.latency_seconds)} for one request; a full pipeline takes "
        f"{format_seconds(predicted.bottleneck_seconds)} for each ({rate:.3g} a second)"
    )


def proof_line(chosen: Candidate[GraphPlan], unit: str) -> str:
    """The planner's own solution and its proof; where the plan's prediction differs from that, by how much."""
    solution = chosen.solution
    assert solution is not None
    value, took = _amount(solution.value, unit), f"found in {format_seconds(solution.seconds)}"
    more = chosen.seconds / solution.value - 1 if chosen.plan is not None and solution.value > 0 else 0.0
    if abs(more) >= _SAME:
        value += " by its own objective (operators and transfers alone)"
        side = "above" if more > 0 else "below"
        took += f"; the prediction, with whole segments and the workers' overheads, is {abs(more):.1%} {side} that"
    if solution.proven:
        return f"{chosen.strategy}: {value}, proven optimal, {took}"
    if solution.bound > 0:
        bound = _amount(solution.bound, unit)
        return f"{chosen.strategy}: {value}, at most {solution.gap:.1%} above the optimum (bound {bound}), {took}"
    return f"{chosen.strategy}: {value}, {took}"


def one_device_line(planned: Planned[GraphPlan]) -> str:
    """Say so where one device is as good as several; empty otherwise."""
    found = [each for each in planned.candidates if each.plan is not None]
    shared = [each for each in found if each.num_devices > 1]
    if planned.chosen.num_devices > 1 or all(each.strategy == LOCAL for each in found):
        return ""
    if not shared:
        return "one device is faster: every strategy that may share the work keeps it on one"
    best, alone = min(shared, key=lambda each: each.seconds), planned.chosen.seconds
    if alone <= best.seconds:
        factor = f"{best.seconds / alone:.2f}x as long" if alone > 0 else "longer"
        return f"one device is faster: the best plan on several ({best.label}) takes {factor}"
    took = format_seconds(best.seconds)
    return f"one device is as fast but for a hair: the best plan on several ({best.label}) takes {took}"


def candidates_table(planned: Planned[GraphPlan], objective: Objective, unit: str, most: int | None = None) -> Table:
    """All candidates, the chosen one first; with `most`, only that number of the others."""
    shown = planned.candidates if most is None else planned.others[:most]
    left = 0 if most is None else len(planned.others) - len(shown)
    table = Table(
        title="Priced, all by the same simulator" if most is None else "Not taken",
        title_justify="left",
        show_edge=False,
        caption=f"and {left} more; --explain shows all" if left else None,
        caption_justify="left",
    )
    table.add_column("strategy")
    table.add_column("one request" if objective == "latency" else "per request", justify="right", no_wrap=True)
    if most is None:
        table.add_column("devices", justify="right")
        table.add_column("planned in", justify="right")
    table.add_column("why")
    for each in shown:
        seconds = _amount(each.seconds, unit) if each.solution else "-"
        took = format_seconds(each.solution.seconds) if each.solution else "-"
        more = (str(each.num_devices or "-"), took) if most is None else ()
        table.add_row(each.label, seconds, *more, "[green]chosen[/]" if each is planned.chosen else each.reason)
    return table


def explanation_lines(plan: GraphPlan, spec: GraphSpec, priced: Price) -> list[str]:
    """What the time goes to, and what travels."""
    busiest = priced.bottleneck[0]
    names = [device.name for device in plan.devices]
    what = {
        ResourceKind.COMPUTE: "the compute of",
        ResourceKind.SEND: "what is sent by",
        ResourceKind.RECEIVE: "what is received by",
    }[busiest.kind]
    share = priced.bottleneck_seconds / priced.latency_seconds if priced.latency_seconds > 0 else 0.0
    lines = [
        f"busiest in a full pipeline: {what} {names[busiest.rank]}, {format_seconds(priced.bottleneck_seconds)} for a request "
        f"({share:.0%} of the time that one alone takes)"
    ]
    transfers = sorted(transfers_of(spec, plan.body.segments, plan.wire.values), key=lambda each: -each.num_bytes)
    if transfers:
        total = sum(each.num_bytes for each in transfers)
        lines.append(f"{len(transfers)} transfers of {format_bytes(total)} in all for a request:")
        lines += [
            f"  {names[each.source]} to {names[each.target]}: {each.tensor}, {format_bytes(each.num_bytes)}"
            for each in transfers[:_NUM_TRANSFERS]
        ]
        if len(transfers) > _NUM_TRANSFERS:
            lines.append(f"  and {len(transfers) - _NUM_TRANSFERS} smaller ones")
    return lines


def segment_lines(plan: GraphPlan, spec: GraphSpec) -> Sequence[str]:
    """Each segment in the order in which they run."""
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
    planned: Planned[GraphPlan], asked: GraphRequest | GraphGoal, devices: Sequence[str], unit: str
) -> dict[str, Any]:
    """For programs."""
    chosen, solution = planned.chosen, planned.chosen.solution
    assert solution is not None
    return {
        "objective": asked.objective,
        "strategy": chosen.strategy,
        "asked_for": asked.strategy,
        "congestion": asked.congestion,
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


def title_of(plan: GraphPlan) -> str:
    """Of a picture."""
    what = "one request" if plan.body.objective == "latency" else "per request"
    return f"{plan.model.name} by {plan.planner}: {format_seconds(seconds_of(plan))} {what}"


def _amount(value: float, unit: str) -> str:
    return format_seconds(value) if unit == "s" else f"{value:.6g}"
