"""Plans for graphs, without a planner."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.plan.graph import GraphDevice, GraphPlan, GraphPrediction, Segment
from hearth.plan.transformer import MemoryUse, WireFormat

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
    """`segments` are ranks with the tensors that their segment takes and makes, in an order in which they can run."""
    num_ranks = num_ranks or 1 + max(rank for rank, _, _ in segments)
    return GraphPlan(
        epoch=epoch,
        model="model",
        objective="throughput",
        planner="test",
        devices=tuple(
            GraphDevice(
                device_id=f"id{rank}", name=f"device{rank}", memory=_NO_MEMORY, budget_bytes=0, compute_seconds=0.0
            )
            for rank in range(num_ranks)
        ),
        segments=tuple(
            Segment(operators=(index,), rank=rank, inputs=tuple(taken), outputs=tuple(made))
            for index, (rank, taken, made) in enumerate(segments)
        ),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        wire=wire,
        predicted=GraphPrediction(latency_seconds=3.0, bottleneck_seconds=3.0),  # waits last a minute
    )
