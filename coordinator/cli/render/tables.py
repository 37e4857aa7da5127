"""Tables of devices, links, kernels and plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from coordinator.devices.block_profiling import KernelTable
from coordinator.plan.solution import PlanningResult
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.explain import bottleneck, decoding_rate, seconds_unit, why_lost
from hearth.plan.plan import DRAFT_RANK, Plan, TransformerPlan
from hearth.plan.profile import ClusterProfile, Link
from hearth.plan.transformer import Pipeline
from hearth.platform.units import format_age, format_bytes, format_rate, format_seconds
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire import messages as wire

_HEALTH_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red", "busy": "yellow", "refused": "red"}
_SHOWN_BYTES_PER_SECOND = 1000.0  # between a model's devices; an average of its last requests never quite ends
_SHOWN_SILENCE_SECONDS = 1.0  # of a worker: two signs of life are missing
_MEMORY_HEADINGS = {
    "weights": "weights", "embeddings": "embed-\ndings", "activations": "activa-\ntions", "workspace": "work-\nspace",
    "kv_cache": "KV\ncache", "draft": "draft\nmodel",
}  # fmt: skip

_MAX_MEMORY_COLUMNS = 6  # of bytes, besides the device's name: more do not fit into a terminal of 80 columns

# The common style of all tables, and right-aligned columns for numbers.
make_table = partial(Table, title_justify="left", caption_justify="left", show_edge=False)
right_column = partial(Column, justify="right")


def cut_text(markup: str) -> Text:
    """A text in one line, cut where there is no more room."""
    text = Text.from_markup(markup)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


# ---- models ---------------------------------------------------------------------------------------------------------

_ANSWERS = {"text": "generates", "vectors": "embeds", "arrays": "infers", "": ""}


def model_table(models: Sequence[wire.ServedModel]) -> Table:
    """The served models; fits a terminal of 80 columns."""
    taken = right_column("memory\n[dim]sends[/]", no_wrap=True)
    table = make_table(Column("name", no_wrap=True), "what", "state", taken, right_column("requests"))
    for each in models:
        memory = format_bytes(each.memory_bytes) if each.memory_bytes else "-"
        if each.sent_bytes_per_second >= _SHOWN_BYTES_PER_SECOND:
            memory += f"\n[dim]{format_rate(each.sent_bytes_per_second)}[/]"
        requests = f"{each.running_requests}" + (f"\n[dim]+{each.waiting_requests}[/]" if each.waiting_requests else "")
        name = escape(each.deployment) + ("\n[dim]pinned[/]" if each.pinned else "")
        if each.keep_alive_seconds is not None:
            name += f"\n[dim]idle {format_seconds(each.keep_alive_seconds)}[/]"
        table.add_row(name, _ANSWERS[each.answers], escape(each.state), memory, requests)
    return table


# ---- devices --------------------------------------------------------------------------------------------------------

_SENSORS_HEADING = ", ".join(["GPU", *(sensor.heading for sensor in wire.SENSORS if sensor.heading)])


def device_table(devices: Sequence[wire.DeviceInfo]) -> Table:
    """Devices with state and telemetry; fits a terminal of 80 columns."""
    name_column, free = Column("device", no_wrap=True, min_width=21), right_column("may use\n[dim]free[/]")
    table = make_table(name_column, "state", "processor", "load", free, _SENSORS_HEADING, title="Devices")
    for device in devices:
        state = f"[{_HEALTH_COLOURS[device.state]}]{device.state}[/]"
        if device.reason:
            state += f": {escape(device.reason)}"
        state += "".join(f"\n[dim]{escape(_worker_text(worker))}[/]" for worker in device.workers)
        if device.num_abandoned:
            state += f"\n[red]stuck after being killed: {device.num_abandoned}[/]"
        if device.num_hung:
            state += f"\n[red]the disk does not answer: {device.num_hung}[/]"
        name = f"{device.name}\n[dim]{device.host}[/]"
        t = device.telemetry
        if t is None:
            table.add_row(name, state)
            continue
        if missing := t.unconfined():
            state += f"\n[yellow]workers not confined: {', '.join(missing)}[/]"
        elif t.confined is not None:
            state += "\n[dim]workers confined[/]"
        if t.gpu_problem:
            state += f"\n[yellow]computes on the CPU: {escape(t.gpu_problem)}[/]"
        table.add_row(
            name,
            state,
            f"{t.cpu_model}\n[dim]{t.num_threads} of {t.num_cores} cores[/]",
            f"{t.load_1min:.2f}",
            f"{format_bytes(t.memory_budget_bytes)}\n[dim]{format_bytes(t.memory_available_bytes)}[/]",
            _sensors_text(t),
        )
    return table


def device_lines(devices: Sequence[wire.DeviceInfo]) -> Table:
    """Devices in one line each: what changes, without what they are."""
    free = right_column("may use", no_wrap=True)
    name, state = Column("device", no_wrap=True), Column("state", no_wrap=True)
    table = make_table(name, state, right_column("load"), free, Column(_SENSORS_HEADING, no_wrap=True), "workers")
    for device in devices:
        shown = f"[{_HEALTH_COLOURS[device.state]}]{device.state}[/]"
        trouble = [device.reason] if device.reason else []
        if device.num_abandoned or device.num_hung:
            trouble.append(f"{device.num_abandoned} stuck workers, {device.num_hung} hung accesses to the disk")
        workers = cut_text(escape(", ".join([*trouble, *map(_worker_text, device.workers)])))
        t = device.telemetry
        if t is None:
            table.add_row(device.name, shown, "", "", "", workers)
            continue
        budget = format_bytes(t.memory_budget_bytes)
        table.add_row(device.name, shown, f"{t.load_1min:.2f}", budget, _sensors_text(t), workers)
    return table


def sensor_texts(source: wire.Telemetry | wire.DeviceSampled) -> list[str]:
    """The readings that have no column of their own, with their units; without those that are not known."""
    readings = ((sensor.text, getattr(source, sensor.field)) for sensor in wire.SENSORS if sensor.text)
    return [text.format(reading) for text, reading in readings if reading is not None]


def _sensors_text(telemetry: wire.Telemetry) -> str:
    """The GPU's name and the readings."""
    return ", ".join([*([telemetry.gpu.name] if telemetry.gpu else []), *sensor_texts(telemetry)]) or "-"


