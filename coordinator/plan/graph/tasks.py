"""The tasks of a request to a cut graph, for the simulator: segments, transfers between ranks, CPU time of transfers. Pure.

On live devices the graph's inputs also come over the network, from the coordinator, and its outputs go back to it; these
transfers occupy a device's link and cores like those of any tensor, and the coordinator's link, which passes one at a time.
The links of a coordinator on the machine of a device are that device's, which then has the values without any. Those of another
coordinator are not measured; they are assumed to be as fast as the device's fastest link to another device.

Tensors have the size of the wire format that the user chose. Savings by lz4 are not included: they depend on the values, which
are unknown when the plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.simulator import Resource, Task, compute_resources, transfer_resources, wire_resources
from hearth.plan.common import VALUE_FORMATS, ValueFormatName
from hearth.plan.graph import Segment
from hearth.plan.graph_spec import GraphSpec, Tensor
from hearth.plan.phases import Phase, Work

_FLOAT32_BYTES: Final = 4  # of a float32 value
# Copies of a tensor from or to the coordinator between daemon and worker: out of one process, into the other.
_PROCESS_COPIES = 2
# A factor on CPU time per byte. Profiles measure the wire over a loopback socket, where bytes pass in large pieces. Over a link
# they arrive in small pieces that each wake a thread: at 60 Mbit/s, socket threads took 3 to 4.6 times the CPU (measured).
SMALL_READS_FACTOR = 4.0
_INPUTS, _OUTPUTS = "inputs", "outputs"  # names of the transfers from and to the coordinator in a timeline


def num_converted(tensor: Tensor, values: ValueFormatName) -> int:
    """Number of values that are converted for the wire: all or none. Only float32 tensors are converted."""
    return 0 if values == "exact" or tensor.dtype != "float32" else tensor.num_bytes // _FLOAT32_BYTES


def wire_bytes(tensor: Tensor, values: ValueFormatName) -> int:
    """Bytes of a tensor on the wire, as `hearth.wire.codec.wire_layout` encodes it: bytes per value and per row."""
    count = num_converted(tensor, values)
    if not count:
        return tensor.num_bytes
    num_rows = count // tensor.shape[-1] if tensor.shape and tensor.shape[-1] else 1
    return VALUE_FORMATS[values].num_bytes(count, num_rows)


def with_wire_sizes(spec: GraphSpec, values: ValueFormatName) -> GraphSpec:
    """The graph with the size of every tensor as it is on the wire, for planners that weigh transfers."""
    if values == "exact":
        return spec
    tensors = (tensor._replace(num_bytes=wire_bytes(tensor, values)) for tensor in spec.tensors)
    return replace(spec, tensors=tuple(tensors))


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
    format of tensors. A task's `tile` is the number of its request. The coordinator has the rank after the last one.
    """
    writer = _Writer(spec, segments, cluster, rank_devices, values)
    for request in range(num_requests):
        writer.add_request(request)
    return writer.tasks


