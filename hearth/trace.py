"""Timelines of a request: shift events to a common clock, pair sends with receives, export a Chrome trace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from hearth.plan.phases import Phase, TaskKind, Work
from hearth.wire.messages import DeviceTrace, RunDone, TraceEvent


def shift_to_common_clock(done: RunDone, sent_seconds: float, answered_seconds: float) -> tuple[TraceEvent, ...]:
    """Shift the events of a run from the worker's clock to the caller's clock.

    As in NTP, the delays of request and answer are assumed equal, so the error is at most half of their sum.
    """
    shift = ((sent_seconds - done.began_seconds) + (answered_seconds - done.ended_seconds)) / 2
    return tuple(
        event.model_copy(
            update={"start_seconds": event.start_seconds + shift, "end_seconds": event.end_seconds + shift}
        )
        for event in done.trace
    )


def clock_error_seconds(done: RunDone, sent_seconds: float, answered_seconds: float) -> float:
    """The greatest error of `shift_to_common_clock`: half of the delays of request and answer together."""
    return max((answered_seconds - sent_seconds) - (done.ended_seconds - done.began_seconds), 0.0) / 2


_HopKey: TypeAlias = tuple[
    TaskKind, int | None, int | None, int | None, int | None
]  # kind, layer, tile, sender, receiver


class TileTransfer(NamedTuple):
    """One tile on one hop, from handing it to the transport until its arrival. `sender` and `receiver` are ranks."""

    label: str
    sender: int
    receiver: int
    start_seconds: float
    end_seconds: float
    num_bytes: int


def label(event: TraceEvent) -> str:
    """The displayed name of an event: `layer 3 qkv tile 1`, `layer 0 gather attention tile 2`, `segment 4`."""
    is_graph = event.kind in (Work.SEGMENT, Phase.TENSOR)
    name = event.kind.value if isinstance(event.kind, Work) else event.kind.name.lower().replace("_", " ")
    parts = [name, event.tensor]
    if event.layer is not None and not event.tensor:
        parts = [name, str(event.layer)] if is_graph else [f"layer {event.layer}", name]
    if event.tile is not None:
        parts.append(f"{'request' if is_graph else 'tile'} {event.tile}")
    if event.lane == "compute" and event.peer is not None:
        parts.append(f"of rank {event.peer}")
    return " ".join(filter(None, parts))


def transfers(traces: Sequence[DeviceTrace]) -> list[TileTransfer]:
    """Pair each `send` with its `receive`; sorted by start time.

    A tile in several chunks, or in several steps, has several sends and receives. They are paired in order, since a link
    preserves the order.
    """
    sent: dict[_HopKey, deque[TraceEvent]] = defaultdict(deque)
    for trace in traces:
        for event in trace.events:
            if event.lane == "send":
                sent[event.kind, event.layer, event.tile, trace.rank, event.peer].append(event)
    pairs = []
    for trace in traces:
        for event in trace.events:
            unpaired = sent.get((event.kind, event.layer, event.tile, event.peer, trace.rank))
            if event.lane == "receive" and event.peer is not None and unpaired:
                start, name = unpaired.popleft().start_seconds, f"{label(event)} {event.peer}->{trace.rank}"
                pairs.append(TileTransfer(name, event.peer, trace.rank, start, event.end_seconds, event.num_bytes))
    return sorted(pairs, key=lambda transfer: transfer.start_seconds)


def overlap_seconds(traces: Sequence[DeviceTrace]) -> float:
    """Total seconds in which a transfer overlapped with a computation on its receiver."""
    computing: dict[int, list[TraceEvent]] = defaultdict(list)
    for trace in traces:
        computing[trace.rank] += [event for event in trace.events if event.lane == "compute"]
    return sum(
        max(0.0, min(event.end_seconds, transfer.end_seconds) - max(event.start_seconds, transfer.start_seconds))
        for transfer in transfers(traces)
        for event in computing[transfer.receiver]
    )


def chrome_trace(traces: Sequence[DeviceTrace]) -> dict[str, Any]:
    """Export in the Chrome trace event format (chrome://tracing, Perfetto): a process per rank, lanes for compute and links."""
    names = {trace.rank: trace.device for trace in traces}
    start = min((event.start_seconds for trace in traces for event in trace.events), default=0.0)

    def complete_event(rank: int, lane: str, category: str, shown: TileTransfer | TraceEvent) -> dict[str, Any]:
        return {
            "name": label(shown) if isinstance(shown, TraceEvent) else shown.label,
            "cat": category, "ph": "X", "pid": rank + 1, "tid": lane, "ts": (shown.start_seconds - start) * 1e6,
            "dur": max(shown.end_seconds - shown.start_seconds, 0.0) * 1e6, "args": {"bytes": shown.num_bytes},
        }  # fmt: skip

    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank + 1, "args": {"name": name}} for rank, name in names.items()
    ]
    for trace in traces:
        events += [
            complete_event(trace.rank, "compute", "compute", event) for event in trace.events if event.lane == "compute"
        ]
    for transfer in transfers(traces):
        events.append(complete_event(transfer.receiver, f"from {names[transfer.sender]}", "transfer", transfer))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