def _worker_text(worker: wire.WorkerStatus) -> str:
    """One worker's state, what it computes, and why it may be in trouble."""
    name = "worker" if worker.deployment == DEFAULT_DEPLOYMENT else worker.deployment
    parts = [f"{name} {worker.state}" + (f": {worker.failure}" if worker.failure else "")]
    if worker.step is not None:
        parts.append(f"step {worker.step} for {format_seconds(worker.step_seconds)}")
    if worker.silent_seconds >= _SHOWN_SILENCE_SECONDS:
        parts.append(f"silent for {format_seconds(worker.silent_seconds)}")
    return ", ".join(parts)


def loss_table(losses: Sequence[wire.PreparedLoss]) -> Table:
    """What is prepared for the loss of each device of a plan. A refusal stands there without its reason."""
    headings = ("others store for it", "still missing", "pause about")
    table = make_table(Column("loss of", overflow="fold"), "prepared", *map(right_column, headings))
    for loss in losses:
        prepared = "[green]yes[/]" if loss.is_prepared else "[red]no[/]" if loss.reason else "[yellow]not yet[/]"
        is_known = loss.is_prepared or loss.spare_bytes > 0
        table.add_row(
            loss.device,
            prepared,
            format_bytes(loss.spare_bytes) if is_known else "-",
            format_bytes(loss.missing_bytes) if is_known else "-",
            f"{loss.pause_seconds:.1f} s" if loss.pause_seconds is not None else "-",
        )
    return table


def history_table(history: Sequence[wire.PhaseEntered]) -> Table:
    """The phases of a deployment, oldest first."""
    columns = (right_column("ago", no_wrap=True), Column("phase", no_wrap=True), Column("because", overflow="fold"))
    table = make_table(*columns, title="History")
    for move in history:
        times = f" ({move.times} times)" if move.times > 1 else ""
        table.add_row(format_age(move.seconds_ago), move.phase, move.cause + times)
    return table


