"""Predicted times of a cut graph: its segments and their transfers as tasks of the simulator. Pure.

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
from hearth.plan.value_formats import Values
from hearth.wire.messages import DeviceTrace

# Copies of a tensor from or to the coordinator between daemon and worker: out of one process, into the other.
_HANDED_OVER = 2
# A factor on CPU time per byte. Profiles measure the wire over a loopback socket, where bytes pass in large pieces. Over a link
# they arrive in small pieces that each wake a thread: at 60 Mbit/s, socket threads took 3 to 4.6 times the CPU (measured).
_SMALL_PIECES = 4.0
# CPU time of a request on every rank, besides its tensors, in units of one message: the coordinator's call, passed by the
# daemon to the worker, decoded and answered. Measured: 2.6 ms of a core where a message takes 0.07 ms.
_REQUEST_MESSAGES = 36
_INPUTS, _OUTPUTS = "inputs", "outputs"  # names of the transfers from and to the coordinator in a timeline


class Price(NamedTuple):
    """Predicted seconds: `latency_seconds` of a single request, `bottleneck_seconds` per request of a full pipeline.

    `busy_seconds` is compute time by rank. `bottleneck` is the busiest resource; without congestion it may also be a
    channel between two devices, given by its two ends.
    """

    latency_seconds: float
    bottleneck_seconds: float
    bottleneck: tuple[Resource, ...]
    busy_seconds: tuple[float, ...]
    transfer_seconds: float  # of the busiest side of a link


class Transfer(NamedTuple):
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
    return sum(cluster.seconds[operator][device] for operator in segment.operators)


def transfers_of(spec: GraphSpec, segments: Sequence[Segment], values: Values = "exact") -> list[Transfer]:
    """All transfers between ranks, in the order of the segments that produce them."""
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    takers: dict[str, set[int]] = {}
    for segment in segments:
        for name in segment.inputs:
            takers.setdefault(name, set()).add(segment.rank)
    return [
        Transfer(
            name, index, segment.rank, rank, wire_bytes(tensors[name], values), num_converted(tensors[name], values)
        )
        for index, segment in enumerate(segments)
        for name in segment.outputs
        for rank in sorted(takers.get(name, set()) - {segment.rank})
    ]


def tasks_of(
    spec: GraphSpec,
    segments: Sequence[Segment],
    cluster: GraphCluster,
    members: Sequence[int],
    num_requests: int = 1,
    values: Values = "exact",
) -> list[Task]:
    """The tasks of requests that all arrive at once; `members[r]` is the index in the cluster of rank r's device.

    On devices from a cluster file, the graph's inputs are assumed to be on the devices that use them. `values` is the wire
    format of tensors. A task's `tile` is the number of its request.
    """
    fed, given = _fed_bytes(spec, segments, cluster), _given_bytes(spec, segments, cluster)
    inputs, outputs = ({tensor.name for tensor in tensors} for tensors in (spec.inputs, spec.outputs))
    of_segment: list[list[Transfer]] = [[] for _ in segments]
    for transfer in transfers_of(spec, segments, values):
        of_segment[transfer.segment].append(transfer)
    tasks: list[Task] = []
    for request in range(num_requests):
        at: dict[tuple[str, int], int] = {}  # the task after which a tensor is on a rank
        for rank, num_bytes in fed.items():
            at.update({(name, rank): len(tasks) for name in inputs})
            seconds, delay = _home_times(cluster, members[rank], num_bytes)
            sides = receive_resources(rank)
            tasks.append(Task(Phase.TENSOR, None, request, rank, sides, seconds, (), delay, num_bytes, _INPUTS))
        makers: dict[int, list[int]] = {}  # by rank, the tasks that produce outputs of the graph
        for index, segment in enumerate(segments):
            after = tuple(sorted({at[name, segment.rank] for name in segment.inputs if (name, segment.rank) in at}))
            seconds = segment_seconds(cluster, members[segment.rank], segment)
            made = len(tasks)
            tasks.append(Task(Work.SEGMENT, index, request, None, compute_resources(segment.rank), seconds, after))
            at.update({(name, segment.rank): made for name in segment.outputs})
            if outputs.intersection(segment.outputs):
                makers.setdefault(segment.rank, []).append(made)
            for transfer in of_segment[index]:
                name, _, sender, peer, num_bytes, _ = transfer
                source, target = members[sender], members[peer]
                at[name, peer] = len(tasks)
                seconds = num_bytes / cluster.bytes_per_second[source][target]
                ends = sum(_end_seconds(cluster, device, transfer, values) for device in (source, target))
                delay = cluster.latency_seconds[source][target] + ends
                sides = transfer_resources(sender, peer)
                tasks.append(Task(Phase.TENSOR, index, request, peer, sides, seconds, (made,), delay, num_bytes, name))
        for rank, num_bytes in given.items():
            seconds, delay = _home_times(cluster, members[rank], num_bytes)
            sides, after = send_resources(rank), tuple(makers[rank])
            tasks.append(Task(Phase.TENSOR, None, request, None, sides, seconds, after, delay, num_bytes, _OUTPUTS))
    return tasks


def price(
    spec: GraphSpec,
    segments: Sequence[Segment],
    cluster: GraphCluster,
    members: Sequence[int],
    congestion: bool = True,
    values: Values = "exact",
) -> Price:
    """Simulate one request. A full pipeline's bottleneck is the device or side of a link that one request occupies longest."""
    tasks = tasks_of(spec, segments, cluster, members, values=values)
    timeline = simulate(tasks if congestion else _uncontended(tasks))
    busy: dict[tuple[Resource, ...], float] = {(resource,): seconds for resource, seconds in timeline.busy.items()}
    transfers = transfers_of(spec, segments, values)
    if not congestion:  # the ends of links are not shared, but each channel still is
        for transfer in transfers:
            channel = transfer_resources(transfer.source, transfer.target)
            rate = cluster.bytes_per_second[members[transfer.source]][members[transfer.target]]
            busy[channel] = busy.get(channel, 0.0) + transfer.num_bytes / rate
    pieces = _SMALL_PIECES if cluster.measured else 1.0
    for transfer in transfers:  # encryption, TCP and conversions take cores from the segments
        for rank in (transfer.source, transfer.target):
            busy[compute_resources(rank)] += _end_seconds(cluster, members[rank], transfer, values, pieces)
    for each in (_fed_bytes(spec, segments, cluster), _given_bytes(spec, segments, cluster)):
        for rank, num_bytes in each.items():
            busy[compute_resources(rank)] += home_seconds(cluster, members[rank], num_bytes)
    for rank, member in enumerate(members) if cluster.measured else ():
        busy[compute_resources(rank)] += _REQUEST_MESSAGES * cluster.devices[member].wire.seconds_per_message
    bottleneck = max(busy, key=lambda resources: busy[resources])
    return Price(
        latency_seconds=timeline.makespan,
        bottleneck_seconds=busy[bottleneck],
        bottleneck=bottleneck,
        busy_seconds=tuple(busy.get(compute_resources(rank), 0.0) for rank in range(len(members))),
        transfer_seconds=max((busy[key] for key in busy if key[0].kind is not ResourceKind.COMPUTE), default=0.0),
    )


