"""Galaxy's hybrid model parallelism (HMP), with its special cases `local` and `sp`, and Megatron-LM's tensor parallelism.

`local` runs on one device; in `sp`, all weights are replicated.

Shapes: T rows of the step, s rows of this rank, H hidden size, w = heads * head_dim, q the QKV width of this rank, c its MLP
columns.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.shard import LayerShard
from agent.worker.transformer.strategies.step import (
    Step,
    attend_tile,
    embed_rows,
    local_mlp,
    matmul_reduce_scatter,
    run_layer,
    sharded_out,
    update_kv_cache,
)
from hearth.plan.geometry import Span, spans
from hearth.plan.phases import Phase, Work


def run_hybrid(step: Step) -> Tensor:
    """Galaxy's HMP (section III-B): tensor parallelism in attention and MLP, sequence parallelism between them.

    Weight groups that a layer's mode replicates are applied to the rank's own rows instead (see `LayerMode`).
    """
    x_sH = embed_rows(step, step.own_rows)
    for index, layer in enumerate(step.shard.layers):
        x_sH = run_layer(step, index, layer, x_sH, _attention, _mlp)
    return x_sH


def _attention(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    mode = step.plan.body.mode(index)
    if mode.attention == "rows":
        return _sequence_parallel_attention(step, index, layer, x_sH)
    qkv = (_replicated_qkv if mode.qkv == "replicated" else _sharded_qkv)(step, index, layer, x_sH)
    update_kv_cache(step, index, qkv)
    return (_replicated_out if mode.out == "replicated" else sharded_out)(step, index, layer, qkv)


def _mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    replicated = step.plan.body.mode(index).mlp == "replicated"
    return (local_mlp if replicated else _sharded_mlp)(step, index, layer, x_sH)


def _sharded_qkv(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """QKV sharded: AllGather the rows, and project them tile by tile for this rank's heads: [T,q]."""
    qkv = x_sH.new_empty(step.rows.num_rows, step.spec.qkv_width(step.heads))
    for tile, rows_xH in step.collectives.all_gather(index, Phase.GATHER_ATTENTION, x_sH):
        if step.heads:
            span = step.collectives.tiles[tile]
            with step.recorder.timed(Work.QKV, index, tile):
                blocks.project_qkv(step.spec, layer, 0, rows_xH, step.rows, span, qkv[slice(*span)])
    return qkv


