"""How fast a traced step could have been: its own compute and its own bytes, with perfect overlap. Pure.

    bound = sum over phases of  max over devices d of  max(compute_d, sent_d / rate_d, received_d / rate_d)

A phase is one part of a layer's work and the collectives that can hide behind it: QKV tiles with the AllGather before
them (or the exchange of Q, K and V), attention and out-projection tiles with the ReduceScatter, and the MLP's two GEMMs
with both of its collectives, as these follow each other tile by tile. Work without a collective (connective, embedding)
is a phase of compute alone, and a collective without work (SP's K and V, the second half of an AllReduce) one of transfer
alone. Phases follow each other, as in Galaxy's objective (5). Compute is the traced bars' time under the device's limits;
rates are the link's own, without headers: less than this it cannot take, and nothing of latency, waits for quota or
encryption is in it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Events = Sequence[Mapping[str, Any]]

_LAYER = re.compile(r"^layer (\d+) (.+)$")
_HOP = re.compile(r" tile \d+ (?:\d+->\d+)$")
# What a compute bar's name begins with, or a transfer's phase: the segment of the layer that both belong to.
_SEGMENT_OF_COMPUTE = (("qkv", "enter attention"), ("attention tile", "leave attention"), ("out", "leave attention"),
                       ("up", "mlp"), ("down", "mlp"))  # fmt: skip
_SEGMENT_OF_TRANSFER = {
    "gather_attention": "enter attention",
    "exchange_qkv": "enter attention",
    "reduce_attention": "leave attention",
    "exchange_heads": "leave attention",
    "gather_mlp": "mlp",
    "reduce_mlp": "mlp",
    "gather_keys": "keys and values",
    "gather_values": "keys and values",
}


def bound_seconds(steps: Sequence[Sequence[Events]], bytes_per_second: Sequence[float]) -> float:
    """From every device's trace events of one step or several, and the rate of its link in each direction.

    Of several steps of the same plan the least counts, phase by phase: what one lost to something else is no bound.
    """
    least: dict[tuple[str, int], float] = {}
    for traces in steps:
        for device, events in enumerate(traces):
            for phase, seconds in _phases(events, bytes_per_second[device]).items():
                least[phase, device] = min(seconds, least.get((phase, device), seconds))
    phases: dict[str, float] = {}
    for (phase, _), seconds in least.items():
        phases[phase] = max(seconds, phases.get(phase, 0.0))
    return sum(phases.values())


def _phases(events: Events, bytes_per_second: float) -> dict[str, float]:
    """What one device needs for each phase: compute, sending or receiving, whichever is longest."""
    compute: defaultdict[str, float] = defaultdict(float)
    sent, received = compute.copy(), compute.copy()
    for event in events:
        if event["lane"] == "compute":
            compute[_compute_phase(event["name"])] += event["end_seconds"] - event["start_seconds"]
        elif event["lane"] in ("send", "receive"):
            lane = sent if event["lane"] == "send" else received
            lane[_transfer_phase(event["name"])] += event["num_bytes"] / bytes_per_second
    return {phase: max(compute[phase], sent[phase], received[phase]) for phase in {*compute, *sent, *received}}


def _compute_phase(name: str) -> str:
    """`layer 3 qkv tile 1` and what hides behind it: `3 enter attention`. Unknown names are phases of their own."""
    found = _LAYER.match(name)
    if found is None:
        return f"compute {name}"
    layer, work = found.groups()
    for beginning, segment in _SEGMENT_OF_COMPUTE:
        if work == beginning or work.startswith(beginning + " "):
            return f"{layer} {segment}"
    return f"{layer} compute {work}"


def _transfer_phase(name: str) -> str:
    """`layer 3 gather_attention tile 1 0->1`: `3 enter attention`."""
    found = _LAYER.match(_HOP.sub("", name))
    if found is None:
        return f"transfer {name}"
    layer, phase = found.groups()
    return f"{layer} {_SEGMENT_OF_TRANSFER.get(phase, f'transfer {phase}')}"
