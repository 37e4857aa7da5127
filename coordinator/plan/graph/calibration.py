"""Calibration of profiled times by requests: factors per operator and device, and per link. Pure.

A request tells the seconds of each segment, not of each operator, so every operator of a segment gets the segment's factor,
weighted by its share of the segment's time. What is not known of an operator is taken from its device, and what is not known
of a device from the other devices. The CPU time of transfers is left out of the factor of a segment that it delays
(`segment_delays`); transfers that had a link for themselves give the factor of the link (`measured_transfers`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel, Field

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.tasks import lone_transfer_seconds, request_tasks, segment_seconds
from coordinator.plan.simulator import Resource, Task, Timeline, simulate
from coordinator.plan.speed_ratio import SpeedRatio
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.phases import Work
from hearth.plan.plan import GraphPlan
from hearth.trace import TileTransfer, transfers
from hearth.wire.messages import DeviceTrace

# Weight of what is known of the device in the factor of an operator, and of the profile in that of a link, in requests.
_PRIOR_WEIGHT = 1.0
_SAME_PROFILE = 1e-6  # relative difference up to which two profiles of a device are the same
# A transfer counts if it is predicted to take at least this many times the error of the clocks at both of its ends.
_MIN_CLOCK_ERRORS = 4.0


class DeviceFactors(BaseModel):
    """What is known of one device. `profiled_seconds`: those of the whole graph, which identify the profile."""

    profiled_seconds: float
    device: SpeedRatio = Field(default_factory=SpeedRatio)
    operators: list[SpeedRatio] = []  # [n]


class LinkFactor(BaseModel):
    """What is known of the link from one device to another: seconds of a transfer against the prediction."""

    source: str
    target: str
    transfers: SpeedRatio = Field(default_factory=SpeedRatio)


class Factors(BaseModel):
    """All that a calibration has learnt, as it is saved."""

    devices: dict[str, DeviceFactors] = {}  # by id
    links: list[LinkFactor] = []


@dataclass
class Calibration:
    """The factors learnt for one graph. Clusters that are passed in hold profiled times, without any factor."""

    factors: Factors = field(default_factory=Factors)

    def observe(
        self,
        profiled: GraphCluster,
        plan: GraphPlan,
        seconds: Sequence[Sequence[float]],
        delays: Sequence[Sequence[float]],
    ) -> None:
        """Record one request: the measured compute seconds of each rank's segments, in the plan's order.

        `delays` are the seconds of them that the price of the plan counts for transfers (`segment_delays`). All devices of
        the plan must be in the cluster. Raises ValueError if the numbers of segments differ.
        """
        for rank, member in enumerate(profiled.rank_devices(plan)):
            known = self._device(profiled, member)
            total_expected = total_computed = 0.0
            for segment, measured, delay in zip(plan.body.segments_of(rank), seconds[rank], delays[rank], strict=True):
                expected = segment_seconds(profiled, member, segment)
                computed = _without_delay(measured, delay, expected)
                total_expected += expected
                total_computed += computed
                for operator in segment.operators if expected > 0 else ():
                    share = profiled.seconds[operator][member] / expected
                    known.operators[operator].add(computed / expected, share)
            if total_expected > 0:
                known.device.add(total_computed / total_expected)

    def observe_transfer(self, source: str, target: str, ratio: float) -> None:
        """Record a transfer between two devices that took `ratio` times the seconds predicted from the measured link."""
        link = next((each for each in self.factors.links if (each.source, each.target) == (source, target)), None)
        if link is None:
            link = LinkFactor(source=source, target=target)
            self.factors.links.append(link)
        link.transfers.add(ratio)

    def apply(self, profiled: GraphCluster, assumed: Mapping[str, float] | None = None) -> GraphCluster:
        """The cluster with the learnt factors. `assumed`: factors of devices, by id, that replace what is learnt of them."""
        assumed = assumed or {}
        measured = [known.device.value for known in self.factors.devices.values() if known.device.weight > 0]
        elsewhere = math.exp(median(measured)) if measured else 1.0

        def column(member: int) -> list[float]:
            device_id, own = profiled.devices[member].device_id, [row[member] for row in profiled.seconds]
            known = self.factors.devices.get(device_id)
            if device_id in assumed:
                return [seconds * assumed[device_id] for seconds in own]
            if known is None or not known.device.weight or not _is_profile(known, own):
                return [seconds * elsewhere for seconds in own]
            return [
                seconds * _shrunk(operator, known.device.value)
                for seconds, operator in zip(own, known.operators, strict=True)
            ]

        columns = [column(member) for member in range(len(profiled.devices))]
        ids = [device.device_id for device in profiled.devices]
        by_link = {(each.source, each.target): _shrunk(each.transfers, 0.0) for each in self.factors.links}
        rates = tuple(
            tuple(rate / by_link.get((source, target), 1.0) for target, rate in zip(ids, row, strict=True))
            for source, row in zip(ids, profiled.bytes_per_second, strict=True)
        )
        return replace(profiled, seconds=tuple(zip(*columns, strict=True)), bytes_per_second=rates)

    def device_factors(self) -> dict[str, float]:
        """The factor of each device that has been measured, by id."""
        known = self.factors.devices.items()
        return {device_id: math.exp(each.device.value) for device_id, each in known if each.device.weight > 0}

    def _device(self, profiled: GraphCluster, member: int) -> DeviceFactors:
        """What is known of a device under its present profile; nothing yet under another one."""
        device_id, own = profiled.devices[member].device_id, [row[member] for row in profiled.seconds]
        known = self.factors.devices.get(device_id)
        if known is None or not _is_profile(known, own):
            known = DeviceFactors(profiled_seconds=sum(own), operators=[SpeedRatio() for _ in own])
            self.factors.devices[device_id] = known
        return known


def _without_delay(measured: float, delay: float, profiled: float) -> float:
    """The computing in a segment's measured seconds. Of a delay, no more counts than explains why they exceed the profile."""
    return max(measured - delay, min(measured, profiled))


