"""Lower bound of a step: its computations measured alone, and its bytes, with perfect overlap. Pure.

    bound = sum over parts of  max over devices d of  max(compute_d, sent_d / rate_d, received_d / rate_d)

A part is a section of a layer's work and the collectives that can hide behind it: QKV tiles with the AllGather before
them (or the exchange of Q, K and V), attention and out-projection tiles with the ReduceScatter, and the MLP's two GEMMs
with both collectives, which overlap tile by tile. Work without a collective (connective, embedding) is a part with compute
only; a collective without work (SP's K and V, the second half of an AllReduce) is a part with transfers only. Parts run
one after the other, as in Galaxy's objective (5). Compute is the traced time under the device's limits; rates are the
link's nominal ones, without headers. The bound leaves out latency, waiting for CPU quota, and encryption.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from hearth.plan.phases import Phase, TaskKind, Work
from hearth.wire.messages import TraceEvent

Events = Sequence[TraceEvent]


_Part: TypeAlias = tuple[int | None, str | TaskKind]  # layer, and part or kind of work in it

# The parts of a layer whose transfers can hide behind their computations. A transfer belongs to the part of its work. Every
# other kind of task is a separate part. No name is that of a kind.
LAYER_PARTS: Mapping[TaskKind | None, str] = {
    Work.QKV: "part of QKV",
    **dict.fromkeys((Work.ATTENTION, Work.OUT), "part of attention"),
    **dict.fromkeys((Work.UP, Work.DOWN), "part of the MLP"),
    **dict.fromkeys((Phase.GATHER_KEYS, Phase.GATHER_VALUES), "keys and values"),
}


def bound_seconds(computed: Sequence[Events], sent: Sequence[Events], bytes_per_second: Sequence[float]) -> float:
    """The bound of one step in seconds.

    `computed`: each rank's trace of the step's computations without the other ranks. `sent`: each rank's trace of the whole
    step, of which the transfers count. `bytes_per_second`: the rate of each rank's link in each direction.
    """
    parts: dict[_Part, float] = {}
    for alone, whole, rate in zip(computed, sent, bytes_per_second, strict=True):
        computations = [event for event in alone if event.lane == "compute"]
        transfers = [event for event in whole if event.lane != "compute"]
        for part, seconds in _parts(computations + transfers, rate).items():
            parts[part] = max(seconds, parts.get(part, 0.0))
    return sum(parts.values())


def _parts(events: Events, bytes_per_second: float) -> dict[_Part, float]:
    """One device's seconds for each part: the longest of computing, sending and receiving."""
    lanes: defaultdict[_Part, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        lanes[event.layer, _layer_part(event.kind)][event.lane] += (
            event.end_seconds - event.start_seconds if event.lane == "compute" else event.num_bytes / bytes_per_second
        )
    return {part: max(seconds.values()) for part, seconds in lanes.items()}


def _layer_part(kind: TaskKind) -> str | TaskKind:
    work = kind.work if isinstance(kind, Phase) else kind
    return LAYER_PARTS.get(work) or LAYER_PARTS.get(kind) or kind
