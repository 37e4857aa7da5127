"""One forward pass on one rank, by each strategy, over the same blocks and the same collectives.

T rows of the step, s rows of this rank, H hidden, w = heads * head_dim and c MLP columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agent.worker import blocks
from agent.worker.blocks import PackedRows
from agent.worker.collectives import Collectives
from agent.worker.shard import LayerShard, Shard
from agent.worker.tracing import Recorder
from hearth.framing import Phase
from hearth.geometry import Span, spans
from hearth.plan import Plan


@dataclass(frozen=True)
class Step:
    """All that a strategy needs for one pass."""

    shard: Shard
    plan: Plan
    rank: int
    rows: PackedRows
    collectives: Collectives
    recorder: Recorder

    @property
    def own(self) -> Span:
        return self.collectives.own


def run(step: Step) -> Tensor:
    """The last hidden states of this rank's rows [s,H]."""
    with torch.inference_mode():
        return _STRATEGIES[step.plan.body.strategy](step)


# ---- hybrid model parallelism (and `local`, its case of one device) ------------------------------------------------


def _hybrid(step: Step) -> Tensor:
    """Galaxy's HMP: tensor parallel inside attention and MLP, sequence parallel between (section III-B)."""
    x_sH = _embed_rows(step, step.own)
    for index, layer in enumerate(step.shard.layers):
        context_Tw = _gathered_attention(step, index, layer, x_sH)
        y_sH = _reduce_rows(step, index, Phase.REDUCE_ATTENTION, "out", context_Tw, layer.out_weight)
        x_sH = _connect_attention(step, index, layer, x_sH, y_sH)
        hidden_Tc = _gathered_mlp(step, index, layer, x_sH)
        y_sH = _reduce_rows(step, index, Phase.REDUCE_MLP, "down", hidden_Tc, layer.down_weight)
        x_sH = _connect_mlp(step, index, layer, x_sH, y_sH)
    return x_sH


def _gathered_attention(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    qkv = x_sH.new_empty(step.rows.num_rows, layer.qkv_weight.shape[0])
    for tile, rows_xH in step.collectives.all_gather(index, Phase.GATHER_ATTENTION, x_sH):
        if layer.qkv_weight.shape[0]:
            with step.recorder.bar(f"layer {index} qkv tile {tile}"):
                blocks.project_qkv(layer, rows_xH, qkv[slice(*step.collectives.tiles[tile])])
    return _attend_all(step, index, qkv)


def _gathered_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    hidden_Tc = x_sH.new_empty(step.rows.num_rows, layer.up_weight.shape[0])
    for tile, rows_xH in step.collectives.all_gather(index, Phase.GATHER_MLP, x_sH):
        if layer.up_weight.shape[0]:
            with step.recorder.bar(f"layer {index} up tile {tile}"):
                _mlp_up(step, layer, rows_xH, hidden_Tc[slice(*step.collectives.tiles[tile])])
    return hidden_Tc


def _reduce_rows(step: Step, index: int, phase: Phase, name: str, input_Tx: Tensor, weight_Hx: Tensor) -> Tensor:
    def partial(tile: int) -> Tensor:
        with step.recorder.bar(f"layer {index} {name} tile {tile}"):
            # With no heads or columns this is the sum over nothing: zeros.
            return input_Tx[slice(*step.collectives.tiles[tile])] @ weight_Hx.t()

    return step.collectives.reduce_scatter(index, phase, partial)


# ---- Megatron tensor parallelism: ring AllReduce, connective repeated everywhere ------------------------------------


def _megatron(step: Step) -> Tensor:
    """Megatron-LM's split with a ring AllReduce (ReduceScatter, then AllGather) after attention and after the MLP."""
    x_TH = _embed_rows(step, Span(0, step.rows.num_rows))
    for index, layer in enumerate(step.shard.layers):
        qkv = x_TH.new_empty(x_TH.shape[0], layer.qkv_weight.shape[0])
        with step.recorder.bar(f"layer {index} qkv"):
            blocks.project_qkv(layer, x_TH, qkv)
        context_Tw = _attend_all(step, index, qkv)
        y_sH = _reduce_rows(step, index, Phase.REDUCE_ATTENTION, "out", context_Tw, layer.out_weight)
        y_TH = step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_ATTENTION, y_sH)
        x_TH = _connect_attention(step, index, layer, x_TH, y_TH)
        hidden_Tc = x_TH.new_empty(x_TH.shape[0], layer.up_weight.shape[0])
        with step.recorder.bar(f"layer {index} up"):
            _mlp_up(step, layer, x_TH, hidden_Tc)
        y_sH = _reduce_rows(step, index, Phase.REDUCE_MLP, "down", hidden_Tc, layer.down_weight)
        y_TH = step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_MLP, y_sH)
        x_TH = _connect_mlp(step, index, layer, x_TH, y_TH)
    return x_TH[slice(*step.own)]


# ---- sequence parallelism: all weights everywhere, K and V gathered -------------------------------------------------


