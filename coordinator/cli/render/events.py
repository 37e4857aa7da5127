"""Events of the home as lines and tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from coordinator.cli.render.tables import device_table, make_table, right_column
from hearth.platform.units import format_bytes, format_seconds
from hearth.wire.messages import (
    CoordinatorStarted,
    DeviceChanged,
    DeviceInfo,
    DeviceSampled,
    Event,
    LinkRated,
    PhaseChanged,
    PlanChanged,
    RecordedEvent,
    RequestEnded,
    Status,
)

_OUTCOME_COLOURS = {"served": "green", "cancelled": "yellow", "refused": "yellow", "failed": "red"}


def event_line(recorded: RecordedEvent) -> str:
    """One event in one line, without markup: local time, kind, and what happened."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recorded.unix_seconds))
    return f"{at}  {recorded.event.kind.replace('_', ' ')}: {describe(recorded.event)}"


def describe(event: Event) -> str:
    """What happened, in one line."""
    match event:
        case RequestEnded():
            by = f" for {event.app}" if event.app else ""
            parts = [f"{event.operation} {event.model}{by} {event.outcome} after {format_seconds(event.seconds)}"]
            if event.first_token_seconds is not None:
                parts.append(f"first token {format_seconds((event.queued_seconds or 0.0) + event.first_token_seconds)}")
            if event.num_prompt_tokens:
                parts.append(f"{event.num_prompt_tokens} prompt tokens ({event.num_cached_tokens} cached)")
            if event.num_tokens:
                parts.append(f"{event.num_tokens} tokens")
            if event.tokens_per_second:
                parts.append(f"{event.tokens_per_second:.1f} tokens/s")
            if event.devices:
                parts.append(f"on {', '.join(event.devices)}")
            if event.message:
                parts.append(f"{event.message} {event.advice}")
            return "; ".join(parts)
        case DeviceSampled():
            parts = [
                event.name, f"load {_percent(event.cpu_load)}", f"{format_bytes(event.memory_available_bytes)} free"
            ]  # fmt: skip
            if event.gpu_load is not None:
                parts.append(f"GPU {_percent(event.gpu_load)}")
            if event.temperature_celsius is not None:
                parts.append(f"{event.temperature_celsius:.0f} °C")
            return ", ".join(parts)
        case DeviceChanged():
            return f"{event.name} is {event.state}" + (f": {event.reason}" if event.reason else "")
        case LinkRated():
            rate = f"{8 * event.bytes_per_second / 1e6:.0f} Mbit/s"
            return f"{event.source[:8]} to {event.target[:8]}: {rate}, round trip {format_seconds(event.round_trip_seconds)}"
        case PlanChanged():
            where = f"{event.strategy} on {', '.join(event.devices)}"
            return f"{event.model}: {where} ({event.reason}), predicted {format_seconds(event.predicted_seconds)}"
        case PhaseChanged():
            return f"{event.deployment} is {event.phase}: {event.cause}"
        case CoordinatorStarted():
            return f"{event.name} (Hearth {event.version})"


def request_table(recorded: Iterable[RecordedEvent], now: float) -> Table:
    """Requests that have ended, newest first."""
    numbers = ("ago", "queue", "first token", "tokens", "tokens/s")
    table = make_table("request", Column("outcome", no_wrap=True), *map(right_column, numbers), title="Latest requests")
    for each in recorded:
        event = each.event
        if not isinstance(event, RequestEnded):
            continue
        app = f"\n[dim]{escape(event.app)}[/]" if event.app else ""
        colour = _OUTCOME_COLOURS[event.outcome]
        table.add_row(
            f"{event.operation} {escape(event.model)}{app}",
            f"[{colour}]{event.outcome}[/]" + (f"\n[dim]{event.error}[/]" if event.error else ""),
            format_seconds(max(now - each.unix_seconds, 0.0)),
            _seconds(event.queued_seconds),
            _seconds(event.first_token_seconds),
            str(event.num_tokens or event.num_prompt_tokens or "-"),
            f"{event.tokens_per_second:.1f}" if event.tokens_per_second else "-",
        )
    return table


def watch_view(
    status: Status | None,
    devices: Sequence[DeviceInfo],
    requests: Sequence[RecordedEvent],
    happened: Sequence[RecordedEvent],
    problem: str,
    now: float,
) -> RenderableType:
    """The screen of `hearth status --watch`. `problem`: why it may be out of date."""
    parts: list[RenderableType] = []
    if status is not None:
        parts.append(Text.from_markup(f"[bold]{escape(status.name)}[/]: {escape(status.state)}"))
        parts.append(
            Text(
                f"requests: {status.served_requests} served, {status.failed_requests} failed, "
                f"{status.queued_requests} waiting"
            )
        )
    if problem:
        parts.append(Text(problem, style="red"))
    if devices:
        parts.append(device_table(devices))
    if requests:
        parts.append(request_table(requests, now))
    if happened:
        parts += [Text("Events", style="italic", justify="center")]
        parts += [Text(event_line(each), no_wrap=True, overflow="ellipsis") for each in happened]
    parts.append(Text("Ctrl-C ends this", style="dim"))
    return Group(*parts)


def _percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{fraction:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
