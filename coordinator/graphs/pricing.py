"""What a cut graph takes: its segments and their transfers as tasks of the one simulator. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.graphs.cluster import GraphCluster
from coordinator.simulator import Task, Timeline, simulate
from hearth.graph.plan import Segment
from hearth.graph.spec import GraphSpec


class Price(NamedTuple):
    """Of one request alone, and per request of a full pipeline. `busy_seconds` by rank.

    `bottleneck` says what is busiest: `compute:1`, `send:0` or `receive:2`, by rank.
    """

    latency_seconds: float
    bottleneck_seconds: float
    bottleneck: str
    busy_seconds: tuple[float, ...]


class Transfer(NamedTuple):
    """A tensor goes once to each rank that has a segment that takes it. `segment` is the one that makes it."""

    tensor: str
    segment: int
    source: int
    target: int
    num_bytes: int


def segment_seconds(cluster: GraphCluster, device: int, segment: Segment) -> float:
    return sum(cluster.seconds[operator][device] for operator in segment.operators)


def transfers_of(spec: GraphSpec, segments: Sequence[Segment]) -> list[Transfer]:
    """Between ranks, in the order of the segments that make them."""
    num_bytes = {tensor.name: tensor.num_bytes for tensor in spec.tensors}
    takers: dict[str, set[int]] = {}
    for segment in segments:
        for name in segment.inputs:
            takers.setdefault(name, set()).add(segment.rank)
    return [
        Transfer(name, index, segment.rank, rank, num_bytes[name])
        for index, segment in enumerate(segments)
        for name in segment.outputs
        for rank in sorted(takers.get(name, set()) - {segment.rank})
    ]


def tasks_of(
    spec: GraphSpec,
    segments: Sequence[Segment],
    cluster: GraphCluster,
    members: Sequence[int],
    congestion: bool = True,
    num_requests: int = 1,
) -> list[Task]:
    """Requests that all come at once; `members[r]` is the index in the cluster of rank r's device.

    Inputs of the graph lie where they are used. Without `congestion`, transfers keep nobody busy.
    """
    transfers = transfers_of(spec, segments)
    of_segment: list[list[Transfer]] = [[] for _ in segments]
    for transfer in transfers:
        of_segment[transfer.segment].append(transfer)
    tasks: list[Task] = []
    for request in range(num_requests):
        mark = f"{request}:" if num_requests > 1 else ""
        at: dict[tuple[str, int], int] = {}  # the task after which a tensor is on a rank
        for index, segment in enumerate(segments):
            after = tuple(sorted({at[name, segment.rank] for name in segment.inputs if (name, segment.rank) in at}))
            seconds = segment_seconds(cluster, members[segment.rank], segment)
            made = len(tasks)
            tasks.append(Task(f"{mark}segment {index}", (f"compute:{segment.rank}",), seconds, after))
            at.update({(name, segment.rank): made for name in segment.outputs})
            for transfer in of_segment[index]:
                source, target = members[transfer.source], members[transfer.target]
                sides = (f"send:{transfer.source}", f"receive:{transfer.target}") if congestion else ()
                at[transfer.tensor, transfer.target] = len(tasks)
                tasks.append(
                    Task(
                        f"{mark}{transfer.tensor}",
                        sides,
                        transfer.num_bytes / cluster.bytes_per_second[source][target],
                        (made,),
                        cluster.latency_seconds[source][target] + _wire_seconds(cluster, transfer, source, target),
                        transfer.num_bytes,
                    )
                )
    return tasks


def price(
    spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster, members: Sequence[int], congestion: bool = True
) -> Price:
    """Simulate one request. The bottleneck of a full pipeline is the device or side of a link that one keeps longest."""
    tasks = tasks_of(spec, segments, cluster, members, congestion)
    timeline = simulate(tasks)
    busy = dict(timeline.busy)
    if not congestion:  # then a link's ends are not shared, but each channel still is
        for transfer in transfers_of(spec, segments):
            channel = f"send:{transfer.source} to receive:{transfer.target}"
            rate = cluster.bytes_per_second[members[transfer.source]][members[transfer.target]]
            busy[channel] = busy.get(channel, 0.0) + transfer.num_bytes / rate
    for transfer in transfers_of(spec, segments):  # encryption and TCP take cores from the segments
        for rank in (transfer.source, transfer.target):
            busy[f"compute:{rank}"] += _end_seconds(cluster, members[rank], transfer.num_bytes)
    bottleneck = max(busy, key=lambda resource: busy[resource])
    return Price(
        latency_seconds=timeline.makespan,
        bottleneck_seconds=busy[bottleneck],
        bottleneck=bottleneck,
        busy_seconds=tuple(busy.get(f"compute:{rank}", 0.0) for rank in range(len(members))),
    )


def timeline_of(
    spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster, members: Sequence[int], num_requests: int
) -> tuple[list[Task], Timeline]:
    tasks = tasks_of(spec, segments, cluster, members, num_requests=num_requests)
    return tasks, simulate(tasks)


def num_stages(segments: Sequence[Segment]) -> int:
    """Segments on the longest chain of them: so many requests keep all devices of a pipeline at work."""
    made_by = {name: index for index, segment in enumerate(segments) for name in segment.outputs}
    depth: list[int] = []
    for segment in segments:
        depth.append(1 + max((depth[made_by[name]] for name in segment.inputs if name in made_by), default=0))
    return max(depth)


def in_flight(segments: Sequence[Segment]) -> int:
    """Requests at once that fill a pipeline: while one is computed in each stage, another travels to each."""
    return min(2 * num_stages(segments), 256)


def peak_bytes(spec: GraphSpec, operators: Sequence[int]) -> int:
    """The most bytes of activations that are alive at once while these operators run in order."""
    own = set(operators)
    last_use: dict[int, int] = {}
    peak = alive = 0
    ends: dict[int, list[int]] = {}
    for index, tensor in enumerate(spec.tensors):
        uses = [consumer for consumer in tensor.consumers if consumer in own]
        if tensor.source in own or uses:
            # What leaves the segment stays until it ends.
            leaves = tensor.source in own and (tensor.is_output or len(uses) < len(tensor.consumers))
            last_use[index] = max(own) if leaves or not uses else max(uses)
            ends.setdefault(last_use[index], []).append(tensor.num_bytes)
            if tensor.source not in own:
                alive += tensor.num_bytes
    peak = alive
    for operator in sorted(own):
        alive += sum(tensor.num_bytes for tensor in spec.produced[operator])
        peak = max(peak, alive)
        alive -= sum(ends.get(operator, ()))
    return peak


def _wire_seconds(cluster: GraphCluster, transfer: Transfer, source: int, target: int) -> float:
    return sum(_end_seconds(cluster, device, transfer.num_bytes) for device in (source, target))


def _end_seconds(cluster: GraphCluster, device: int, num_bytes: int) -> float:
    """Compute time that one end of a transfer takes from its device."""
    cost = cluster.devices[device].wire
    return num_bytes * cost.encrypted_seconds_per_byte + cost.seconds_per_message
