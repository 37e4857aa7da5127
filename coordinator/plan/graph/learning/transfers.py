"""Transfers of a traced request against the measured links. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.tasks import lone_transfer_seconds
from hearth.plan.plan import GraphPlan
from hearth.trace import TileTransfer, transfers
from hearth.wire.messages import DeviceTrace

# A transfer counts if it is predicted to take at least this many times the error of the clocks at both of its ends.
_MIN_CLOCK_ERRORS = 4.0


class MeasuredTransfer(NamedTuple):
    """A transfer between two devices, by id; `ratio` of its seconds to those predicted from the link."""

    source: str
    target: str
    ratio: float


def measured_transfers(
    traces: Sequence[DeviceTrace], clock_errors: Sequence[float], cluster: GraphCluster, plan: GraphPlan
) -> list[MeasuredTransfer]:
    """The transfers that had the links of both devices for themselves, and are long enough to be measured.

    `clock_errors`: the greatest error of each rank's clock, in seconds. All devices of the plan must be in the cluster.
    """
    members = cluster.rank_devices(plan)
    found = transfers(traces)
    measured = []
    for each in found:
        source, target = members[each.sender], members[each.receiver]
        predicted = lone_transfer_seconds(cluster, source, target, each.num_bytes)
        error = clock_errors[each.sender] + clock_errors[each.receiver]
        if predicted >= _MIN_CLOCK_ERRORS * error and not any(_contend(each, other) for other in found):
            ratio = (each.end_seconds - each.start_seconds) / predicted
            ids = (cluster.devices[source].device_id, cluster.devices[target].device_id)
            measured.append(MeasuredTransfer(*ids, ratio))
    return measured


def _contend(one: TileTransfer, other: TileTransfer) -> bool:
    """Whether two transfers share a side of a link at the same time."""
    shares = one.sender == other.sender or one.receiver == other.receiver
    overlaps = one.start_seconds < other.end_seconds and other.start_seconds < one.end_seconds
    return one is not other and shares and overlaps
