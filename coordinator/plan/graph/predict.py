"""Predicted times of a cut graph (the cost model of graphs): one request is simulated, a full pipeline is added up. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.graph.tasks import (
    SMALL_READS_FACTOR,
    coordinator_cpu_seconds,
    endpoint_cpu_seconds,
    input_bytes_by_rank,
    output_bytes_by_rank,
    request_tasks,
    tensor_transfers,
)
from coordinator.plan.simulator import (
    TRANSFERS,
    Resource,
    ResourceKind,
    Task,
    compute_resources,
    simulate,
    simulated_traces,
    transfer_resources,
    wire_resources,
)
from hearth.plan.common import ValueFormatName
from hearth.plan.graph import Segment
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import GraphPlan

if TYPE_CHECKING:
    from hearth.wire.messages import DeviceTrace

# CPU time of a request on every rank, besides its tensors, in units of one message: the coordinator's call, passed by the
# daemon to the worker, decoded and answered. Measured: 2.6 ms of a core where a message takes 0.07 ms.
_MESSAGES_PER_REQUEST = 36
# Concurrent requests per stage of a full pipeline: one that is computed, one in transfer, and one that waits, so that the other
# stages stay busy when one is late.
_REQUESTS_PER_STAGE = 3
_MAX_REQUESTS_IN_FLIGHT = 256  # each takes memory for its tensors; more would only wait in queues


class GraphPrediction(NamedTuple):
    """Predicted seconds: `latency_seconds` of a single request, `bottleneck_seconds` per request of a full pipeline.

    `busy_seconds` is compute time by rank. `bottleneck` is the busiest resource; without congestion it may also be a
    channel between two devices, given by its two ends.
    """

    latency_seconds: float
    bottleneck_seconds: float
    bottleneck: tuple[Resource, ...]
    busy_seconds: tuple[float, ...]
    transfer_seconds: float  # of the busiest side of a link


def predict_segments(
    spec: GraphSpec,
    segments: Sequence[Segment],
    cluster: GraphCluster,
    rank_devices: Sequence[int],
    congestion: bool = True,
    values: ValueFormatName = "exact",
) -> GraphPrediction:
    """Simulate one request. A full pipeline's bottleneck is the device or side of a link that one request occupies longest."""
    tasks = request_tasks(spec, segments, cluster, rank_devices, values=values)
    timeline = simulate(tasks if congestion else _without_contention(tasks))
    busy: defaultdict[tuple[Resource, ...], float] = defaultdict(float)
    for task in tasks:
        if task.kind is not Work.WIRE:  # with several requests it costs more, see below
            for resource in task.resources:
                is_here = resource.rank < len(rank_devices) or resource.kind is ResourceKind.MEDIUM
                if is_here and (congestion or resource.kind not in TRANSFERS):
                    busy[(resource,)] += task.seconds
    transfers = tensor_transfers(spec, segments, values)
    if not congestion:  # the ends of links are not shared, but each channel still is
        for transfer in transfers:
            channel = transfer_resources(transfer.source, transfer.target)
            rate = cluster.bytes_per_second[rank_devices[transfer.source]][rank_devices[transfer.target]]
            busy[channel] += transfer.num_bytes / rate
    reads_factor = SMALL_READS_FACTOR if cluster.measured else 1.0
    cpu_of = [wire_resources(rank, cluster.devices[each].wire.beside_compute) for rank, each in enumerate(rank_devices)]
    for transfer in transfers:  # encryption, TCP and conversions take cores from the segments
        for rank in (transfer.source, transfer.target):
            busy[cpu_of[rank]] += endpoint_cpu_seconds(cluster, rank_devices[rank], transfer, values, reads_factor)
    for each in (input_bytes_by_rank(spec, segments, cluster), output_bytes_by_rank(spec, segments, cluster)):
        for rank, num_bytes in each.items():
            busy[cpu_of[rank]] += coordinator_cpu_seconds(cluster, rank_devices[rank], num_bytes)
    for rank, member in enumerate(rank_devices) if cluster.measured else ():
        busy[cpu_of[rank]] += _MESSAGES_PER_REQUEST * cluster.devices[member].wire.seconds_per_message
    bottleneck = max(busy, key=lambda resources: busy[resources])
    return GraphPrediction(
        latency_seconds=timeline.makespan,
        bottleneck_seconds=busy[bottleneck],
        bottleneck=bottleneck,
        busy_seconds=tuple(busy.get(compute_resources(rank), 0.0) for rank in range(len(rank_devices))),
        transfer_seconds=max((busy[key] for key in busy if key[0].kind in TRANSFERS), default=0.0),
    )


