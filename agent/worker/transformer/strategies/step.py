"""Parts that strategies share: the step of one rank, the embedding, norms and residuals, the KV cache.

Shapes: T rows of the step, s rows of this rank, H hidden size, w = heads * head_dim, q the QKV width and c the MLP columns of
this rank, F all MLP columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agent.worker.tracing import Recorder
from agent.worker.transformer import blocks
from agent.worker.transformer.blocks import PackedRows
from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.matrices import Matrix
from agent.worker.transformer.micro_batches import MicroBatchOrder
from agent.worker.transformer.shard import LayerShard, Shard
from hearth.plan.geometry import Span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import TransformerPlan


@dataclass(frozen=True)
class Step:
    """The input of a strategy for one pass on one rank."""

    shard: Shard
    plan: TransformerPlan
    rank: int
    rows: PackedRows
    collectives: Collectives
    recorder: Recorder
    micro_batch_order: MicroBatchOrder | None = None  # orders the KV cache writes of concurrent micro-batches

    @property
    def own_rows(self) -> Span:
        return self.collectives.own_rows

    @property
    def spec(self) -> ModelSpec:
        return self.shard.spec

    @property
    def heads(self) -> int:
        """Number of this rank's query heads, if attention is split by heads."""
        return self.plan.body.heads[self.rank]

    def kv_stored(self, index: int) -> None:
        """Signal that the keys and values of a layer are cached, so that the next micro-batch may attend to them."""
        if self.micro_batch_order is not None:
            self.micro_batch_order.kv_stored(index)


Block = Callable[[Step, int, LayerShard, Tensor], Tensor]  # attention or MLP of the layer with this index


def embed_rows(step: Step, wanted: Span, replicated: bool = False) -> Tensor:
    """Vocabulary-parallel embedding of the rows `wanted`. `replicated`: every rank wants the same rows.

    Each owner of vocabulary rows sends word embeddings directly to the rank that needs them, unless every rank holds all. The
    rank then adds position and type embeddings and applies the norm.
    """
    spec, embedding = step.spec, step.shard.embedding
    owners = spans(step.plan.body.vocabulary)
    rows = step.rows
    if step.plan.num_ranks == 1 or step.plan.body.embedding == "replicated":
        with step.recorder.timed(Work.EMBEDDING):
            word_sH = embedding.word[rows.token_ids[slice(*wanted)]].float()
        return blocks.finish_embedding(spec, embedding, word_sH, rows.positions[slice(*wanted)])

    def held_by(owner: int, span: Span) -> Tensor:
        """Indexes of the rows of `span` whose word embedding `owner` holds. Sender and receiver compute the same."""
        ids = rows.token_ids[slice(*span)]
        return ((ids >= owners[owner].start) & (ids < owners[owner].stop)).nonzero().flatten() + span.start

    def word_rows(indexes: Tensor) -> Tensor:
        return embedding.word[rows.token_ids[indexes] - embedding.word_rows.start].float()

    def rows_for_target(target: int) -> Tensor | None:
        span = wanted if replicated else step.collectives.tiles[target]
        indexes = held_by(step.rank, span)
        return word_rows(indexes) if len(indexes) else None

    with step.recorder.timed(Work.EMBEDDING):
        step.collectives.all_to_all_send(0, Phase.EMBED, rows_for_target)
        word_sH = torch.empty(wanted.size, spec.hidden_size, device=rows.token_ids.device)
        own = held_by(step.rank, wanted)
        word_sH[own - wanted.start] = word_rows(own)
    for source in range(step.plan.num_ranks):
        if source != step.rank and len(indexes := held_by(source, wanted)):
            received = word_sH.new_empty(len(indexes), spec.hidden_size)
            step.collectives.receive_rows(0, Phase.EMBED, source, received)
            word_sH[indexes - wanted.start] = received
    return blocks.finish_embedding(spec, embedding, word_sH, rows.positions[slice(*wanted)])


def run_layer(step: Step, index: int, layer: LayerShard, x_sH: Tensor, attention: Block, mlp: Block) -> Tensor:
    """Run one layer. Each block gets its (pre-normalised) input rows, and returns the rows to add to the residual."""
    spec, timed = step.spec, step.recorder.timed
    with timed(Work.PRE_NORM_ATTENTION, index):
        input_sH = blocks.pre_norm(spec, layer, blocks.ATTENTION, x_sH)
    y_sH = attention(step, index, layer, input_sH)
    with timed(Work.CONNECTIVE_ATTENTION, index):
        x_sH = blocks.add_residual(spec, layer, blocks.ATTENTION, x_sH, y_sH)
    with timed(Work.PRE_NORM_MLP, index):
        input_sH = blocks.pre_norm(spec, layer, blocks.MLP, x_sH)
    y_sH = mlp(step, index, layer, input_sH)
    with timed(Work.CONNECTIVE_MLP, index):
        return blocks.add_residual(spec, layer, blocks.MLP, x_sH, y_sH)


def local_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """The whole MLP for these rows, without communication."""
    if not x_sH.shape[0]:
        return x_sH
    with step.recorder.timed(Work.MLP_BLOCK, index):
        return blocks.mlp_block(step.spec, layer, x_sH)


def update_kv_cache(step: Step, index: int, qkv: Tensor) -> None:
    """Store keys and values in the KV caches of the step's sequences, if they have any."""
    if step.heads:
        _, k_Tk, v_Tk = blocks.split_qkv(step.spec, step.heads, qkv)
        blocks.store_kv(step.spec, step.rows, index, k_Tk, v_Tk)
    step.kv_stored(index)


def attend_tile(step: Step, index: int, qkv: Tensor, tile: int) -> Tensor:
    """Attention of this rank's heads for the rows of one tile; by tiles, so that the first partial sums are sent early."""
    rows = step.collectives.tiles[tile]
    with step.recorder.timed(Work.ATTENTION, index, tile):
        q_Tw, k_Tk, v_Tk = blocks.split_qkv(step.spec, step.heads, qkv)
        return blocks.attention(step.spec, index, q_Tw[slice(*rows)], k_Tk, v_Tk, step.rows, rows)


def sharded_out(step: Step, index: int, layer: LayerShard, qkv: Tensor) -> Tensor:
    """Output projection sharded: attention of this rank's heads and ReduceScatter of partial sums, tile by tile: [s,H]."""

    def context(tile: int) -> Tensor:
        return attend_tile(step, index, qkv, tile)

    return matmul_reduce_scatter(step, index, Phase.REDUCE_ATTENTION, Work.OUT, context, layer.matrices["o"])


def matmul_reduce_scatter(
    step: Step, index: int, phase: Phase, work: Work, input_of: Callable[[int], Tensor], weight_Hx: Matrix
) -> Tensor:
    """ReduceScatter of the products of `input_of(tile)` [k,x] and the weight, tile by tile in ring order: [s,H]."""

    def partial(tile: int) -> Tensor:
        if not step.collectives.tiles[tile].size:
            return torch.empty(0, step.spec.hidden_size, device=step.rows.token_ids.device)
        input_kx = input_of(tile)
        with step.recorder.timed(work, index, tile):
            # Without heads or columns, the product has no terms: zeros.
            return weight_Hx.matmul(input_kx)

    return step.collectives.reduce_scatter(index, phase, partial)
