"""Timelines of a request: bring every device's events to one clock, pair sends with arrivals, export a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hearth.wire.messages import DeviceTrace, GraphDone, StepDone, TraceEvent


def shift_to_common_clock(
    done: StepDone | GraphDone, sent_seconds: float, answered_seconds: float
) -> tuple[TraceEvent, ...]:
    """The step's events on the asker's clock.

    As NTP does it: what passed on the way to the worker is taken to be as long as the way back, so the error is at most
    half of both together.
    """
    shift = ((sent_seconds - done.began_seconds) + (answered_seconds - done.ended_seconds)) / 2
    return tuple(
        event.model_copy(
            update={"start_seconds": event.start_seconds + shift, "end_seconds": event.end_seconds + shift}
        )
        for event in done.trace
    )


class Transfer(NamedTuple):
    """One tile on one hop, from the moment it was handed to the transport until it had arrived."""

    name: str
    sender: str
    receiver: str
    start_seconds: float
    end_seconds: float
    num_bytes: int


def transfers(traces: Sequence[DeviceTrace]) -> list[Transfer]:
    """Pair each `send` with the `receive` of the same name, in order of their start."""
    sent = {event.name: (trace.device, event) for trace in traces for event in trace.events if event.lane == "send"}
    found = []
    for trace in traces:
        for event in trace.events:
            if event.lane == "receive" and event.name in sent:
                sender, start = sent[event.name]
                found.append(
                    Transfer(
                        event.name,
                        sender,
                        trace.device,
                        start.start_seconds,
                        event.end_seconds,
                        event.num_bytes,
                    )
                )
    return sorted(found, key=lambda transfer: transfer.start_seconds)


def overlap_seconds(traces: Sequence[DeviceTrace]) -> float:
    """Seconds of transfers during which the receiving device was computing (their bars intersected)."""
    computing = {
        trace.device: [(event.start_seconds, event.end_seconds) for event in trace.events if event.lane == "compute"]
        for trace in traces
    }
    return sum(
        max(0.0, min(end, transfer.end_seconds) - max(start, transfer.start_seconds))
        for transfer in transfers(traces)
        for start, end in computing[transfer.receiver]
    )


def chrome_trace(traces: Sequence[DeviceTrace]) -> dict[str, Any]:
    """The Chrome trace event format (chrome://tracing, Perfetto): a process per device, lanes for compute and links."""
    pids = {trace.device: index + 1 for index, trace in enumerate(traces)}
    start = min((event.start_seconds for trace in traces for event in trace.events), default=0.0)

    def bar(name: str, category: str, pid: int, tid: str, begin: float, end: float, num_bytes: int) -> dict[str, Any]:
        return {
            "name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid,
            "ts": (begin - start) * 1e6, "dur": max(end - begin, 0.0) * 1e6, "args": {"bytes": num_bytes},
        }  # fmt: skip

    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": device}} for device, pid in pids.items()
    ]
    for trace in traces:
        for event in _bars(trace.events):
            events.append(
                bar(
                    event.name,
                    event.lane,
                    pids[trace.device],
                    event.lane,
                    event.start_seconds,
                    event.end_seconds,
                    event.num_bytes,
                )
            )
    for transfer in transfers(traces):
        events.append(
            bar(
                transfer.name,
                "transfer",
                pids[transfer.receiver],
                f"from {transfer.sender}",
                transfer.start_seconds,
                transfer.end_seconds,
                transfer.num_bytes,
            )
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _bars(events: Iterable[TraceEvent]) -> Iterable[TraceEvent]:
    return (event for event in events if event.lane in ("compute", "wait"))
