"""Predicted times of a cut graph (the cost model of graphs): its segments and their transfers as tasks of the simulator. Pure.

On live devices the graph's inputs also come over the network, from the coordinator, and its outputs go back to it; these
transfers occupy a device's link and cores like those of any tensor. The coordinator's own link is not measured; it is assumed
to be as fast as the device's fastest link to another device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.graph.wire import num_converted, wire_bytes
from coordinator.plan.simulator import (
    Resource,
    ResourceKind,
    Task,
    compute_resources,
    receive_resources,
    send_resources,
    simulate,
    transfer_resources,
)
from coordinator.plan.timeline import simulated_traces
from hearth.plan.graph import Segment
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import GraphPlan
from hearth.plan.value_formats import ValueFormatName
from hearth.wire.messages import DeviceTrace

# Copies of a tensor from or to the coordinator between daemon and worker: out of one process, into the other.
_PROCESS_COPIES = 2
# A factor on CPU time per byte. Profiles measure the wire over a loopback socket, where bytes pass in large pieces. Over a link
# they arrive in small pieces that each wake a thread: at 60 Mbit/s, socket threads took 3 to 4.6 times the CPU (measured).
_SMALL_READS_FACTOR = 4.0
# CPU time of a request on every rank, besides its tensors, in units of one message: the coordinator's call, passed by the
# daemon to the worker, decoded and answered. Measured: 2.6 ms of a core where a message takes 0.07 ms.
_MESSAGES_PER_REQUEST = 36
# Concurrent requests per stage of a full pipeline: one that is computed, one in transfer, and one that waits, so that the other
# stages stay busy when one is late.
_REQUESTS_PER_STAGE = 3
_MAX_REQUESTS_IN_FLIGHT = 256  # each takes memory for its tensors; more would only wait in queues
_INPUTS, _OUTPUTS = "inputs", "outputs"  # names of the transfers from and to the coordinator in a timeline


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


class TensorTransfer(NamedTuple):
    """A tensor sent to another rank: once to each rank that has a consumer. `segment` is the one that produces it.

    `num_bytes` is its size on the wire; `num_converted` is the number of values that are converted to the wire format and
    back.
    """

    tensor: str
    segment: int
    source: int
    target: int
    num_bytes: int
    num_converted: int = 0


def segment_seconds(cluster: GraphCluster, device: int, segment: Segment) -> float:
    """Compute seconds of a segment on a device, given as its index in the cluster."""
    return sum(cluster.seconds[operator][device] for operator in segment.operators)


def tensor_transfers(
    spec: GraphSpec, segments: Sequence[Segment], values: ValueFormatName = "exact"
) -> list[TensorTransfer]:
    """All transfers between ranks, in the order of the segments that produce them."""
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    consumer_ranks: dict[str, set[int]] = {}
    for segment in segments:
        for name in segment.inputs:
            consumer_ranks.setdefault(name, set()).add(segment.rank)
    return [
        TensorTransfer(
            name, index, segment.rank, rank, wire_bytes(tensors[name], values), num_converted(tensors[name], values)
        )
        for index, segment in enumerate(segments)
        for name in segment.outputs
        for rank in sorted(consumer_ranks.get(name, set()) - {segment.rank})
    ]


def request_tasks(
    spec: GraphSpec,
    segments: Sequence[Segment],
    cluster: GraphCluster,
    rank_devices: Sequence[int],
    num_requests: int = 1,
    values: ValueFormatName = "exact",
) -> list[Task]:
    """The tasks of requests that all arrive at once; `rank_devices[r]` is the index in the cluster of rank r's device.

    On devices from a cluster file, the graph's inputs are assumed to be on the devices that use them. `values` is the wire
    format of tensors. A task's `tile` is the number of its request.
    """
    input_bytes = _input_bytes_by_rank(spec, segments, cluster)
    output_bytes = _output_bytes_by_rank(spec, segments, cluster)
    inputs, outputs = ({tensor.name for tensor in tensors} for tensors in (spec.inputs, spec.outputs))
    of_segment: list[list[TensorTransfer]] = [[] for _ in segments]
    for transfer in tensor_transfers(spec, segments, values):
        of_segment[transfer.segment].append(transfer)
    tasks: list[Task] = []
    for request in range(num_requests):
        at: dict[tuple[str, int], int] = {}  # the task after which a tensor is on a rank
        for rank, num_bytes in input_bytes.items():
            at.update({(name, rank): len(tasks) for name in inputs})
            seconds, delay = _coordinator_transfer_times(cluster, rank_devices[rank], num_bytes)
            sides = receive_resources(rank)
            tasks.append(Task(Phase.TENSOR, None, request, rank, sides, seconds, (), delay, num_bytes, _INPUTS))
        output_tasks: dict[int, list[int]] = {}  # by rank, the tasks that produce outputs of the graph
        for index, segment in enumerate(segments):
            after = tuple(sorted({at[name, segment.rank] for name in segment.inputs if (name, segment.rank) in at}))
            seconds = segment_seconds(cluster, rank_devices[segment.rank], segment)
            task_index = len(tasks)
            tasks.append(Task(Work.SEGMENT, index, request, None, compute_resources(segment.rank), seconds, after))
            at.update({(name, segment.rank): task_index for name in segment.outputs})
            if outputs.intersection(segment.outputs):
                output_tasks.setdefault(segment.rank, []).append(task_index)
            for transfer in of_segment[index]:
                name, _, sender, peer, num_bytes, _ = transfer
                source, target = rank_devices[sender], rank_devices[peer]
                at[name, peer] = len(tasks)
                seconds = num_bytes / cluster.bytes_per_second[source][target]
                ends = sum(_endpoint_cpu_seconds(cluster, device, transfer, values) for device in (source, target))
                delay = cluster.latency_seconds[source][target] + ends
                sides = transfer_resources(sender, peer)
                tasks.append(
                    Task(Phase.TENSOR, index, request, peer, sides, seconds, (task_index,), delay, num_bytes, name)
                )
        for rank, num_bytes in output_bytes.items():
            seconds, delay = _coordinator_transfer_times(cluster, rank_devices[rank], num_bytes)
            sides, after = send_resources(rank), tuple(output_tasks[rank])
            tasks.append(Task(Phase.TENSOR, None, request, None, sides, seconds, after, delay, num_bytes, _OUTPUTS))
    return tasks


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
    busy: dict[tuple[Resource, ...], float] = {
        (resource,): seconds for resource, seconds in timeline.busy_seconds.items()
    }
    transfers = tensor_transfers(spec, segments, values)
    if not congestion:  # the ends of links are not shared, but each channel still is
        for transfer in transfers:
            channel = transfer_resources(transfer.source, transfer.target)
            rate = cluster.bytes_per_second[rank_devices[transfer.source]][rank_devices[transfer.target]]
            busy[channel] = busy.get(channel, 0.0) + transfer.num_bytes / rate
    reads_factor = _SMALL_READS_FACTOR if cluster.measured else 1.0
    for transfer in transfers:  # encryption, TCP and conversions take cores from the segments
        for rank in (transfer.source, transfer.target):
            busy[compute_resources(rank)] += _endpoint_cpu_seconds(
                cluster, rank_devices[rank], transfer, values, reads_factor
            )
    for each in (_input_bytes_by_rank(spec, segments, cluster), _output_bytes_by_rank(spec, segments, cluster)):
        for rank, num_bytes in each.items():
            busy[compute_resources(rank)] += coordinator_cpu_seconds(cluster, rank_devices[rank], num_bytes)
    for rank, member in enumerate(rank_devices) if cluster.measured else ():
        busy[compute_resources(rank)] += _MESSAGES_PER_REQUEST * cluster.devices[member].wire.seconds_per_message
    bottleneck = max(busy, key=lambda resources: busy[resources])
    return GraphPrediction(
        latency_seconds=timeline.makespan,
        bottleneck_seconds=busy[bottleneck],
        bottleneck=bottleneck,
        busy_seconds=tuple(busy.get(compute_resources(rank), 0.0) for rank in range(len(rank_devices))),
        transfer_seconds=max((busy[key] for key in busy if key[0].kind is not ResourceKind.COMPUTE), default=0.0),
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
    return [each._replace(resources=()) if each.tensor else each for each in tasks]


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
    for tensor in spec.tensors:
        uses = [consumer for consumer in tensor.consumers if consumer in own]
        if tensor.source in own or uses:
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


def lone_transfer_seconds(cluster: GraphCluster, source: int, target: int, num_bytes: int) -> float:
    """Seconds of a transfer of exact values between two devices, from sending to arrival, if no other one contends."""
    ends = (cluster.devices[device].wire for device in (source, target))
    cpu = sum(num_bytes * cost.encrypted_seconds_per_byte + cost.seconds_per_message for cost in ends)
    return num_bytes / cluster.bytes_per_second[source][target] + cluster.latency_seconds[source][target] + cpu


def _endpoint_cpu_seconds(
    cluster: GraphCluster, device: int, transfer: TensorTransfer, values: ValueFormatName, reads_factor: float = 1.0
) -> float:
    """CPU seconds of one end of a transfer. `reads_factor` is the factor for bytes that arrive in small pieces.

    A single request waits for less than that (`reads_factor` 1): most pieces are handled while later ones are in transfer.
    """
    cost = cluster.devices[device].wire
    converting = cost.convert_seconds_per_value.get(values, 0.0) / 2 if transfer.num_converted else 0.0
    return (
        transfer.num_bytes * cost.encrypted_seconds_per_byte * reads_factor
        + cost.seconds_per_message
        + transfer.num_converted * converting
    )


# ---- the coordinator's end --------------------------------------------------------------------------------------------


def _input_bytes_by_rank(spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster) -> dict[int, int]:
    """By rank, the bytes of the graph's inputs that it receives; none on devices from a cluster file, as in the papers."""
    input_names: dict[int, set[str]] = {}
    for segment in segments if cluster.measured else ():
        input_names.setdefault(segment.rank, set()).update(segment.inputs)
    num_bytes_by_rank = {
        rank: sum(each.num_bytes for each in spec.inputs if each.name in names) for rank, names in input_names.items()
    }
    return {rank: num_bytes for rank, num_bytes in num_bytes_by_rank.items() if num_bytes}


