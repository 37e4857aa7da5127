"""Memory of each device under a cut graph, in bytes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.predict import peak_activation_bytes, requests_in_flight
from coordinator.plan.graph.tasks import tensor_transfers
from hearth.plan.common import MemoryUse
from hearth.plan.graph import Segment, weights_stay_in_place
from hearth.plan.graph_spec import GraphSpec

# Largest chunk of a segment, held in memory on top of it while it is loaded: well below the largest message, and large enough
# that the cost per chunk does not matter.
MAX_GRAPH_CHUNK_BYTES = 8 << 20
# Operators whose kernels can read weights where they are mapped, as they are in the file, if more slowly.
_CAN_USE_IN_PLACE = frozenset({"MatMul", "Gemm"})


def memory_by_rank(
    spec: GraphSpec, segments: Sequence[Segment], cluster: GraphCluster, rank_devices: Sequence[int]
) -> tuple[MemoryUse, ...]:
    """Memory of each rank; `rank_devices[r]` is the index in the cluster of rank r's device.

    - Weights count once per operator that uses them, since each kernel packs its own copy; they are scaled by what the
      whole graph took on the device when it was profiled. Where the device has no room for that, products of matrices use
      their weights in place, and each of these counts once.
    - Activations are the memory that running took in the profile, scaled to the peak of live tensors in the rank's
      largest segment, plus inputs and outputs of every request in flight. What is sent counts twice: encryption copies it.
    - Temporary memory of loading is scaled to the largest segment.

    On devices from a cluster file only weights count, once per device, as in the papers.
    """
    whole = max(peak_activation_bytes(spec, range(spec.num_operators)), 1)
    graph_bytes = spec.parameter_bytes(range(spec.num_operators))
    graph_copies = _copied_bytes(spec, range(spec.num_operators))
    sizes = {tensor.name: tensor.num_bytes for tensor in spec.tensors}
    requests = requests_in_flight(segments)
    transfers = tensor_transfers(spec, segments)
    uses = []
    for rank, member in enumerate(rank_devices):
        own = [segment for segment in segments if segment.rank == rank]
        per_segment = [spec.parameter_bytes(segment.operators) for segment in own]
        operators = [operator for segment in own for operator in segment.operators]
        if not cluster.measured:
            weights = spec.parameter_bytes(operators)
            uses.append(MemoryUse(weights=weights, embeddings=0, activations=0, workspace=0))
            continue
        device = cluster.devices[member]
        share = min(max((peak_activation_bytes(spec, segment.operators) for segment in own), default=0) / whole, 1.0)
        factor = max(device.load_bytes / graph_copies, 1.0) if graph_copies else 1.0
        loading = device.loading_bytes * max(per_segment, default=0) // max(graph_bytes, 1)
        transferred = sum(sizes[name] for segment in own for name in (*segment.inputs, *segment.outputs))
        transferred += sum(each.num_bytes for each in transfers if each.source == rank)
        copies = _copied_bytes(spec, operators)
        use = MemoryUse(
            weights=int(copies * factor),
            embeddings=0,
            activations=int(device.run_bytes * share) + requests * transferred,
            workspace=device.process_bytes + loading + MAX_GRAPH_CHUNK_BYTES,
        )
        if use.total > device.budget_bytes:
            in_place = _in_place_bytes(spec, operators, factor)
            if weights_stay_in_place(in_place, copies):
                use = use.model_copy(update={"weights": in_place})
        uses.append(use)
    return tuple(uses)


def _copied_bytes(spec: GraphSpec, operators: Iterable[int]) -> int:
    """Bytes of weights, each counted once per operator that uses it."""
    return sum(spec.parameter_bytes([operator]) for operator in operators)


def _in_place_bytes(spec: GraphSpec, operators: Iterable[int], factor: float) -> int:
    """Bytes of weights where products of matrices use them in place; `factor` scales those that other operators copy."""
    kinds: defaultdict[int, list[str]] = defaultdict(list)  # by parameter, of the operators that use it
    for operator in operators:
        for parameter in spec.operators[operator].parameters:
            kinds[parameter].append(spec.operators[operator].kind)
    return sum(
        spec.parameters[parameter].num_bytes
        if _CAN_USE_IN_PLACE.issuperset(users)
        else int(spec.parameters[parameter].num_bytes * len(users) * factor)
        for parameter, users in kinds.items()
    )


def reserved_bytes(spec: GraphSpec, cluster: GraphCluster) -> tuple[int, ...]:
    """By device, a first estimate of the bytes not available for weights and loading them, before operators are placed."""
    if not cluster.measured:
        return (0,) * len(cluster.devices)
    return tuple(device.process_bytes + device.run_bytes + MAX_GRAPH_CHUNK_BYTES for device in cluster.devices)
