"""Galaxy's hybrid model parallelism, and Megatron's tensor parallelism: the tasks of one layer.

Hybrid: tensor parallel in attention and MLP, sequence parallel in between (Galaxy, section III-B). With one device it is
`local`; with all weights on every device it is `sp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.plan.transformer.cost.ring_tasks import RingTasks
from coordinator.plan.transformer.strategies.tensor_parallel import TensorParallelStrategy
from hearth.plan.phases import Phase, Work
from hearth.plan.transformer import LayerMode


@dataclass(frozen=True)
class HybridStrategy(TensorParallelStrategy):
    """Galaxy's layer: heads and columns are shared inside blocks, rows between them."""

    def add_layer(self, ring: RingTasks, mode: LayerMode) -> None:
        if mode.attention == "rows":
            _attention_by_rows(ring)
        else:
            (_exchange_qkv if mode.qkv == "replicated" else _gather_qkv)(ring)
            (_exchange_out if mode.out == "replicated" else _reduce_out)(ring)
        ring.connective(Work.CONNECTIVE_ATTENTION, ring.rows)
        if mode.mlp == "replicated":
            ring.compute(Work.MLP_BLOCK, [ring.blocks[r].mlp_rows(ring.rows[r]) for r in ring.ranks])
        else:
            up = ring.tile_seconds(lambda r: ring.blocks[r].up(ring.body.columns[r]))
            down = ring.tile_seconds(lambda r: ring.blocks[r].down(ring.body.columns[r]))
            ring.gather_and_scatter(Phase.GATHER_MLP, up, Phase.REDUCE_MLP, down)
        ring.connective(Work.CONNECTIVE_MLP, ring.rows)


@dataclass(frozen=True)
class MegatronStrategy(TensorParallelStrategy):
    """Megatron-LM's layer: heads and columns are shared, and every rank has all rows."""

    def add_layer(self, ring: RingTasks, mode: LayerMode) -> None:
        """Each AllReduce is a ReduceScatter overlapped with its GEMM, then a plain AllGather."""
        blocks, body, everywhere = ring.blocks, ring.body, [ring.num_rows] * len(ring.ranks)
        ring.compute(Work.QKV, [blocks[r].qkv(body.heads[r]) * ring.scale[r] for r in ring.ranks])
        _reduce_out(ring)
        ring.gather(Phase.REDUCE_GATHER_ATTENTION, ring.zero_seconds)
        ring.connective(Work.CONNECTIVE_ATTENTION, everywhere)
        ring.compute(Work.UP, [blocks[r].up(body.columns[r]) * ring.scale[r] for r in ring.ranks])
        ring.scatter(Phase.REDUCE_MLP, ring.tile_seconds(lambda r: blocks[r].down(body.columns[r])))
        ring.gather(Phase.REDUCE_GATHER_MLP, ring.zero_seconds)
        ring.connective(Work.CONNECTIVE_MLP, everywhere)


LOCAL = HybridStrategy("local", search="rows", device_limit=1)
SP = HybridStrategy("sp", search="rows", whole_prompts=True)
HMP = HybridStrategy(
    "hmp",
    search="shares",
    leaves_one_out=True,
    refinements=("replicate", "micro-batches"),
)


MEGATRON = MegatronStrategy("megatron-tp", search="shares", refinements=("micro-batches",))


def _gather_qkv(ring: RingTasks) -> None:
    ring.gather(Phase.GATHER_ATTENTION, ring.tile_seconds(lambda r: ring.blocks[r].qkv(ring.body.heads[r])))


def _reduce_out(ring: RingTasks) -> None:
    """Attention and output projection, tile by tile, with a ring ReduceScatter of the partial sums."""
    out = ring.tile_seconds(lambda r: ring.blocks[r].out(ring.body.heads[r]))
    for rank in ring.ranks:
        core = ring.blocks[rank].core(ring.body.heads[rank]) * ring.core_scale[rank]
        out[rank] = [s + core * rows / ring.num_rows for s, rows in zip(out[rank], ring.rows, strict=True)]
    ring.scatter(Phase.REDUCE_ATTENTION, out)


def _exchange_qkv(ring: RingTasks) -> None:
    """Replicated QKV: a rank projects its own rows for the heads of each rank in turn, and sends each part when done."""
    spec, heads = ring.spec, ring.body.heads
    whole = [ring.own_rows_seconds(r, ring.blocks[r].qkv(spec.num_heads)) for r in ring.ranks]
    arrived = ring.exchange(
        Phase.EXCHANGE_QKV,
        [[whole[r] * heads[target] / spec.num_heads for target in ring.ranks] for r in ring.ranks],
        [[ring.rows[r] * spec.qkv_width(heads[target]) for target in ring.ranks] for r in ring.ranks],
    )
    ring.wait_for(arrived)


def _exchange_out(ring: RingTasks) -> None:
    """Replicated output projection.

    A rank sends its heads' outputs to the owners of the rows, and projects its own rows part by part as the outputs of other
    ranks' heads arrive.
    """
    spec, heads = ring.spec, ring.body.heads
    core = [ring.blocks[r].core(heads[r]) * ring.core_scale[r] for r in ring.ranks]
    arrived = ring.exchange(
        Phase.EXCHANGE_HEADS,
        [[core[r] * ring.rows[target] / ring.num_rows for target in ring.ranks] for r in ring.ranks],
        [[ring.rows[target] * spec.q_width(heads[r]) for target in ring.ranks] for r in ring.ranks],
        tiled=True,
    )
    for rank in ring.ranks:
        whole = ring.own_rows_seconds(rank, ring.blocks[rank].out(spec.num_heads))
        ends = []
        for source in (rank, *((rank - offset) % len(ring.ranks) for offset in range(1, len(ring.ranks)))):
            seconds = whole * heads[source] / spec.num_heads
            after = arrived[rank].get(source, ring.last_tasks[rank])
            ends.append(ring.add_task(Work.OUT, rank, seconds, after, rank, source))
        ring.last_tasks[rank] = tuple(ends)


def _attention_by_rows(ring: RingTasks) -> None:
    heads = ring.spec.num_heads
    ring.compute(Work.QKV, [ring.own_rows_seconds(r, ring.blocks[r].qkv(heads)) for r in ring.ranks])
    for phase in (Phase.GATHER_KEYS, Phase.GATHER_VALUES):
        ring.gather(phase, ring.zero_seconds, row_values=ring.spec.kv_width(heads))
    core = [ring.blocks[r].core(heads) * ring.core_scale[r] * ring.rows[r] / ring.num_rows for r in ring.ranks]
    ring.compute(Work.ATTENTION, core)
    ring.compute(Work.OUT, [ring.own_rows_seconds(r, ring.blocks[r].out(heads)) for r in ring.ranks])
