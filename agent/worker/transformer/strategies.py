"""One forward pass on one rank, by each strategy, over the same blocks and the same collectives.

T rows of the step, s rows of this rank, H hidden, w = heads * head_dim, q the QKV width and c MLP columns of this rank,
F all columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agent.worker.tracing import Recorder
from agent.worker.transformer import blocks
from agent.worker.transformer.blocks import PackedRows
from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.matrices import Matrix
from agent.worker.transformer.micro_batches import Turns
from agent.worker.transformer.shard import LayerShard, Shard
from hearth.plan.geometry import Span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import TransformerPlan


@dataclass(frozen=True)
class Step:
    """All that a strategy needs for one pass."""

    shard: Shard
    plan: TransformerPlan
    rank: int
    rows: PackedRows
    collectives: Collectives
    recorder: Recorder
    turns: Turns | None = None  # of a micro-batch: others of the same step are in flight

    @property
    def own(self) -> Span:
        return self.collectives.own

    @property
    def spec(self) -> ModelSpec:
        return self.shard.spec

    @property
    def heads(self) -> int:
        """Query heads of this rank, where attention is split by head."""
        return self.plan.body.heads[self.rank]


def run(step: Step) -> Tensor:
    """The last hidden states of this rank's rows [s,H], after a decoder's last norm."""
    with torch.inference_mode():
        x_sH = _STRATEGIES[step.plan.body.strategy](step)
        if step.spec.causal and step.own.size:
            x_sH = blocks.normalise(x_sH, step.shard.embedding.norm, step.spec.norm_eps)
        return x_sH


# ---- hybrid model parallelism, with its cases `local` (one device) and `sp` (all weights everywhere) ------------------


def _hybrid(step: Step) -> Tensor:
    """Galaxy's HMP (section III-B): tensor parallel inside attention and MLP, sequence parallel between.

    What a layer's mode says is replicated is computed on own rows instead (ALGORITHMS.md section 5).
    """
    x_sH = embed_rows(step, step.own)
    for index, layer in enumerate(step.shard.layers):
        mode = step.plan.body.mode(index)
        entered_sH = enter_attention(step, index, layer, x_sH)
        if mode.attention == "rows":
            y_sH = _attention_by_rows(step, index, layer, entered_sH)
        else:
            exchanged = mode.qkv == "replicated"
            qkv = (_exchanged_qkv if exchanged else _gathered_qkv)(step, index, layer, entered_sH)
            _keep(step, index, qkv)
            y_sH = (_exchanged_out if mode.out == "replicated" else _reduced_out)(step, index, layer, qkv)
        x_sH = leave_attention(step, index, layer, x_sH, y_sH)
        entered_sH = enter_mlp(step, index, layer, x_sH)
        y_sH = (_own_mlp if mode.mlp == "replicated" else _sharded_mlp)(step, index, layer, entered_sH)
        x_sH = leave_mlp(step, index, layer, x_sH, y_sH)
    return x_sH


def _gathered_qkv(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """QKV sharded: all rows are gathered, and projected tile by tile for our heads. [T,q]"""
    qkv = x_sH.new_empty(step.rows.num_rows, step.spec.qkv_width(step.heads))
    for tile, rows_xH in step.collectives.all_gather(index, Phase.GATHER_ATTENTION, x_sH):
        if step.heads:
            span = step.collectives.tiles[tile]
            with step.recorder.bar(Work.QKV, index, tile):
                blocks.project_qkv(step.spec, layer, 0, rows_xH, step.rows, span, qkv[slice(*span)])
    return qkv


def _exchanged_qkv(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """QKV replicated: own rows are projected for each rank's heads in turn and sent while the next are. [T,q]"""
    heads, spec = step.plan.body.heads, step.spec
    tiles, own = step.collectives.tiles, step.own

    def project(rank: int, out: Tensor) -> Tensor:
        with step.recorder.bar(Work.QKV, index, step.rank, rank):
            blocks.project_qkv(spec, layer, rank, x_sH, step.rows, own, out)
        return out

    def for_target(rank: int) -> Tensor | None:
        if not own.size or not heads[rank]:
            return None
        return project(rank, x_sH.new_empty(own.size, spec.qkv_width(heads[rank])))

    step.collectives.scatter_rows(index, Phase.EXCHANGE_QKV, for_target)
    qkv = x_sH.new_empty(step.rows.num_rows, spec.qkv_width(step.heads))
    if step.heads:
        if own.size:
            project(step.rank, qkv[slice(*own)])
        for source in step.collectives.peers:
            if tiles[source].size:
                step.collectives.collect_rows(index, Phase.EXCHANGE_QKV, source, qkv[slice(*tiles[source])])
    return qkv


