"""Megatron-LM's tensor parallelism: AllReduce after attention and after the MLP; every rank repeats norms and residuals.

Shapes: T rows of the step, s rows of this rank, H hidden size, c MLP columns of this rank.
"""

from __future__ import annotations

from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.shard import LayerShard
from agent.worker.transformer.strategies.step import (
    Step,
    embed_rows,
    matmul_reduce_scatter,
    run_layer,
    sharded_out,
    update_kv_cache,
)
from hearth.plan.geometry import Span
from hearth.plan.phases import Phase, Work


def run_megatron(step: Step) -> Tensor:
    """Run the step, with each AllReduce as a ring: ReduceScatter, then AllGather."""
    x_TH = embed_rows(step, Span(0, step.rows.num_rows), replicated=True)
    for index, layer in enumerate(step.shard.layers):
        x_TH = run_layer(step, index, layer, x_TH, _attention, _mlp)
    return x_TH[slice(*step.own_rows)]


def _attention(step: Step, index: int, layer: LayerShard, x_TH: Tensor) -> Tensor:
    qkv = x_TH.new_empty(x_TH.shape[0], step.spec.qkv_width(step.heads))
    if step.heads:
        with step.recorder.timed(Work.QKV, index):
            blocks.project_qkv(step.spec, layer, 0, x_TH, step.rows, Span(0, step.rows.num_rows), qkv)
    update_kv_cache(step, index, qkv)
    y_sH = sharded_out(step, index, layer, qkv)
    return step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_ATTENTION, y_sH)


def _mlp(step: Step, index: int, layer: LayerShard, x_TH: Tensor) -> Tensor:
    with step.recorder.timed(Work.UP, index):
        hidden_Tc = blocks.mlp_up(step.spec, layer, x_TH)
    parts = [hidden_Tc[slice(*rows)] for rows in step.collectives.tiles]
    y_sH = matmul_reduce_scatter(step, index, Phase.REDUCE_MLP, Work.DOWN, parts.__getitem__, layer.matrices["down"])
    return step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_MLP, y_sH)


STRATEGIES = {"megatron-tp": run_megatron}