def link_table(links: Iterable[Link], names: dict[str, str]) -> Table:
    """Rate and round trip of each ordered pair of devices: rows send, columns receive."""
    by_ends = {(link.source, link.target): link for link in links}
    ends = [device for device in names if any(device in pair for pair in by_ends)]
    table = make_table(
        "", *(right_column(names[device]) for device in ends), title="Links, from row to column (rate, round trip)"
    )
    for source in ends:
        cells = [
            f"{format_rate(link.bytes_per_second)}, {format_seconds(link.round_trip_seconds)}" if link else "-"
            for link in (by_ends.get((source, target)) for target in ends)
        ]
        table.add_row(names[source], *cells)
    return table


# ---- plans of both kinds --------------------------------------------------------------------------------------------


def work_table(plan: Plan, title: str, work: Mapping[str, Iterable[object]]) -> Table:
    """Work of each device. `work` maps each heading to a column of values, by rank."""
    table = make_table(Column("device", overflow="fold"), *map(right_column, work), title=title)
    for device, *cells in zip(plan.devices, *work.values(), strict=True):
        table.add_row(device.name, *map(str, cells))
    return table


def memory_table(plan: Plan, kinds: Sequence[str], peaks: Mapping[str, int]) -> Table:
    """Bytes of these kinds on each device, against its budget.

    `peaks` are the peak bytes of each device's worker so far, by device id.
    """
    sums = ["total", "budget", *(["peak so far"] if peaks else [])]
    together = len(kinds) + len(sums) > _MAX_MEMORY_COLUMNS
    headings = [_MEMORY_HEADINGS[kind] for kind in kinds] + (["\n".join(sums)] if together else sums)
    numbers = [right_column(heading, no_wrap=True) for heading in headings]
    table = make_table(Column("device", overflow="fold"), *numbers, title="Bytes on each device", pad_edge=False)
    for device in plan.devices:
        parts = [format_bytes(getattr(device.memory, kind)) for kind in kinds]
        totals = [device.memory.total, device.budget_bytes, *([peaks.get(device.device_id, 0)] if peaks else [])]
        cells = [format_bytes(each) for each in totals]
        table.add_row(device.name, *parts, *(["\n".join(cells)] if together else cells))
    return table


def alternatives_table(
    planned: PlanningResult[Any],
    max_rows: int,
    heading: str,
    title: str,
    amount: Callable[[float], str] = format_seconds,
) -> Table:
    """The best `max_rows` candidates that were not chosen."""
    left = len(planned.others) - max_rows
    caption = f"and {left} more; --explain shows all" if left > 0 else None
    table = make_table("strategy", right_column(heading, no_wrap=True), "why", title=title, caption=caption)
    for each in planned.others[:max_rows]:
        table.add_row(each.label, amount(each.seconds) if math.isfinite(each.seconds) else "-", each.reason)
    return table


def device_count_text(plan: Plan) -> str:
    """`on 1 device`, or `on N devices`."""
    return "on 1 device" if plan.num_ranks == 1 else f"on {plan.num_ranks} devices"


# ---- plans for transformers -----------------------------------------------------------------------------------------


def plan_tables(plan: TransformerPlan, peaks: Mapping[str, int] = {}) -> tuple[Table, Table]:
    """Per device: shares and busy time in a step; and bytes against the budget (`memory_table`)."""
    body, ranks = plan.body, range(plan.num_ranks)
    title = (
        f"Plan: {plan.model.name} by {body.title} {device_count_text(plan)}, "
        f"{body.seq_len} rows per step, predicted {format_seconds(plan.predicted.latency_seconds)}"
    )
    if rate := decoding_rate(plan):
        title += f", then {rate}"
    work: dict[str, Iterable[object]] = {"heads": body.heads, "columns": body.columns}
    if isinstance(body, Pipeline):
        stages = [body.layers_of(rank, plan.model.num_layers) for rank in ranks]
        work = {"layers": [f"{stage.start} to {stage.stop - 1}" for stage in stages]}
    elif body.attends_by_rows and body.generation is None:  # a decoder decodes with its share
        work = {"heads": [plan.model.num_heads for _ in ranks], "columns": [plan.model.ffn_size for _ in ranks]}
    work |= {
        "rows": [body.step_rows(rank) for rank in ranks],
        "vocabulary": body.vocabulary,
        "busy": [format_seconds(device.compute_seconds) for device in plan.devices],
    }
    kinds = ["weights", "embeddings", "activations", "workspace", *(["kv_cache"] if body.generation else [])]
    kinds += ["draft"] if body.generation and body.generation.draft else []
    return work_table(plan, title, work), memory_table(plan, kinds, peaks)


