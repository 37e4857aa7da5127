"""Convert a simulated step or request to the form of a measured trace, for `hearth.trace.chrome_trace`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from coordinator.plan.simulator import ResourceKind, Task, Timeline

if TYPE_CHECKING:
    from hearth.wire.messages import DeviceTrace, TraceEvent

_MAX_TENSOR_CHARACTERS = 64  # the last characters of a tensor's name; the limit of a trace event
_COORDINATOR = "coordinator"


def simulated_traces(tasks: Sequence[Task], timeline: Timeline, names: Sequence[str]) -> tuple[DeviceTrace, ...]:
    """One trace per device. `names` are the devices by rank.

    An end of a transfer that is not simulated belongs to the coordinator, which is the last rank.
    """
    # Plans do without, and importing all messages takes a third of the time in which a planner process starts.
    from hearth.wire.messages import DeviceTrace, TraceEvent

    coordinator_rank = len(names)
    events: list[list[TraceEvent]] = [[] for _ in (*names, _COORDINATOR)]

    def add(
        rank: int, lane: Literal["compute", "send", "receive"], task: Task, peer: int | None, start: float, end: float
    ) -> None:
        events[rank].append(
            TraceEvent(
                lane=lane, kind=task.kind, layer=task.layer, tile=task.tile, peer=peer,
                tensor=task.tensor[-_MAX_TENSOR_CHARACTERS:], start_seconds=start, end_seconds=end, num_bytes=task.num_bytes,
            )
        )  # fmt: skip

    for task, start, end in zip(tasks, timeline.starts, timeline.ends, strict=True):
        rank_of = {resource.kind: resource.rank for resource in task.resources}
        computes = rank_of.get(ResourceKind.COMPUTE, rank_of.get(ResourceKind.CPU))
        if computes is not None:
            add(computes, "compute", task, task.peer, start, end)
        else:
            sender, receiver = (
                rank_of.get(ResourceKind.SEND, coordinator_rank),
                rank_of.get(ResourceKind.RECEIVE, coordinator_rank),
            )
            add(sender, "send", task, receiver, start, start)
            add(receiver, "receive", task, sender, end, end)
    traces = (
        DeviceTrace(device=name, rank=rank, events=tuple(events[rank]))
        for rank, name in enumerate((*names, _COORDINATOR))
    )
    return tuple(trace for trace in traces if trace.rank < coordinator_rank or trace.events)
