"""Every byte that a device will hold under a cut graph. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.graphs.cluster import GraphCluster
from coordinator.graphs.pricing import in_flight, peak_bytes
from hearth.graph.plan import Segment
from hearth.graph.spec import GraphSpec
from hearth.plan import MemoryUse

CHUNK_BYTES = 8 << 20  # the largest piece of a segment that lies beside it while it is loaded


def memory_use(
    spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster, members: Sequence[int]
) -> tuple[MemoryUse, ...]:
    """By rank; `members[r]` is the index in the cluster of rank r's device.

    Weights count once for each segment that uses them: each is a session of its own. Activations are what running took
    on the device when it was profiled, as much of it as the largest segment has tensors alive at once; and what comes
    and goes for each request in flight. On devices out of a file weights alone count, as in the papers.
    """
    whole = max(peak_bytes(spec, range(spec.num_operators)), 1)
    sizes = {tensor.name: tensor.num_bytes for tensor in spec.tensors}
    requests = in_flight(segments)
    found = []
    for rank, member in enumerate(members):
        own = [segment for segment in segments if segment.rank == rank]
        weights = sum(spec.parameter_bytes(segment.operators) for segment in own)
        if not cluster.measured:
            found.append(MemoryUse(weights=weights, embeddings=0, activations=0, workspace=0))
            continue
        device = cluster.devices[member]
        share = min(max((peak_bytes(spec, segment.operators) for segment in own), default=0) / whole, 1.0)
        passing = sum(sizes[name] for segment in own for name in (*segment.inputs, *segment.outputs))
        found.append(
            MemoryUse(
                weights=weights,
                embeddings=0,
                activations=int(device.run_bytes * share) + requests * passing,
                workspace=device.process_bytes + CHUNK_BYTES,
            )
        )
    return tuple(found)


def reserved_bytes(spec: GraphSpec, cluster: GraphCluster) -> tuple[int, ...]:
    """By device, a first guess at what is no room for weights, before it is known what runs there."""
    if not cluster.measured:
        return (0,) * len(cluster.devices)
    return tuple(device.process_bytes + device.run_bytes + CHUNK_BYTES for device in cluster.devices)