def formats_line(plan: TransformerPlan) -> str:
    """The value formats of links, for a plan in which they differ."""
    names = [device.name for device in plan.devices]
    if len(plan.body.exact_links) == len(names) * (len(names) - 1):
        return f"activations: exact on all links: {plan.wire.values} would save no time"
    links = ", ".join(f"{names[source]} to {names[target]}" for source, target in plan.body.exact_links)
    return f"activations: {plan.wire.values}; exact on links where that costs no time: {links}"


def generation_lines(plan: TransformerPlan) -> list[str]:
    """KV cache capacity and predicted decoding rate of a decoder's plan; empty for an encoder."""
    generation = plan.body.generation
    if generation is None:
        return []
    context = generation.context or generation.kv_tokens
    room = (
        f"KV cache: {generation.kv_tokens} tokens: {generation.kv_tokens // context} concurrent sequences of {context}"
    )
    room += f", in {plan.model.kv_cache}" if plan.model.kv_cache != "float32" else ""
    extras = ["each device also holds a copy of the KV cache of the one before it"] if generation.kv_copies else []
    extras += [line] if (line := draft_line(plan)) else []
    if rate := decoding_rate(plan):
        request = format_seconds(request_seconds(plan))
        return [f"decoding: {rate} for one sequence; {request} {seconds_unit(plan)}", room, *extras]
    return [room, *extras]


def draft_line(plan: TransformerPlan) -> str:
    """The draft model and its device; empty without one."""
    generation = plan.body.generation
    if generation is None or generation.draft is None:
        return ""
    device = plan.devices[DRAFT_RANK]
    return f"draft model: {generation.draft.name} on {device.name}, {format_bytes(device.memory.draft)}"


def candidates_list(planned: PlanningResult[TransformerPlan], cluster: ClusterProfile) -> Table:
    """Every candidate, the chosen one first: its time, its bottlenecks, and why it was not chosen."""
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


def kernel_table(table: KernelTable) -> Table:
    """Milliseconds of each kernel by shape of the matrix and number of rows; a star marks the chosen ones."""
    measured, subject = table.measured_on, table.subject
    options = list(dict.fromkeys((time.layout, time.kernel) for time in table.kernels))
    seconds = {(t.num_outputs, t.num_inputs, t.rows, t.layout, t.kernel): t.seconds for t in table.kernels}
    choices = {(choice.num_outputs, choice.num_inputs): choice for choice in table.choices}
    threads = "1 thread" if measured.num_threads == 1 else f"{measured.num_threads} threads"
    title = f"Kernels for {subject.model.weights} weights on {measured.processor}, {threads} ({measured.device}), ms"
    if subject.deterministic:
        title += ", deterministic"
    headings = [kernel if kernel == layout else f"{layout}\n{kernel}" for layout, kernel in options]
    columns = [Column("matrix", no_wrap=True), right_column("rows"), *map(right_column, headings)]
    shown = make_table(*columns, title=title, caption="* chosen")
    previous = None
    for num_outputs, num_inputs, rows in sorted({key[:3] for key in seconds}):
        cells, choice = [], choices.get((num_outputs, num_inputs))
        for option in options:
            key = num_outputs, num_inputs, rows, *option
            text = f"{seconds[key] * 1e3:.3g}" if key in seconds else "-"
            is_chosen = choice is not None and option == (choice.layout, choice.kernel(rows))
            cells.append(f"[green]{text}*[/]" if is_chosen else f"{text} ")
        shape = f"{num_outputs} x {num_inputs}"
        shown.add_row(shape if shape != previous else "", str(rows), *cells)
        previous = shape
    return shown