def predict_plan(request: GraphRequest, plan: GraphPlan) -> GraphPrediction:
    """The price of a plan on the request's cluster, which must have all of its devices."""
    rank_devices = request.cluster.rank_devices(plan)
    return predict_segments(
        request.spec, plan.body.segments, request.cluster, rank_devices, request.congestion, plan.wire.values
    )


def current_objective_seconds(request: GraphRequest, plan: GraphPlan) -> float:
    """Seconds of a plan on the request's cluster, which must have all of its devices; comparable with `objective_seconds`."""
    priced = predict_plan(request, plan)
    return priced.latency_seconds if plan.body.objective == "latency" else priced.bottleneck_seconds


def _without_contention(tasks: Sequence[Task]) -> list[Task]:
    """The same tasks, with transfers that occupy no resource."""
    return [each._replace(resources=()) if isinstance(each.kind, Phase) else each for each in tasks]


def predicted_graph_timeline(
    spec: GraphSpec, plan: GraphPlan, cluster: GraphCluster, congestion: bool = True
) -> tuple[DeviceTrace, ...]:
    """The simulated timeline of one request; for a throughput plan, of as many requests as fill the pipeline."""
    num_requests = requests_in_flight(plan.body.segments) if plan.body.objective == "throughput" else 1
    tasks = request_tasks(spec, plan.body.segments, cluster, cluster.rank_devices(plan), num_requests, plan.wire.values)
    timeline = simulate(tasks if congestion else _without_contention(tasks))
    if num_requests == 1:  # as in a measured timeline, there is no need to number them
        tasks = [task._replace(tile=None) for task in tasks]
    return simulated_traces(tasks, timeline, [device.name for device in plan.devices])


def num_stages(segments: Sequence[Segment]) -> int:
    """The number of segments on the longest chain: this many requests keep all devices of a pipeline busy."""
    producers = {name: index for index, segment in enumerate(segments) for name in segment.outputs}
    depth: list[int] = []
    for segment in segments:
        depth.append(1 + max((depth[producers[name]] for name in segment.inputs if name in producers), default=0))
    return max(depth)


def requests_in_flight(segments: Sequence[Segment]) -> int:
    """Concurrent requests that fill a pipeline, at most 256."""
    return min(_REQUESTS_PER_STAGE * num_stages(segments), _MAX_REQUESTS_IN_FLIGHT)


def peak_activation_bytes(spec: GraphSpec, operators: Sequence[int]) -> int:
    """The most bytes of activations that are alive at once while these operators run in order."""
    own = set(operators)
    alive = 0
    ends: dict[int, list[int]] = {}
    touched = {each.name: each for operator in own for each in (*spec.consumed[operator], *spec.produced[operator])}
    for tensor in touched.values():
        uses = [consumer for consumer in tensor.consumers if consumer in own]
        # Tensors that leave the segment stay alive until it ends.
        leaves = tensor.source in own and (tensor.is_output or len(uses) < len(tensor.consumers))
        last_use = max(own) if leaves or not uses else max(uses)
        ends.setdefault(last_use, []).append(tensor.num_bytes)
        if tensor.source not in own:
            alive += tensor.num_bytes
    peak = alive
    for operator in sorted(own):
        alive += sum(tensor.num_bytes for tensor in spec.produced[operator])
        peak = max(peak, alive)
        alive -= sum(ends.get(operator, ()))
    return peak
