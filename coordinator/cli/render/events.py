"""Events of the home as lines and tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from coordinator.cli.render.tables import cut_text, device_lines, make_table, right_column, sensor_texts
from hearth.platform.units import format_bytes, format_seconds
from hearth.wire import messages as wire

_HEADING_LINES = 2  # of a table
_MOST_EVENTS = 10
_OUTCOME_COLOURS = {"served": "green", "cancelled": "yellow", "refused": "yellow", "failed": "red"}


def event_line(recorded: wire.RecordedEvent) -> str:
    """One event in one line, without markup: local time, kind, and what happened."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recorded.unix_seconds))
    return f"{at}  {recorded.event.kind.replace('_', ' ')}: {describe(recorded.event)}"


def describe(event: wire.Event) -> str:
    """What happened, in one line."""
    match event:
        case wire.RequestEnded():
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
        case wire.DeviceSampled():
            parts = [
                event.name, f"load {_percent(event.cpu_load)}", f"{format_bytes(event.memory_available_bytes)} free"
            ]  # fmt: skip
            if event.gpu_load is not None:
                parts.append(f"GPU {_percent(event.gpu_load)}")
            return ", ".join([*parts, *sensor_texts(event)])
        case wire.DeviceChanged():
            return f"{event.name} is {event.state}" + (f": {event.reason}" if event.reason else "")
        case wire.LinkRated():
            rate = f"{8 * event.bytes_per_second / 1e6:.0f} Mbit/s"
            return f"{event.source[:8]} to {event.target[:8]}: {rate}, round trip {format_seconds(event.round_trip_seconds)}"
        case wire.PlanChanged():
            where = f"{event.strategy} on {', '.join(event.devices)}"
            return f"{event.model}: {where} ({event.reason}), predicted {format_seconds(event.predicted_seconds)}"
        case wire.PhaseChanged():
            return f"{event.deployment} is {event.phase}: {event.cause}"
        case wire.CoordinatorStarted():
            return f"{event.name} (Hearth {event.version})"


def request_lines(recorded: Iterable[wire.RecordedEvent], now: float) -> Table:
    """Requests that have ended, newest first, each in one line; the names are cut where that is too narrow."""
    numbers = ("ago", "queue", "first token", "tokens", "tokens/s")
    shown = (right_column(each, no_wrap=True) for each in numbers)
    table = make_table(Column("request"), Column("outcome", no_wrap=True), *shown)
    for each in recorded:
        event = each.event
        if not isinstance(event, wire.RequestEnded):
            continue
        app = f" [dim]{escape(event.app)}[/]" if event.app else ""
        colour = _OUTCOME_COLOURS[event.outcome]
        table.add_row(
            cut_text(f"{event.operation} {escape(event.model)}{app}"),
            f"[{colour}]{event.outcome}[/]" + (f" [dim]{event.error}[/]" if event.error else ""),
            format_seconds(max(now - each.unix_seconds, 0.0)),
            _seconds(event.queued_seconds),
            _seconds(event.first_token_seconds),
            str(event.num_tokens or event.num_prompt_tokens or "-"),
            f"{event.tokens_per_second:.1f}" if event.tokens_per_second else "-",
        )
    return table


class Watched(NamedTuple):
    """What `hearth status --watch` shows, as last read. `requests` and `happened`: newest last."""

    status: wire.Status | None = None
    models: Sequence[wire.ServedModel] = ()
    devices: Sequence[wire.DeviceInfo] = ()
    requests: Sequence[wire.RecordedEvent] = ()
    happened: Sequence[wire.RecordedEvent] = ()
    problem: str = ""  # why it may be out of date


def watch_view(watched: Watched, now: float, height: int) -> RenderableType:
    """The screen, in at most `height` lines: requests and events share what models and devices leave."""
    parts: list[RenderableType] = []
    status = watched.status
    if status is not None:
        counts = f"{status.served_requests} requests served, {status.failed_requests} failed"
        title = f"{status.name}, {time.strftime('%H:%M:%S', time.localtime(now))}"
        parts.append(cut_text(f"[bold]{escape(title)}[/]"))
        if len(watched.models) < 2:
            parts += [cut_text(escape(status.state)), cut_text(f"{counts}, {status.queued_requests} waiting")]
        else:
            width = max(len(each.deployment) for each in watched.models)
            for each in watched.models:
                busy = f"{each.running_requests} running, {each.waiting_requests} waiting"
                parts.append(cut_text(escape(f"{each.deployment:{width}}  {busy}; {each.state}")))
    if watched.problem:
        parts.append(cut_text(f"[red]{escape(watched.problem)}[/]"))
    num_lines = len(parts) + 1
    if watched.devices:
        parts.append(device_lines(watched.devices))
        num_lines += _HEADING_LINES + len(watched.devices)
    room = max(height - num_lines, 0)
    num_events = min(len(watched.happened), max(room // 3, 1), _MOST_EVENTS)
    room -= num_events + (num_events > 0)
    num_requests = max(min(len(watched.requests), room - _HEADING_LINES), 0)
    if num_requests:
        parts.append(request_lines(reversed(watched.requests[-num_requests:]), now))
    if num_events:
        parts.append(Text("Events", style="bold"))
        parts += [cut_text(escape(event_line(each))) for each in watched.happened[-num_events:]]
    parts.append(Text("Ctrl-C ends this", style="dim"))
    return Group(*parts)


def _percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{fraction:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