def _keep(step: Step, index: int, qkv: Tensor) -> None:
    """Into the KV cache, where the step's sequences go on later."""
    if step.heads:
        _, k_Tk, v_Tk = blocks.split_qkv(step.spec, step.heads, qkv)
        blocks.keep(step.spec, step.rows, index, k_Tk, v_Tk)
    if step.turns is not None:
        step.turns.kept(index)


def _reduced_out(step: Step, index: int, layer: LayerShard, qkv: Tensor) -> Tensor:
    """Output projection sharded: attention of our heads and partial sums, tile by tile, reduced and scattered. [s,H]"""

    def context(tile: int) -> Tensor:
        return _attend(step, index, qkv, tile)

    return _reduce_rows(step, index, Phase.REDUCE_ATTENTION, Work.OUT, context, layer.out_weight)


def _exchanged_out(step: Step, index: int, layer: LayerShard, qkv: Tensor) -> Tensor:
    """Output projection replicated: our heads' outputs go to the owners of their rows while the next are computed; own
    rows are projected part by part as the other heads' outputs come. [s,H]"""
    spec, heads = step.spec, spans(step.plan.body.heads)
    tiles, own = step.collectives.tiles, step.own

    def attend(rank: int) -> Tensor | None:
        return _attend(step, index, qkv, rank) if heads[step.rank].size and tiles[rank].size else None

    step.collectives.scatter_rows(index, Phase.EXCHANGE_HEADS, attend)
    y_sH = qkv.new_zeros(own.size, spec.hidden_size)

    def add(rank: int, context_sw: Tensor) -> None:
        columns = slice(heads[rank].start * spec.head_dim, heads[rank].stop * spec.head_dim)
        with step.recorder.bar(Work.OUT, index, step.rank, rank):
            y_sH.add_(layer.out_weight.columns(columns).times(context_sw))

    if own.size:
        context = attend(step.rank)
        if context is not None:
            add(step.rank, context)
        for source in step.collectives.peers:
            if heads[source].size:
                received = qkv.new_empty(own.size, heads[source].size * spec.head_dim)
                step.collectives.collect_rows(index, Phase.EXCHANGE_HEADS, source, received)
                add(source, received)
    return y_sH


