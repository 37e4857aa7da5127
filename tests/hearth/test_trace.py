"""Timelines from traces: transfers, overlap, labels and a common clock."""

from __future__ import annotations

from typing import Any

import pytest

from hearth.plan.phases import Phase, Work
from hearth.trace import chrome_trace, label, overlap_seconds, shift_to_common_clock, transfers
from hearth.wire.messages import DeviceTrace, RunDone, TraceEvent, WireStats


def event(lane: Any, start: float, end: float, kind: Work | Phase = Work.QKV, peer: int | None = None) -> TraceEvent:
    return TraceEvent(
        lane=lane, kind=kind, layer=3, tile=0, peer=peer, start_seconds=start, end_seconds=end, num_bytes=5
    )  # fmt: skip


def sent(start: float) -> TraceEvent:
    return event("send", start, start, Phase.GATHER_MLP, 1)


def received(end: float) -> TraceEvent:
    return event("receive", end, end, Phase.GATHER_MLP, 0)


def test_transfers_span_send_to_arrival_and_overlap_is_summed() -> None:
    traces = [
        DeviceTrace(device="a", rank=0, events=(sent(1.0),)),
        DeviceTrace(device="b", rank=1, events=(received(3.0), event("compute", 2.0, 5.0))),
    ]
    (transfer,) = transfers(traces)
    assert (transfer.sender, transfer.receiver, transfer.start_seconds, transfer.end_seconds) == (0, 1, 1.0, 3.0)
    assert overlap_seconds(traces) == pytest.approx(1.0)
    bars = [bar for bar in chrome_trace(traces)["traceEvents"] if bar["ph"] == "X"]
    assert {(bar["name"], bar["pid"], bar["tid"], bar["ts"], bar["dur"]) for bar in bars} == {
        ("layer 3 qkv tile 0", 2, "compute", 1e6, 3e6),
        ("layer 3 gather mlp tile 0 0->1", 2, "from a", 0.0, 2e6),
    }


def test_chunks_and_steps_are_paired_in_order() -> None:
    """Two chunks of one step, then one of the next; both devices have the same name."""
    traces = [
        DeviceTrace(device="x", rank=0, events=(sent(1.0), sent(1.5))),
        DeviceTrace(device="x", rank=1, events=(event("compute", 2.5, 3.0), received(2.0), received(3.0))),
        DeviceTrace(device="x", rank=0, events=(sent(5.0),)),
        DeviceTrace(device="x", rank=1, events=(event("compute", 5.0, 6.0), received(7.0))),
    ]
    assert [(each.start_seconds, each.end_seconds) for each in transfers(traces)] == [
        (1.0, 2.0),
        (1.5, 3.0),
        (5.0, 7.0),
    ]
    assert overlap_seconds(traces) == pytest.approx(0.5 + 1.0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": Work.EMBEDDING}, "embedding"),
        ({"kind": Work.OUT, "layer": 2, "tile": 0, "peer": 1}, "layer 2 out tile 0 of rank 1"),
        ({"kind": Work.CONNECTIVE_MLP, "layer": 2}, "layer 2 connective 2"),
        ({"kind": Work.SEGMENT, "layer": 4}, "segment 4"),
        ({"kind": Work.SEGMENT, "layer": 4, "tile": 2}, "segment 4 request 2"),
        ({"kind": Phase.TENSOR, "layer": 4, "tensor": "logits", "lane": "send", "peer": 1}, "tensor logits"),
        ({"kind": Phase.STAGE_ROWS, "layer": 6, "tile": 1, "lane": "send", "peer": 1}, "layer 6 stage rows tile 1"),
    ],
)
def test_labels(fields: dict[str, Any], text: str) -> None:
    assert label(TraceEvent(**{"lane": "compute", "start_seconds": 0.0, "end_seconds": 0.0, **fields})) == text


def test_clock_offset_is_half_the_round_trip() -> None:
    done = RunDone(
        names=("hidden",), began_seconds=100.0, ended_seconds=102.0, compute_seconds=(1.5,), wire=WireStats(),
        dropped_messages=0,
        trace=(event("compute", 101.0, 101.5),),
    )  # fmt: skip
    (shifted,) = shift_to_common_clock(done, sent_seconds=5.0, answered_seconds=8.0)  # 0.5 s for each direction
    assert (shifted.start_seconds, shifted.end_seconds) == (6.5, 7.0)
