"""Which transfers of a trace measure a link."""

from __future__ import annotations

import pytest
from support.graph_plans import placed_plan
from support.graphs import chain, cluster_of

from coordinator.plan.graph.calibration import MeasuredTransfer, measured_transfers
from hearth.plan.phases import Phase
from hearth.wire.messages import DeviceTrace, TraceEvent

SPEC = chain(1, [100] * 3)
CLUSTER = cluster_of(SPEC, [1.0] * 3, bytes_per_second=100.0, latency_seconds=0.5)
PLAN = placed_plan(SPEC, ["id-c", "id-a", "id-b"])  # ranks 0, 1, 2
SURE = (0.0, 0.0, 0.0)


def trace(*sent: tuple[int, int, float, float]) -> list[DeviceTrace]:
    """Transfers of 100 bytes, each with its sender, receiver, start and end."""
    events: dict[int, list[TraceEvent]] = {0: [], 1: [], 2: []}
    for number, (sender, receiver, start, end) in enumerate(sent):
        for rank, peer, lane, at in ((sender, receiver, "send", start), (receiver, sender, "receive", end)):
            fields = {"lane": lane, "kind": Phase.TENSOR, "layer": number, "peer": peer, "num_bytes": 100}
            events[rank].append(TraceEvent.model_validate({**fields, "start_seconds": at, "end_seconds": at}))
    return [DeviceTrace(device=f"d{rank}", rank=rank, events=tuple(own)) for rank, own in events.items()]


def test_ratio_is_to_rate_and_latency_of_the_link() -> None:
    found = measured_transfers(trace((0, 1, 10.0, 13.0)), SURE, CLUSTER, PLAN)
    assert found == [MeasuredTransfer("id-c", "id-a", pytest.approx(3.0 / 1.5))]


@pytest.mark.parametrize(
    ("other", "num_measured"),
    [
        ((0, 2, 12.0, 14.0), 0),  # the same sender, at the same time
        ((2, 1, 12.0, 14.0), 0),  # the same receiver
        ((0, 2, 13.0, 14.5), 2),  # one after the other
        ((1, 0, 10.0, 11.5), 2),  # the other way: the two directions of a link are separate
    ],
)
def test_contended_transfers_say_nothing_of_the_link(other: tuple[int, int, float, float], num_measured: int) -> None:
    assert len(measured_transfers(trace((0, 1, 10.0, 13.0), other), SURE, CLUSTER, PLAN)) == num_measured


def test_short_transfer_is_not_measured_by_uncertain_clocks() -> None:
    sent = trace((0, 1, 10.0, 13.0))
    assert measured_transfers(sent, (0.1, 0.25, 9.0), CLUSTER, PLAN)
    assert not measured_transfers(sent, (0.2, 0.25, 0.0), CLUSTER, PLAN)