def _attention_by_rows(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """The paper's SP: K and V of all rows are gathered, attention and projections run on own rows. [s,H]"""
    spec = step.spec
    q_sw, k_sk, v_sk = (x_sH.new_empty(x_sH.shape[0], width(spec.num_heads)) for width in
                        (spec.q_width, spec.kv_width, spec.kv_width))  # fmt: skip
    if x_sH.shape[0]:
        with step.recorder.bar(Work.QKV, index):
            for block, heads in enumerate(layer.qkv_blocks):
                qkv = x_sH.new_empty(x_sH.shape[0], spec.qkv_width(heads.size))
                blocks.project_qkv(spec, layer, block, x_sH, step.rows, step.own, qkv)
                q, k, v = blocks.split_qkv(spec, heads.size, qkv)
                q_sw[:, spec.q_width(heads.start) : spec.q_width(heads.stop)] = q
                k_sk[:, spec.kv_width(heads.start) : spec.kv_width(heads.stop)] = k
                v_sk[:, spec.kv_width(heads.start) : spec.kv_width(heads.stop)] = v
    k_Tk = step.collectives.all_gather_rows(index, Phase.GATHER_KEYS, k_sk)
    v_Tk = step.collectives.all_gather_rows(index, Phase.GATHER_VALUES, v_sk)
    _keep_own_heads(step, index, k_Tk, v_Tk)
    if not x_sH.shape[0]:
        return x_sH
    with step.recorder.bar(Work.ATTENTION, index):
        context_sw = blocks.attention(spec, index, q_sw, k_Tk, v_Tk, step.rows, step.own, cached=False)
    with step.recorder.bar(Work.OUT, index):
        return layer.out_weight.times(context_sw)


def _keep_own_heads(step: Step, index: int, k_Tk: Tensor, v_Tk: Tensor) -> None:
    """Of gathered keys and values of all heads those that this rank decodes with."""
    spec, heads = step.spec, spans(step.plan.body.heads)[step.rank]
    if heads.size:
        own = slice(spec.kv_width(heads.start), spec.kv_width(heads.stop))
        blocks.keep(spec, step.rows, index, k_Tk[:, own], v_Tk[:, own])


def _sharded_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """Both GEMMs of a tile follow each other: while later tiles are still gathered, the first partial sums leave. [s,H]"""
    arriving = step.collectives.all_gather(index, Phase.GATHER_MLP, x_sH)
    expanded: dict[int, Tensor] = {}

    def hidden(tile: int) -> Tensor:
        while tile not in expanded:
            arrived, rows_xH = next(arriving)
            with step.recorder.bar(Work.UP, index, arrived):
                expanded[arrived] = blocks.mlp_up(step.spec, layer, rows_xH)
        return expanded.pop(tile)

    return _reduce_rows(step, index, Phase.REDUCE_MLP, Work.DOWN, hidden, layer.down_weight)


def _own_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """MLP replicated: own rows only, and nothing travels."""
    if not x_sH.shape[0]:
        return x_sH
    with step.recorder.bar(Work.MLP_BLOCK, index):
        return layer.down_weight.times(blocks.mlp_up(step.spec, layer, x_sH))


def _reduce_rows(
    step: Step, index: int, phase: Phase, work: Work, input_of: Callable[[int], Tensor], weight_Hx: Matrix
) -> Tensor:
    """The partial sums of `input_of(tile)` [k,x] times the weight, tile by tile in the ring's order. [s,H]"""

    def partial(tile: int) -> Tensor:
        if not step.collectives.tiles[tile].size:
            return torch.empty(0, step.spec.hidden_size, device=step.rows.token_ids.device)
        input_kx = input_of(tile)
        with step.recorder.bar(work, index, tile):
            # With no heads or columns this is the sum over nothing: zeros.
            return weight_Hx.times(input_kx)

    return step.collectives.reduce_scatter(index, phase, partial)


# ---- Megatron tensor parallelism: ring AllReduce, connective repeated everywhere ------------------------------------


def _megatron(step: Step) -> Tensor:
    """Megatron-LM's split with a ring AllReduce (ReduceScatter, then AllGather) after attention and after the MLP."""
    everything = Span(0, step.rows.num_rows)
    x_TH = embed_rows(step, everything, everywhere=True)
    for index, layer in enumerate(step.shard.layers):
        entered_TH = enter_attention(step, index, layer, x_TH)
        qkv = x_TH.new_empty(x_TH.shape[0], step.spec.qkv_width(step.heads))
        if step.heads:
            with step.recorder.bar(Work.QKV, index):
                blocks.project_qkv(step.spec, layer, 0, entered_TH, step.rows, everything, qkv)
        _keep(step, index, qkv)
        y_sH = _reduced_out(step, index, layer, qkv)
        y_TH = step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_ATTENTION, y_sH)
        x_TH = leave_attention(step, index, layer, x_TH, y_TH)
        entered_TH = enter_mlp(step, index, layer, x_TH)
        with step.recorder.bar(Work.UP, index):
            hidden_Tc = blocks.mlp_up(step.spec, layer, entered_TH)
        parts = [hidden_Tc[slice(*rows)] for rows in step.collectives.tiles]
        y_sH = _reduce_rows(step, index, Phase.REDUCE_MLP, Work.DOWN, parts.__getitem__, layer.down_weight)
        y_TH = step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_MLP, y_sH)
        x_TH = leave_mlp(step, index, layer, x_TH, y_TH)
    return x_TH[slice(*step.own)]


# ---- pipeline: whole layers, one stage after the other --------------------------------------------------------------


def run_stage(step: Step) -> Tensor:
    """All rows of the step through the layers of this rank [T,H]; unless it is the last, they go on to the next one."""
    x_TH = _enter_stage(step)
    for index, layer in enumerate(step.shard.layers, step.shard.first_layer):
        x_TH = _whole_layer(step, index, layer, x_TH)
    if step.rank + 1 < step.plan.num_ranks:
        step.collectives.send_rows(step.rank + 1, step.shard.first_layer, Phase.STAGE_ROWS, x_TH)
    return x_TH


def _enter_stage(step: Step) -> Tensor:
    """The first stage holds all words; the others are sent what the one before has made of them."""
    spec, embedding, rows = step.spec, step.shard.embedding, step.rows
    if step.rank == 0:
        with step.recorder.bar(Work.EMBEDDING):
            return blocks.finish_embedding(spec, embedding, embedding.word[rows.token_ids].float(), rows.positions)
    before = step.plan.body.layers_of(step.rank - 1, spec.num_layers)
    x_TH = torch.empty(rows.num_rows, spec.hidden_size, device=rows.token_ids.device)
    step.collectives.collect_rows(before.start, Phase.STAGE_ROWS, step.rank - 1, x_TH)
    return x_TH


def _whole_layer(step: Step, index: int, layer: LayerShard, x_TH: Tensor) -> Tensor:
    """All heads and columns for all rows; keys and values into the cache."""
    spec, everything = step.spec, Span(0, step.rows.num_rows)
    entered_TH = enter_attention(step, index, layer, x_TH)
    qkv = x_TH.new_empty(x_TH.shape[0], spec.qkv_width(step.heads))
    with step.recorder.bar(Work.ATTENTION_BLOCK, index):
        blocks.project_qkv(spec, layer, 0, entered_TH, step.rows, everything, qkv)
        _keep(step, index, qkv)
        q_Tw, k_Tk, v_Tk = blocks.split_qkv(spec, step.heads, qkv)
        context_Tw = blocks.attention(spec, index, q_Tw, k_Tk, v_Tk, step.rows, everything)
        y_TH = layer.out_weight.times(context_Tw)
    x_TH = leave_attention(step, index, layer, x_TH, y_TH)
    entered_TH = enter_mlp(step, index, layer, x_TH)
    with step.recorder.bar(Work.MLP_BLOCK, index):
        y_TH = layer.down_weight.times(blocks.mlp_up(spec, layer, entered_TH))
    return leave_mlp(step, index, layer, x_TH, y_TH)


