"""How fast a traced step could have been: its own compute and its own bytes, with perfect overlap. Pure.

    bound = sum over parts of  max over devices d of  max(compute_d, sent_d / rate_d, received_d / rate_d)

A part is a segment of a layer's work and the collectives that can hide behind it: QKV tiles with the AllGather before
them (or the exchange of Q, K and V), attention and out-projection tiles with the ReduceScatter, and the MLP's two GEMMs
with both of its collectives, as these follow each other tile by tile. Work without a collective (connective, embedding)
is a part of compute alone, and a collective without work (SP's K and V, the second half of an AllReduce) one of transfer
alone. Parts follow each other, as in Galaxy's objective (5). Compute is the traced bars' time under the device's limits;
rates are the link's own, without headers: less than this it cannot take, and nothing of latency, waits for quota or
encryption is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import TypeAlias

from hearth.plan.phases import Phase, TaskKind, Work
from hearth.wire.messages import TraceEvent

Events = Sequence[TraceEvent]


class Segment(Enum):
    """A part of a layer whose transfers can hide behind its computations."""

    ENTER_ATTENTION = auto()
    LEAVE_ATTENTION = auto()
    MLP = auto()
    KEYS_AND_VALUES = auto()


_Part: TypeAlias = tuple[int | None, Segment | TaskKind]  # layer, and what of it

# A transfer belongs to the segment of its work. Every other kind of a layer is a part of its own.
SEGMENTS: Mapping[TaskKind | None, Segment] = {
    Work.QKV: Segment.ENTER_ATTENTION,
    Work.ATTENTION: Segment.LEAVE_ATTENTION,
    Work.OUT: Segment.LEAVE_ATTENTION,
    Work.UP: Segment.MLP,
    Work.DOWN: Segment.MLP,
    Phase.GATHER_KEYS: Segment.KEYS_AND_VALUES,
    Phase.GATHER_VALUES: Segment.KEYS_AND_VALUES,
}


def bound_seconds(steps: Sequence[Sequence[Events]], bytes_per_second: Sequence[float]) -> float:
    """From every device's trace events of one step or several, and the rate of its link in each direction.

    Of several steps of the same plan the least time counts, part by part: time lost to other programs is no bound.
    """
    least: dict[tuple[_Part, int], float] = {}
    for traces in steps:
        for device, events in enumerate(traces):
            for part, seconds in _parts(events, bytes_per_second[device]).items():
                least[part, device] = min(seconds, least.get((part, device), seconds))
    parts: dict[_Part, float] = {}
    for (part, _), seconds in least.items():
        parts[part] = max(seconds, parts.get(part, 0.0))
    return sum(parts.values())


def _parts(events: Events, bytes_per_second: float) -> dict[_Part, float]:
    """The time that one device needs for each part: computing, sending or receiving, the longest of them."""
    lanes: defaultdict[_Part, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        lanes[event.layer, _segment(event.kind)][event.lane] += (
            event.end_seconds - event.start_seconds if event.lane == "compute" else event.num_bytes / bytes_per_second
        )
    return {part: max(seconds.values()) for part, seconds in lanes.items()}


def _segment(kind: TaskKind) -> Segment | TaskKind:
    work = kind.work if isinstance(kind, Phase) else kind
    return SEGMENTS.get(work) or SEGMENTS.get(kind) or kind