def _replicated_qkv(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """QKV replicated: project the own rows for each rank's heads, and send them while computing the next ones: [T,q]."""
    heads, spec = step.plan.body.heads, step.spec
    tiles, own = step.collectives.tiles, step.own_rows

    def project(rank: int, out: Tensor) -> Tensor:
        with step.recorder.timed(Work.QKV, index, step.rank, rank):
            blocks.project_qkv(spec, layer, rank, x_sH, step.rows, own, out)
        return out

    def rows_for_target(rank: int) -> Tensor | None:
        if not own.size or not heads[rank]:
            return None
        return project(rank, x_sH.new_empty(own.size, spec.qkv_width(heads[rank])))

    step.collectives.all_to_all_send(index, Phase.EXCHANGE_QKV, rows_for_target)
    qkv = x_sH.new_empty(step.rows.num_rows, spec.qkv_width(step.heads))
    if step.heads:
        if own.size:
            project(step.rank, qkv[slice(*own)])
        for source in step.collectives.peers:
            if tiles[source].size:
                step.collectives.receive_rows(index, Phase.EXCHANGE_QKV, source, qkv[slice(*tiles[source])])
    return qkv


def _replicated_out(step: Step, index: int, layer: LayerShard, qkv: Tensor) -> Tensor:
    """Output projection replicated: [s,H].

    Send this rank's head outputs to the owners of their rows while computing the next ones; project the own rows in parts,
    as the outputs of other heads arrive.
    """
    spec, heads = step.spec, spans(step.plan.body.heads)
    tiles, own = step.collectives.tiles, step.own_rows

    def attend(rank: int) -> Tensor | None:
        return attend_tile(step, index, qkv, rank) if heads[step.rank].size and tiles[rank].size else None

    step.collectives.all_to_all_send(index, Phase.EXCHANGE_HEADS, attend)
    y_sH = qkv.new_zeros(own.size, spec.hidden_size)

    def add(rank: int, context_sw: Tensor) -> None:
        columns = slice(heads[rank].start * spec.head_dim, heads[rank].stop * spec.head_dim)
        with step.recorder.timed(Work.OUT, index, step.rank, rank):
            y_sH.add_(layer.matrices["o"].columns(columns).matmul(context_sw))

    if own.size:
        context = attend(step.rank)
        if context is not None:
            add(step.rank, context)
        for source in step.collectives.peers:
            if heads[source].size:
                received = qkv.new_empty(own.size, heads[source].size * spec.head_dim)
                step.collectives.receive_rows(index, Phase.EXCHANGE_HEADS, source, received)
                add(source, received)
    return y_sH


def _sequence_parallel_attention(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """Sequence parallelism, as in the paper's SP: AllGather K and V; attention and projections use the own rows: [s,H]."""
    spec = step.spec
    q_sw, k_sk, v_sk = (x_sH.new_empty(x_sH.shape[0], width(spec.num_heads)) for width in
                        (spec.q_width, spec.kv_width, spec.kv_width))  # fmt: skip
    if x_sH.shape[0]:
        with step.recorder.timed(Work.QKV, index):
            for block, heads in enumerate(layer.qkv_blocks):
                qkv = x_sH.new_empty(x_sH.shape[0], spec.qkv_width(heads.size))
                blocks.project_qkv(spec, layer, block, x_sH, step.rows, step.own_rows, qkv)
                q, k, v = blocks.split_qkv(spec, heads.size, qkv)
                q_sw[:, spec.q_width(heads.start) : spec.q_width(heads.stop)] = q
                k_sk[:, spec.kv_width(heads.start) : spec.kv_width(heads.stop)] = k
                v_sk[:, spec.kv_width(heads.start) : spec.kv_width(heads.stop)] = v
    k_Tk = step.collectives.all_gather_rows(index, Phase.GATHER_KEYS, k_sk)
    v_Tk = step.collectives.all_gather_rows(index, Phase.GATHER_VALUES, v_sk)
    _store_own_heads(step, index, k_Tk, v_Tk)
    if not x_sH.shape[0]:
        return x_sH
    rows = replace(step.rows, caches=(None,) * len(step.rows.caches))  # the caches hold only this rank's heads
    with step.recorder.timed(Work.ATTENTION, index):
        context_sw = blocks.attention(spec, index, q_sw, k_Tk, v_Tk, rows, step.own_rows)
    with step.recorder.timed(Work.OUT, index):
        return layer.matrices["o"].matmul(context_sw)


def _store_own_heads(step: Step, index: int, k_Tk: Tensor, v_Tk: Tensor) -> None:
    """Cache the keys and values of the heads that this rank uses for decoding, from the gathered ones of all heads."""
    spec, heads = step.spec, spans(step.plan.body.heads)[step.rank]
    if heads.size:
        own = slice(spec.kv_width(heads.start), spec.kv_width(heads.stop))
        blocks.store_kv(spec, step.rows, index, k_Tk[:, own], v_Tk[:, own])


def _sharded_mlp(step: Step, index: int, layer: LayerShard, x_sH: Tensor) -> Tensor:
    """MLP sharded. Each tile's two GEMMs run in succession, so that partial sums are sent while later tiles arrive: [s,H]."""
    arriving = step.collectives.all_gather(index, Phase.GATHER_MLP, x_sH)
    expanded: dict[int, Tensor] = {}

    def hidden(tile: int) -> Tensor:
        while tile not in expanded:
            arrived, rows_xH = next(arriving)
            with step.recorder.timed(Work.UP, index, arrived):
                expanded[arrived] = blocks.mlp_up(step.spec, layer, rows_xH)
        return expanded.pop(tile)

    return matmul_reduce_scatter(step, index, Phase.REDUCE_MLP, Work.DOWN, hidden, layer.matrices["down"])


def run_megatron(step: Step) -> Tensor:
    """Megatron-LM: AllReduce after attention and after the MLP, as a ring; every rank repeats norms and residuals."""
    x_TH = embed_rows(step, Span(0, step.rows.num_rows), replicated=True)
    for index, layer in enumerate(step.shard.layers):
        x_TH = run_layer(step, index, layer, x_TH, _megatron_attention, _megatron_mlp)
    return x_TH[slice(*step.own_rows)]


def _megatron_attention(step: Step, index: int, layer: LayerShard, x_TH: Tensor) -> Tensor:
    qkv = x_TH.new_empty(x_TH.shape[0], step.spec.qkv_width(step.heads))
    if step.heads:
        with step.recorder.timed(Work.QKV, index):
            blocks.project_qkv(step.spec, layer, 0, x_TH, step.rows, Span(0, step.rows.num_rows), qkv)
    update_kv_cache(step, index, qkv)
    y_sH = sharded_out(step, index, layer, qkv)
    return step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_ATTENTION, y_sH)


def _megatron_mlp(step: Step, index: int, layer: LayerShard, x_TH: Tensor) -> Tensor:
    with step.recorder.timed(Work.UP, index):
        hidden_Tc = blocks.mlp_up(step.spec, layer, x_TH)
    parts = [hidden_Tc[slice(*rows)] for rows in step.collectives.tiles]
    y_sH = matmul_reduce_scatter(step, index, Phase.REDUCE_MLP, Work.DOWN, parts.__getitem__, layer.matrices["down"])
    return step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_MLP, y_sH)


STRATEGIES = {"local": run_hybrid, "sp": run_hybrid, "hmp": run_hybrid, "megatron-tp": run_megatron}