def _pipeline(step: Step) -> Tensor:
    """One pass through all stages. The rows end with their owner, which need not be the last stage. [s,H]"""
    x_TH = run_stage(step)
    last, owner = step.plan.num_ranks - 1, step.plan.body.row_weights.index(max(step.plan.body.row_weights))
    if owner != last and step.rank == last:
        step.collectives.send_rows(owner, 0, Phase.HEAD_ROWS, x_TH)
    elif owner != last and step.rank == owner:
        x_TH = torch.empty_like(x_TH)
        step.collectives.collect_rows(0, Phase.HEAD_ROWS, last, x_TH)
    return x_TH[slice(*step.own)]


# ---- shared pieces -------------------------------------------------------------------------------------------------


def embed_rows(step: Step, wanted: Span, everywhere: bool = False) -> Tensor:
    """Vocabulary-parallel embedding of the rows `wanted`: each owner sends the word rows it holds straight to the
    rank that needs them; position and type embeddings and the norm come after, once. `everywhere`: every rank wants
    the same rows."""
    spec, embedding = step.spec, step.shard.embedding
    owners = spans(step.plan.body.vocabulary)
    rows = step.rows

    def held_by(owner: int, span: Span) -> Tensor:
        """Row indexes within `span` whose word row lies with `owner`; both ends compute the same."""
        ids = rows.token_ids[slice(*span)]
        return ((ids >= owners[owner].start) & (ids < owners[owner].stop)).nonzero().flatten() + span.start

    def word_rows(indexes: Tensor) -> Tensor:
        return embedding.word[rows.token_ids[indexes] - embedding.vocabulary.start].float()

    def rows_for_target(target: int) -> Tensor | None:
        span = wanted if everywhere else step.collectives.tiles[target]
        indexes = held_by(step.rank, span)
        return word_rows(indexes) if len(indexes) else None

    with step.recorder.bar(Work.EMBEDDING):
        step.collectives.scatter_rows(0, Phase.EMBED, rows_for_target)
        word_sH = torch.empty(wanted.size, spec.hidden_size, device=rows.token_ids.device)
        own = held_by(step.rank, wanted)
        word_sH[own - wanted.start] = word_rows(own)
    for source in range(step.plan.num_ranks):
        if source != step.rank and len(indexes := held_by(source, wanted)):
            received = word_sH.new_empty(len(indexes), spec.hidden_size)
            step.collectives.collect_rows(0, Phase.EMBED, source, received)
            word_sH[indexes - wanted.start] = received
    return blocks.finish_embedding(spec, embedding, word_sH, rows.positions[slice(*wanted)])


def _attend(step: Step, index: int, qkv: Tensor, tile: int) -> Tensor:
    """Attention of our heads for the rows of a tile: the first partial sums leave before the last rows are attended."""
    rows = step.collectives.tiles[tile]
    with step.recorder.bar(Work.ATTENTION, index, tile):
        q_Tw, k_Tk, v_Tk = blocks.split_qkv(step.spec, step.heads, qkv)
        return blocks.attention(step.spec, index, q_Tw[slice(*rows)], k_Tk, v_Tk, step.rows, rows)


def enter_attention(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    with step.recorder.bar(Work.ENTER_ATTENTION, index):
        return blocks.enter(step.spec, x_sH, layer.norm1)


def leave_attention(step: Step, index: int, layer: LayerShard, x_sH: Tensor, y_sH: Tensor) -> Tensor:
    with step.recorder.bar(Work.CONNECTIVE_ATTENTION, index):
        return blocks.leave(step.spec, x_sH, y_sH, layer.out_bias, layer.norm1)


def enter_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    with step.recorder.bar(Work.ENTER_MLP, index):
        return blocks.enter(step.spec, x_sH, layer.norm2)


def leave_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor, y_sH: Tensor) -> Tensor:
    with step.recorder.bar(Work.CONNECTIVE_MLP, index):
        return blocks.leave(step.spec, x_sH, y_sH, layer.down_bias, layer.norm2)


_STRATEGIES: Mapping[str, Callable[[Step], Tensor]] = {
    "local": _hybrid,
    "hmp": _hybrid,
    "megatron-tp": _megatron,
    "sp": _hybrid,
    "pipeline": _pipeline,
}