def _output_bytes_by_rank(spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster) -> dict[int, int]:
    """By rank, the bytes of the graph's outputs that it produces; none on devices from a cluster file."""
    num_bytes = {tensor.name: tensor.num_bytes for tensor in spec.outputs}
    num_bytes_by_rank: dict[int, int] = {}
    for segment in segments if cluster.measured else ():
        if own := [num_bytes[name] for name in segment.outputs if name in num_bytes]:
            num_bytes_by_rank[segment.rank] = num_bytes_by_rank.get(segment.rank, 0) + sum(own)
    return num_bytes_by_rank


def coordinator_cpu_seconds(
    cluster: GraphCluster, member: int, num_bytes: int, reads_factor: float = _SMALL_READS_FACTOR
) -> float:
    """CPU seconds that a device takes to receive values from the coordinator, or to send values to it."""
    cost = cluster.devices[member].wire
    per_byte = reads_factor * cost.encrypted_seconds_per_byte + _PROCESS_COPIES * cost.plain_seconds_per_byte
    return num_bytes * per_byte + (1 + _PROCESS_COPIES) * cost.seconds_per_message


def _coordinator_transfer_times(cluster: GraphCluster, member: int, num_bytes: int) -> tuple[float, float]:
    """Seconds that a transfer occupies the link between a device and the coordinator, and the delay until arrival after that.

    The former is 0 for a device without links.
    """
    rates = [*cluster.bytes_per_second[member], *(row[member] for row in cluster.bytes_per_second)]
    rate = max((rate for rate in rates if not math.isinf(rate)), default=math.inf)
    latencies = [seconds for other, seconds in enumerate(cluster.latency_seconds[member]) if other != member]
    return num_bytes / rate, min(latencies, default=0.0) + coordinator_cpu_seconds(
        cluster, member, num_bytes, reads_factor=1.0
    )