def price_of(request: GraphRequest, plan: GraphPlan) -> Price:
    """The price of a plan on the request's cluster, which must have all of its devices."""
    members = request.cluster.members(plan)
    return price(request.spec, plan.body.segments, request.cluster, members, request.congestion, plan.wire.values)


def seconds_now(request: GraphRequest, plan: GraphPlan) -> float:
    """Seconds of a plan on the request's cluster, which must have all of its devices; comparable with `seconds_of`."""
    priced = price_of(request, plan)
    return priced.latency_seconds if plan.body.objective == "latency" else priced.bottleneck_seconds


def _uncontended(tasks: Sequence[Task]) -> list[Task]:
    """The same tasks, with transfers that occupy no resource."""
    return [each._replace(resources=()) if each.tensor else each for each in tasks]


def predicted_timeline(
    spec: GraphSpec, plan: GraphPlan, cluster: GraphCluster, congestion: bool = True
) -> tuple[DeviceTrace, ...]:
    """The simulated timeline of one request; for a throughput plan, of as many requests as fill the pipeline."""
    num_requests = in_flight(plan.body.segments) if plan.body.objective == "throughput" else 1
    tasks = tasks_of(spec, plan.body.segments, cluster, cluster.members(plan), num_requests, plan.wire.values)
    timeline = simulate(tasks if congestion else _uncontended(tasks))
    if num_requests == 1:  # as in a measured timeline, there is no need to number them
        tasks = [task._replace(tile=None) for task in tasks]
    return simulated_traces(tasks, timeline, [device.name for device in plan.devices])


