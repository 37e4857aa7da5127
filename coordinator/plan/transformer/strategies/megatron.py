"""Megatron's tensor parallelism: every rank has all rows; a ring AllReduce follows attention and the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.plan.transformer.cost.ring_tasks import RingTasks
from coordinator.plan.transformer.strategies.hybrid import reduce_out
from coordinator.plan.transformer.strategies.tensor_parallel import TensorParallelStrategy
from hearth.plan.phases import Phase, Work
from hearth.plan.transformer import LayerMode


@dataclass(frozen=True)
class MegatronStrategy(TensorParallelStrategy):
    """Megatron-LM's layer: heads and columns are shared, and every rank has all rows."""

    def add_layer(self, ring: RingTasks, mode: LayerMode) -> None:
        """Each AllReduce is a ReduceScatter overlapped with its GEMM, then a plain AllGather."""
        blocks, body, everywhere = ring.blocks, ring.body, [ring.num_rows] * len(ring.ranks)
        ring.compute(Work.QKV, [blocks[r].qkv(body.heads[r]) * ring.scale[r] for r in ring.ranks])
        reduce_out(ring)
        ring.gather(Phase.REDUCE_GATHER_ATTENTION, ring.zero_seconds)
        ring.connective(Work.CONNECTIVE_ATTENTION, everywhere)
        ring.compute(Work.UP, [blocks[r].up(body.columns[r]) * ring.scale[r] for r in ring.ranks])
        ring.scatter(Phase.REDUCE_MLP, ring.tile_seconds(lambda r: blocks[r].down(body.columns[r])))
        ring.gather(Phase.REDUCE_GATHER_MLP, ring.zero_seconds)
        ring.connective(Work.CONNECTIVE_MLP, everywhere)


MEGATRON = MegatronStrategy(
    "megatron-tp",
    "tensor parallelism (Megatron): heads and columns shared, every row everywhere",
    search="shares",
    refinements=("micro-batches",),
)
