"""Devices, links and plans as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from coordinator.cli.output import out
from coordinator.plan.solution import Planned
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.explain import bottleneck, decoding_rate, unit_of, why_lost, why_won
from coordinator.plan.transformer.request import PlanRequest
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile, Link
from hearth.plan.transformer import Pipeline
from hearth.platform.units import format_age, format_bytes, format_rate, format_seconds
from hearth.wire.messages import DeviceInfo, PhaseEntered

_MARKS = {"alive": "green", "suspect": "yellow", "dead": "red", "busy": "yellow", "refused": "red"}
_NUM_OTHERS = 3  # alternatives that are shown without --explain
_SHARED = ("heads", "columns", "rows", "vocabulary", "busy")  # of each device


def device_table(devices: Sequence[DeviceInfo]) -> Table:
    """Fits a terminal of 80 columns."""
    table = Table(title="Devices", title_justify="left", show_edge=False)
    table.add_column("device", no_wrap=True, min_width=21)
    for heading in ("state", "processor", "load"):
        table.add_column(heading)
    table.add_column("may use\n[dim]free[/]", justify="right")
    table.add_column("GPU, temp")
    for device in devices:
        state = f"[{_MARKS[device.state]}]{device.state}[/]" + (f": {device.reason}" if device.reason else "")
        name = f"{device.name}\n[dim]{device.host}[/]"
        t = device.telemetry
        if t is None:
            table.add_row(name, state)
            continue
        temperature = f"{t.temperature_celsius:.0f} °C" if t.temperature_celsius is not None else ""
        table.add_row(
            name,
            state,
            f"{t.cpu_model}\n[dim]{t.num_threads} of {t.num_cores} cores[/]",
            f"{t.load_1min:.2f}",
            f"{format_bytes(t.memory_budget_bytes)}\n[dim]{format_bytes(t.memory_available_bytes)}[/]",
            ", ".join(filter(None, (t.gpu.name if t.gpu else "", temperature))) or "-",
        )
    return table


def history_table(history: Sequence[PhaseEntered]) -> Table:
    """The life cycle of a deployment, the newest move last."""
    table = Table(title="History", title_justify="left", show_edge=False)
    table.add_column("ago", justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("because", overflow="fold")
    for move in history:
        times = f" ({move.times} times)" if move.times > 1 else ""
        table.add_row(format_age(move.seconds_ago), move.phase, move.cause + times)
    return table


def link_table(links: Iterable[Link], names: dict[str, str]) -> Table:
    """A matrix: rows send, columns receive; rate and round trip of each ordered pair."""
    table = Table(title="Links, from row to column (rate, round trip)", title_justify="left", show_edge=False)
    found = {(link.source, link.target): link for link in links}
    ends = [device for device in names if any(device in pair for pair in found)]
    table.add_column("")
    for device in ends:
        table.add_column(names[device], justify="right")
    for source in ends:
        cells = [
            f"{format_rate(link.bytes_per_second)}, {format_seconds(link.round_trip_seconds)}" if link else "-"
            for link in (found.get((source, target)) for target in ends)
        ]
        table.add_row(names[source], *cells)
    return table


def plan_tables(plan: TransformerPlan, peaks: Mapping[str, int] = {}) -> tuple[Table, Table]:
    """Per device: its shares and its busy time in a step; and its bytes by kind against the budget.

    `peaks` are the most bytes that a device's worker had in memory so far, by the device's id.
    """
    devices = "1 device" if plan.num_ranks == 1 else f"{plan.num_ranks} devices"
    title = (
        f"Plan: {plan.model.name} by {plan.body.title} on {devices}, "
        f"{plan.body.seq_len} rows a step, predicted {format_seconds(plan.predicted.latency_seconds)}"
    )
    if rate := decoding_rate(plan):
        title += f", then {rate}"
    shares = Table(title=title, title_justify="left", show_edge=False)
    memory = Table(title="Bytes on each device", title_justify="left", show_edge=False, pad_edge=False)
    shares.add_column("device", overflow="fold")
    memory.add_column("device", overflow="fold")
    body = plan.body
    staged = isinstance(body, Pipeline)
    for heading in ("layers", "rows", "vocabulary", "busy") if staged else _SHARED:
        shares.add_column(heading, justify="right")
    # One more kind for a decoder, and one column less, so that it fits a terminal of 80 columns.
    decodes = plan.body.generation is not None
    last = ("KV\ncache", "total\n[dim]budget[/]") if decodes else ("total", "budget")
    for heading in ("weights", "embed-\ndings", "activa-\ntions", "work-\nspace", *last):
        memory.add_column(heading, justify="right", no_wrap=True)
    if peaks:
        memory.add_column("peak\nso far", justify="right", no_wrap=True)
    whole = not isinstance(body, Pipeline) and body.attends_by_rows and not decodes  # a decoder decodes with its share
    for rank, device in enumerate(plan.devices):
        stage = body.layers_of(rank, plan.model.num_layers)
        of_layers = [
            str(plan.model.num_heads if whole else body.heads[rank]),
            str(plan.model.ffn_size if whole else body.columns[rank]),
        ]
        shares.add_row(
            device.name,
            *([f"{stage.start} to {stage.stop - 1}"] if staged else of_layers),
            str(body.step_rows(rank)),
            str(body.vocabulary[rank]),
            format_seconds(device.compute_seconds),
        )
        use = device.memory
        kinds = [format_bytes(each) for each in (use.weights, use.embeddings, use.activations, use.workspace)]
        total, budget = format_bytes(use.total), format_bytes(device.budget_bytes)
        both = (format_bytes(use.kv_cache), f"{total}\n[dim]{budget}[/]") if decodes else (total, budget)
        peak = (format_bytes(peaks.get(device.device_id, 0)),) if peaks else ()
        memory.add_row(device.name, *kinds, *both, *peak)
    return shares, memory


def print_plan(planned: Planned[TransformerPlan], request: PlanRequest, explain: bool) -> None:
    """All of `hearth plan`."""
    made = planned.plan
    out.print(*plan_tables(made), sep="\n")
    predicted = made.predicted
    out.print(
        f"predicted: {format_seconds(predicted.latency_seconds)} a step "
        f"(busiest device {format_seconds(predicted.compute_seconds)}, "
        f"busiest link {format_seconds(predicted.transfer_seconds)})"
    )
    for line in generation_lines(made):
        out.print(line)
    if made.body.exact_links:
        out.print(f"activations: {_formats(made)}")
    if explain:
        out.print(f"\n{why_won(planned, request.cluster, request.strategy)}")
        out.print(candidates_list(planned, request.cluster))
    elif made.alternatives:
        out.print(alternatives_table(made, _NUM_OTHERS))


def _formats(made: TransformerPlan) -> str:
    """The value formats on the links, where they differ."""
    names = [device.name for device in made.devices]
    if len(made.body.exact_links) == len(names) * (len(names) - 1):
        return f"exact on all links: {made.wire.values} would save no time"
    links = ", ".join(f"{names[source]} to {names[target]}" for source, target in made.body.exact_links)
    return f"{made.wire.values}, but exact where that costs no time: {links}"


def generation_lines(plan: TransformerPlan) -> list[str]:
    """What a plan for a decoder promises and predicts; nothing for an encoder."""
    generation = plan.body.generation
    if generation is None:
        return []
    context = generation.context or generation.kv_tokens
    room = (
        f"KV cache: {generation.kv_tokens} tokens, for {generation.kv_tokens // context} sequences of {context} at once"
    )
    if rate := decoding_rate(plan):
        return [f"decoding: {rate} for one sequence; {format_seconds(seconds_of(plan))} {unit_of(plan)}", room]
    return [room]


def alternatives_table(plan: TransformerPlan, most: int) -> Table:
    """The best `most` that were not taken."""
    unit = f" ({unit_of(plan)})" if plan.body.generation else ""
    others = sorted(plan.alternatives, key=lambda other: (other.predicted_seconds is None, other.predicted_seconds))
    left = len(others) - most
    table = Table(
        title=f"Not taken{unit}",
        title_justify="left",
        show_edge=False,
        caption=f"and {left} more; --explain shows all" if left > 0 else None,
        caption_justify="left",
    )
    table.add_column("strategy")
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("why")
    for other in others[:most]:
        predicted = format_seconds(other.predicted_seconds) if other.predicted_seconds is not None else "-"
        table.add_row(other.strategy, predicted, other.reason)
    return table


def candidates_list(planned: Planned[TransformerPlan], cluster: ClusterProfile) -> Table:
    """Every priced plan, the chosen one first: its time, what bounds it, and why it was not chosen."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    for each in planned.candidates:
        table.add_row("", "")
        if each.plan is None:
            table.add_row("-", f"[bold]{each.label}[/]\n{why_lost(each, cluster)}")
            continue
        bound = bottleneck(each.plan, cluster)
        parts = f"busiest device {format_seconds(bound.device_seconds)} ({bound.device})"
        if bound.link:
            parts += f", busiest link {format_seconds(bound.link_seconds)} ({bound.link})"
        if rate := decoding_rate(each.plan):
            parts += f", decodes {rate}"
        why = "[green]chosen[/]" if each is planned.chosen else why_lost(each, cluster)
        text = f"[bold]{each.plan.body.title}[/] on {', '.join(each.devices)}\n"
        table.add_row(format_seconds(each.seconds), f"{text}{why}\n[dim]{parts}[/]")
    return table
