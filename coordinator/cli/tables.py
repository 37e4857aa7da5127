"""Devices, links and plans as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from hearth.geometry import rows_for
from hearth.messages import DeviceInfo
from hearth.plan import Plan
from hearth.profile import Link
from hearth.units import format_bytes, format_rate, format_seconds

_MARKS = {"alive": "green", "suspect": "yellow", "dead": "red", "busy": "yellow", "refused": "red"}


def device_table(devices: Sequence[DeviceInfo]) -> Table:
    table = Table(title="Devices", title_justify="left", show_edge=False)
    for heading in ("name", "state", "address", "processor", "cores", "load"):
        table.add_column(heading)
    for heading in ("memory free", "may use", "temp", "GPU"):
        table.add_column(heading, justify="right")
    for device in devices:
        state = f"[{_MARKS[device.state]}]{device.state}[/]" + (f": {device.reason}" if device.reason else "")
        t = device.telemetry
        if t is None:
            table.add_row(device.name, state, device.host)
            continue
        table.add_row(
            device.name,
            state,
            device.host,
            t.cpu_model,
            f"{t.num_cores} ({t.num_threads} used)",
            f"{t.load_1min:.2f}",
            format_bytes(t.memory_available_bytes),
            format_bytes(t.memory_budget_bytes),
            f"{t.temperature_celsius:.0f} °C" if t.temperature_celsius is not None else "-",
            t.gpu.name if t.gpu else "-",
        )
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


def plan_table(plan: Plan) -> Table:
    """Per device: heads, columns, rows, bytes by kind against the budget, and its busy time in a step."""
    title = (
        f"Plan: {plan.model.name} by {plan.body.strategy} on {plan.num_ranks} device(s), "
        f"{plan.seq_len} rows a step, predicted {format_seconds(plan.predicted.total_seconds)}"
    )
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("device")
    headings = ("heads", "columns", "rows", "vocabulary", "weights", "embeddings", "activations", "workspace", "total")
    for heading in (*headings, "budget", "busy"):
        table.add_column(heading, justify="right")
    rows = rows_for(plan.body.row_weights, plan.seq_len)
    whole = plan.body.strategy == "sp"
    for rank, device in enumerate(plan.devices):
        memory = device.memory
        table.add_row(
            device.name,
            str(plan.model.num_heads if whole else plan.body.heads[rank]),
            str(plan.model.ffn_size if whole else plan.body.columns[rank]),
            str(plan.seq_len if plan.body.strategy == "megatron-tp" else rows[rank]),
            str(plan.body.vocabulary[rank]),
            *(format_bytes(part) for part in (memory.weights, memory.embeddings, memory.activations, memory.workspace)),
            format_bytes(memory.total),
            format_bytes(device.budget_bytes),
            format_seconds(device.compute_seconds),
        )
    return table


def alternatives_table(plan: Plan) -> Table:
    table = Table(title="Not taken", title_justify="left", show_edge=False)
    for heading in ("strategy", "predicted", "why"):
        table.add_column(heading)
    for other in plan.alternatives:
        predicted = format_seconds(other.predicted_seconds) if other.predicted_seconds is not None else "-"
        table.add_row(other.strategy, predicted, other.reason)
    return table