def _is_profile(known: DeviceFactors, seconds: Sequence[float]) -> bool:
    """Whether the factors refer to this profile of the device: another one may have other errors."""
    same_total = math.isclose(known.profiled_seconds, sum(seconds), rel_tol=_SAME_PROFILE)
    return same_total and len(known.operators) == len(seconds)


def _shrunk(average: SpeedRatio, prior: float) -> float:
    """The factor of an average, drawn towards exp(prior) as long as it has little weight."""
    weight = average.weight + _PRIOR_WEIGHT
    return math.exp((average.weight * average.value + _PRIOR_WEIGHT * prior) / weight)


# ---- what a request tells ----------------------------------------------------------------------------------------------


def segment_delays(spec: GraphSpec, plan: GraphPlan, cluster: GraphCluster) -> list[list[float]]:
    """For each rank, the delays of its segments in one request, in the plan's order; `cluster` has all of its devices.

    The simulator computes a segment after the CPU time of the transfers that came before it. On a device both share the
    cores: the segment starts at once and takes longer by that time, which is then part of its measured seconds.
    """
    tasks = request_tasks(spec, plan.body.segments, cluster, cluster.rank_devices(plan), values=plan.wire.values)
    delays = _delays(tasks, simulate(tasks))
    segments = plan.body.segments
    return [
        [delays[index] for index, segment in enumerate(segments) if segment.rank == rank]
        for rank in range(plan.num_ranks)
    ]


def _delays(tasks: Sequence[Task], timeline: Timeline) -> dict[int | None, float]:
    """By segment, the seconds from when its inputs are there and its device has no other segment until it starts."""
    computed = [index for index, task in enumerate(tasks) if task.kind is Work.SEGMENT]
    free: dict[tuple[Resource, ...], float] = {}  # when the latest segment of a device ended
    delays = {}
    for index in sorted(computed, key=lambda each: (timeline.starts[each], timeline.ends[each])):
        task = tasks[index]
        ready = max((timeline.ends[before] for before in task.after), default=0.0)
        delays[task.layer] = timeline.starts[index] - max(ready, free.get(task.resources, 0.0))
        free[task.resources] = timeline.ends[index]
    return delays


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
