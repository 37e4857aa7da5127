"""Plans for graphs, without a planner."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.models.onnx.cutting import cut
from hearth.plan.common import MemoryUse, PlannedDevice, Prediction, WireFormat
from hearth.plan.graph import GraphModel, GraphSegments, Segment
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan

_PLAIN_WIRE = WireFormat(lz4="off")
_NO_MEMORY = MemoryUse(weights=0, embeddings=0, activations=0, workspace=0)


def make_graph_plan(
    segments: Sequence[tuple[int, Sequence[str], Sequence[str]]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    wire: WireFormat = _PLAIN_WIRE,
    epoch: int = 1,
    num_ranks: int | None = None,
) -> GraphPlan:
    """`segments` have a rank, the tensors that they read and those that they produce; in an order that can run."""
    num_ranks = num_ranks or 1 + max(rank for rank, _, _ in segments)
    return GraphPlan(
        epoch=epoch,
        model=GraphModel(name="model", sha256="", inputs=tuple(inputs), outputs=tuple(outputs)),
        planner="test",
        devices=tuple(
            PlannedDevice(
                device_id=f"id{rank}", name=f"device{rank}", memory=_NO_MEMORY, budget_bytes=0, compute_seconds=0.0
            )
            for rank in range(num_ranks)
        ),
        wire=wire,
        predicted=Prediction(  # gives timeouts of a minute
            latency_seconds=3.0, compute_seconds=3.0, transfer_seconds=0.0, bottleneck_seconds=3.0
        ),
        body=GraphSegments(
            objective="throughput",
            segments=tuple(
                Segment(operators=(index,), rank=rank, inputs=tuple(taken), outputs=tuple(made))
                for index, (rank, taken, made) in enumerate(segments)
            ),
        ),
    )


def placed_plan(spec: GraphSpec, device_ids: Sequence[str], memory_bytes: int = 0) -> GraphPlan:
    """A latency plan that runs operator i on `device_ids[i]`, with as few segments as possible."""
    ids = list(dict.fromkeys(device_ids))
    segments = cut(spec, [ids.index(each) for each in device_ids])
    plan = make_graph_plan([(each.rank, each.inputs, each.outputs) for each in segments], (), (), num_ranks=len(ids))
    memory = MemoryUse(weights=memory_bytes, embeddings=0, activations=0, workspace=0)
    devices = tuple(
        device.model_copy(update={"device_id": device_id, "name": device_id, "memory": memory})
        for device, device_id in zip(plan.devices, ids, strict=True)
    )
    return plan.model_copy(
        update={"devices": devices, "body": GraphSegments(objective="latency", segments=tuple(segments))}
    )
