"""Timelines from traces."""

from __future__ import annotations

import pytest

from hearth.trace import chrome_trace, overlap_seconds, shift_to_common_clock, transfers
from hearth.wire.messages import DeviceTrace, StepDone, TraceEvent, WireStats


def event(name: str, lane: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(name=name, lane=lane, start_seconds=start, end_seconds=end, num_bytes=5)  # type: ignore[arg-type]


def test_transfers_are_drawn_from_send_to_arrival_and_their_overlap_is_counted() -> None:
    traces = [
        DeviceTrace(device="a", events=(event("tile 0->1", "send", 1.0, 1.0),)),
        DeviceTrace(device="b", events=(event("tile 0->1", "receive", 3.0, 3.0), event("qkv", "compute", 2.0, 5.0))),
    ]
    (transfer,) = transfers(traces)
    assert (transfer.sender, transfer.receiver, transfer.start_seconds, transfer.end_seconds) == (
        "a",
        "b",
        1.0,
        3.0,
    )
    assert overlap_seconds(traces) == pytest.approx(1.0)
    bars = [bar for bar in chrome_trace(traces)["traceEvents"] if bar["ph"] == "X"]
    assert {(bar["name"], bar["ts"], bar["dur"]) for bar in bars} == {
        ("qkv", 1e6, 3e6),
        ("tile 0->1", 0.0, 2e6),
    }


def test_clocks_are_brought_together_from_the_round_trip() -> None:
    done = StepDone(
        first_row=0, num_rows=1, began_seconds=100.0, ended_seconds=102.0, wire=WireStats(), dropped_messages=0,
        trace=(event("x", "compute", 101.0, 101.5),),
    )  # fmt: skip
    (shifted,) = shift_to_common_clock(done, sent_seconds=5.0, answered_seconds=8.0)  # half a second each way
    assert (shifted.start_seconds, shifted.end_seconds) == (6.5, 7.0)