def _sequence(step: Step) -> Tensor:
    """The paper's SP baseline: rows are split, K and V of all rows are gathered in every layer."""
    x_sH = _embed_rows(step, step.own)
    for index, layer in enumerate(step.shard.layers):
        qkv = x_sH.new_empty(x_sH.shape[0], layer.qkv_weight.shape[0])
        with step.recorder.bar(f"layer {index} qkv"):
            blocks.project_qkv(layer, x_sH, qkv)
        q_sw, k_sw, v_sw = (part.contiguous() for part in qkv.chunk(3, dim=1))
        k_Tw = step.collectives.all_gather_rows(index, Phase.GATHER_KEYS, k_sw)
        v_Tw = step.collectives.all_gather_rows(index, Phase.GATHER_VALUES, v_sw)
        with step.recorder.bar(f"layer {index} attention"):
            context_sw = blocks.attention(q_sw, k_Tw, v_Tw, step.shard.spec.head_dim, step.rows.sequences, step.own)
            y_sH = context_sw @ layer.out_weight.t()
        x_sH = _connect_attention(step, index, layer, x_sH, y_sH)
        with step.recorder.bar(f"layer {index} mlp"):
            hidden_sc = x_sH.new_empty(x_sH.shape[0], layer.up_weight.shape[0])
            _mlp_up(step, layer, x_sH, hidden_sc)
            y_sH = hidden_sc @ layer.down_weight.t()
        x_sH = _connect_mlp(step, index, layer, x_sH, y_sH)
    return x_sH


# ---- shared pieces -------------------------------------------------------------------------------------------------


def _embed_rows(step: Step, wanted: Span) -> Tensor:
    """Vocabulary-parallel embedding of the rows `wanted`: each owner sends the word rows it holds straight to the
    rank that needs them; position and type embeddings and the norm come after, once."""
    spec, embedding = step.shard.spec, step.shard.embedding
    owners = spans(step.plan.body.vocabulary)
    everywhere = step.plan.body.strategy == "megatron-tp"
    rows = step.rows

    def held_by(owner: int, span: Span) -> Tensor:
        """Row indexes within `span` whose word row lies with `owner`; both ends compute the same."""
        ids = rows.token_ids[slice(*span)]
        return ((ids >= owners[owner].start) & (ids < owners[owner].stop)).nonzero().flatten() + span.start

    def word_rows(indexes: Tensor) -> Tensor:
        return embedding.word[rows.token_ids[indexes] - embedding.vocabulary.start]

    def rows_for_target(target: int) -> Tensor | None:
        span = wanted if everywhere else step.collectives.tiles[target]
        indexes = held_by(step.rank, span)
        return word_rows(indexes) if len(indexes) else None

    with step.recorder.bar("embed"):
        step.collectives.scatter_rows(Phase.EMBED, rows_for_target)
        word_sH = embedding.word.new_empty(wanted.size, spec.hidden_size)
        own = held_by(step.rank, wanted)
        word_sH[own - wanted.start] = word_rows(own)
    for source in range(step.plan.num_ranks):
        if source != step.rank and len(indexes := held_by(source, wanted)):
            received = word_sH.new_empty(len(indexes), spec.hidden_size)
            step.collectives.collect_rows(Phase.EMBED, source, received)
            word_sH[indexes - wanted.start] = received
    return blocks.finish_embedding(embedding, word_sH, rows.positions[slice(*wanted)], spec.norm_eps)


def _attend_all(step: Step, index: int, qkv: Tensor) -> Tensor:
    with step.recorder.bar(f"layer {index} attention"):
        q_Tw, k_Tw, v_Tw = qkv.chunk(3, dim=1)
        everything = Span(0, step.rows.num_rows)
        return blocks.attention(q_Tw, k_Tw, v_Tw, step.shard.spec.head_dim, step.rows.sequences, everything)


def _mlp_up(step: Step, layer: LayerShard, x_sH: Tensor, out: Tensor) -> None:
    torch.addmm(layer.up_bias, x_sH, layer.up_weight.t(), out=out)
    out.copy_(blocks.ACTIVATIONS[step.shard.spec.activation](out))


def _connect_attention(step: Step, index: int, layer: LayerShard, x_sH: Tensor, y_sH: Tensor) -> Tensor:
    with step.recorder.bar(f"layer {index} connective 1"):
        return blocks.connective(x_sH, y_sH, layer.out_bias, layer.norm1, step.shard.spec.norm_eps)


def _connect_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor, y_sH: Tensor) -> Tensor:
    with step.recorder.bar(f"layer {index} connective 2"):
        return blocks.connective(x_sH, y_sH, layer.down_bias, layer.norm2, step.shard.spec.norm_eps)


_STRATEGIES: Mapping[str, Callable[[Step], Tensor]] = {
    "local": _hybrid,
    "hmp": _hybrid,
    "megatron-tp": _megatron,
    "sp": _sequence,
}