class _Writer:
    """Adds the tasks of requests to a list. A transfer takes CPU time of the sender, then its link, then CPU time again."""

    def __init__(
        self,
        spec: GraphSpec,
        segments: Sequence[Segment],
        cluster: GraphCluster,
        rank_devices: Sequence[int],
        values: ValueFormatName,
    ) -> None:
        self.tasks: list[Task] = []
        self._segments, self._cluster, self._rank_devices, self._values = segments, cluster, rank_devices, values
        self._transfers: list[list[TensorTransfer]] = [[] for _ in segments]
        for transfer in tensor_transfers(spec, segments, values):
            self._transfers[transfer.segment].append(transfer)
        self._inputs, self._outputs = ({tensor.name for tensor in tensors} for tensors in (spec.inputs, spec.outputs))
        self._input_bytes = input_bytes_by_rank(spec, segments, cluster)
        self._output_bytes = output_bytes_by_rank(spec, segments, cluster)
        self._compute_seconds = [segment_seconds(cluster, rank_devices[each.rank], each) for each in segments]

    def add_request(self, request: int) -> None:
        at: dict[tuple[str, int], int] = {}  # the task after which a tensor is on a rank
        for rank, num_bytes in self._input_bytes.items():
            received = self._add_coordinator_transfer(request, rank, num_bytes, None)
            at.update({(name, rank): received for name in self._inputs})
        output_tasks: dict[int, list[int]] = {}  # by rank, the tasks that produce outputs of the graph
        for index, segment in enumerate(self._segments):
            after = tuple(sorted({at[name, segment.rank] for name in segment.inputs if (name, segment.rank) in at}))
            seconds, resources = self._compute_seconds[index], compute_resources(segment.rank)
            computed = self._add(Task(Work.SEGMENT, index, request, None, resources, seconds, after))
            at.update({(name, segment.rank): computed for name in segment.outputs})
            if self._outputs.intersection(segment.outputs):
                output_tasks.setdefault(segment.rank, []).append(computed)
            for transfer in self._transfers[index]:
                at[transfer.tensor, transfer.target] = self._add_transfer(request, transfer, computed)
        for rank, num_bytes in self._output_bytes.items():
            self._add_coordinator_transfer(request, rank, num_bytes, tuple(output_tasks[rank]))

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _add_transfer(self, request: int, transfer: TensorTransfer, computed: int) -> int:
        """Add a tensor's transfer. Returns the task after which it is on the target."""
        name, index, sender, peer, num_bytes, _ = transfer
        source, target = self._rank_devices[sender], self._rank_devices[peer]
        sent, received = (
            endpoint_cpu_seconds(self._cluster, device, transfer, self._values) for device in (source, target)
        )
        seconds = num_bytes / self._cluster.bytes_per_second[source][target]
        latency = self._cluster.latency_seconds[source][target]
        sides = transfer_resources(sender, peer, self._cluster.media_crossed[source][target])
        after = self._add_cpu(request, sender, sent, (computed,), name)
        if self._cluster.measured:
            # Small pieces are handled while later ones are in transfer. Segments wait for that, the transfer does not.
            for rank, device, counted in ((sender, source, sent), (peer, target, received)):
                all_pieces = endpoint_cpu_seconds(self._cluster, device, transfer, self._values, SMALL_READS_FACTOR)
                self._add_cpu(request, rank, all_pieces - counted, after, name)
        wire = Task(Phase.TENSOR, index, request, peer, sides, seconds, after, latency, num_bytes, name)
        return self._add_cpu(request, peer, received, (self._add(wire),), name)[-1]

    def _add_coordinator_transfer(
        self, request: int, rank: int, num_bytes: int, computed: tuple[int, ...] | None
    ) -> int:
        """Add the transfer of a rank's outputs, after the tasks that produce them, or of its inputs (`computed` is None).

        Returns the last task.
        """
        device = self._rank_devices[rank]
        cpu_seconds = coordinator_cpu_seconds(self._cluster, device, num_bytes, reads_factor=1.0)
        seconds, latency, sides = self._coordinator_link(rank, num_bytes, to_device=computed is None)
        if computed is None:
            wire = self._add(Task(Phase.TENSOR, None, request, rank, sides, seconds, (), latency, num_bytes, _INPUTS))
            return self._add_cpu(request, rank, cpu_seconds, (wire,), _INPUTS)[-1]
        after = self._add_cpu(request, rank, cpu_seconds, computed, _OUTPUTS)
        return self._add(Task(Phase.TENSOR, None, request, None, sides, seconds, after, latency, num_bytes, _OUTPUTS))

    def _coordinator_link(
        self, rank: int, num_bytes: int, to_device: bool
    ) -> tuple[float, float, tuple[Resource, ...]]:
        """A rank's transfer with the coordinator: seconds on the link, the delay after that, and the sides that it occupies."""
        cluster, device, home = self._cluster, self._rank_devices[rank], self._cluster.coordinator_device
        if cluster.devices[device].with_coordinator:
            return 0.0, 0.0, ()
        if home is None:
            coordinator, crossed = len(self._rank_devices), cluster.media_crossed[device][device]
            seconds, latency = _coordinator_link_times(cluster, device, num_bytes)
        else:
            source, target = (home, device) if to_device else (device, home)
            coordinator = self._rank_devices.index(home) if home in self._rank_devices else len(self._rank_devices)
            crossed = cluster.media_crossed[source][target]
            seconds = num_bytes / cluster.bytes_per_second[source][target]
            latency = cluster.latency_seconds[source][target]
        ends = (coordinator, rank) if to_device else (rank, coordinator)
        return seconds, latency, transfer_resources(*ends, crossed)

    def _add_cpu(self, request: int, rank: int, seconds: float, after: tuple[int, ...], tensor: str) -> tuple[int, ...]:
        """Add the CPU time of one end of a transfer. Returns what the next task of this transfer comes after."""
        if not seconds:
            return after
        resources = wire_resources(rank, self._cluster.devices[self._rank_devices[rank]].wire.beside_compute)
        return (self._add(Task(Work.WIRE, None, request, None, resources, seconds, after, tensor=tensor)),)