def num_stages(segments: Sequence[Segment]) -> int:
    """The number of segments on the longest chain: this many requests keep all devices of a pipeline busy."""
    made_by = {name: index for index, segment in enumerate(segments) for name in segment.outputs}
    depth: list[int] = []
    for segment in segments:
        depth.append(1 + max((depth[made_by[name]] for name in segment.inputs if name in made_by), default=0))
    return max(depth)


def in_flight(segments: Sequence[Segment]) -> int:
    """Concurrent requests that fill a pipeline: per stage one that is computed, one in transfer, and one that waits.

    The waiting requests keep the others busy when a stage is late. At most 256.
    """
    return min(3 * num_stages(segments), 256)


def peak_bytes(spec: GraphSpec, operators: Sequence[int]) -> int:
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


def _end_seconds(cluster: GraphCluster, device: int, transfer: Transfer, values: Values, pieces: float = 1.0) -> float:
    """CPU seconds of one end of a transfer. `pieces` is the factor for bytes that arrive in small pieces.

    A single request waits for less than that (`pieces` 1): most pieces are handled while later ones are in transfer.
    """
    cost = cluster.devices[device].wire
    converting = cost.convert_seconds_per_value.get(values, 0.0) / 2 if transfer.num_converted else 0.0
    return (
        transfer.num_bytes * cost.encrypted_seconds_per_byte * pieces
        + cost.seconds_per_message
        + transfer.num_converted * converting
    )


# ---- the coordinator's end --------------------------------------------------------------------------------------------


def _fed_bytes(spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster) -> dict[int, int]:
    """By rank, the bytes of the graph's inputs that it receives; none on devices from a cluster file, as in the papers."""
    taken: dict[int, set[str]] = {}
    for segment in segments if cluster.measured else ():
        taken.setdefault(segment.rank, set()).update(segment.inputs)
    found = {rank: sum(each.num_bytes for each in spec.inputs if each.name in names) for rank, names in taken.items()}
    return {rank: num_bytes for rank, num_bytes in found.items() if num_bytes}


def _given_bytes(spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster) -> dict[int, int]:
    """By rank, the bytes of the graph's outputs that it produces; none on devices from a cluster file."""
    num_bytes = {tensor.name: tensor.num_bytes for tensor in spec.outputs}
    found: dict[int, int] = {}
    for segment in segments if cluster.measured else ():
        if own := [num_bytes[name] for name in segment.outputs if name in num_bytes]:
            found[segment.rank] = found.get(segment.rank, 0) + sum(own)
    return found


def home_seconds(cluster: GraphCluster, member: int, num_bytes: int, pieces: float = _SMALL_PIECES) -> float:
    """CPU seconds that a device takes to receive values from the coordinator, or to send values to it."""
    cost = cluster.devices[member].wire
    per_byte = pieces * cost.encrypted_seconds_per_byte + _HANDED_OVER * cost.plain_seconds_per_byte
    return num_bytes * per_byte + (1 + _HANDED_OVER) * cost.seconds_per_message


def _home_times(cluster: GraphCluster, member: int, num_bytes: int) -> tuple[float, float]:
    """Seconds that a transfer occupies the link between a device and the coordinator, and the delay until arrival after that.

    The former is 0 for a device without links.
    """
    rates = [*cluster.bytes_per_second[member], *(row[member] for row in cluster.bytes_per_second)]
    rate = max((rate for rate in rates if not math.isinf(rate)), default=math.inf)
    latencies = [seconds for other, seconds in enumerate(cluster.latency_seconds[member]) if other != member]
    return num_bytes / rate, min(latencies, default=0.0) + home_seconds(cluster, member, num_bytes, pieces=1.0)
