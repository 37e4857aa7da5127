"""Seconds by which the CPU time of transfers delays each segment of a request, as the price of a plan has them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.tasks import request_tasks
from coordinator.plan.simulator import Resource, Task, Timeline, simulate
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.phases import Work
from hearth.plan.plan import GraphPlan


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