def lone_transfer_seconds(cluster: GraphCluster, source: int, target: int, num_bytes: int) -> float:
    """Seconds of a transfer of exact values between two devices, from sending to arrival, if no other one contends."""
    cpu = sum(lone_cpu_seconds(cluster, device, num_bytes) for device in (source, target))
    return num_bytes / cluster.bytes_per_second[source][target] + cluster.latency_seconds[source][target] + cpu


def lone_cpu_seconds(cluster: GraphCluster, device: int, num_bytes: int) -> float:
    """CPU seconds of one end of such a transfer."""
    cost = cluster.devices[device].wire
    return num_bytes * cost.encrypted_seconds_per_byte + cost.seconds_per_message


def endpoint_cpu_seconds(
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


def input_bytes_by_rank(spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster) -> dict[int, int]:
    """By rank, the bytes of the graph's inputs that it receives; none on devices from a cluster file, as in the papers."""
    input_names: dict[int, set[str]] = {}
    for segment in segments if cluster.measured else ():
        input_names.setdefault(segment.rank, set()).update(segment.inputs)
    num_bytes_by_rank = {
        rank: sum(each.num_bytes for each in spec.inputs if each.name in names) for rank, names in input_names.items()
    }
    return {rank: num_bytes for rank, num_bytes in num_bytes_by_rank.items() if num_bytes}


def output_bytes_by_rank(spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster) -> dict[int, int]:
    """By rank, the bytes of the graph's outputs that it produces; none on devices from a cluster file."""
    num_bytes = {tensor.name: tensor.num_bytes for tensor in spec.outputs}
    num_bytes_by_rank: dict[int, int] = {}
    for segment in segments if cluster.measured else ():
        if own := [num_bytes[name] for name in segment.outputs if name in num_bytes]:
            num_bytes_by_rank[segment.rank] = num_bytes_by_rank.get(segment.rank, 0) + sum(own)
    return num_bytes_by_rank


def coordinator_cpu_seconds(
    cluster: GraphCluster, member: int, num_bytes: int, reads_factor: float = SMALL_READS_FACTOR
) -> float:
    """CPU seconds that a device takes to receive values from the coordinator, or to send values to it."""
    cost = cluster.devices[member].wire
    per_byte = reads_factor * cost.encrypted_seconds_per_byte + _PROCESS_COPIES * cost.plain_seconds_per_byte
    return num_bytes * per_byte + (1 + _PROCESS_COPIES) * cost.seconds_per_message


def _coordinator_link_times(cluster: GraphCluster, member: int, num_bytes: int) -> tuple[float, float]:
    """Seconds that a transfer occupies the link between a device and a coordinator elsewhere, and the delay until arrival.

    The former is 0 for a device without links.
    """
    rates = [*cluster.bytes_per_second[member], *(row[member] for row in cluster.bytes_per_second)]
    rate = max((rate for rate in rates if not math.isinf(rate)), default=math.inf)
    latencies = [seconds for other, seconds in enumerate(cluster.latency_seconds[member]) if other != member]
    return num_bytes / rate, min(latencies, default=0.0)
