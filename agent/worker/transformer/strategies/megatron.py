"""Megatron's tensor parallelism: a ring AllReduce after attention and after the MLP, norms and residuals everywhere.

T rows of the step, s rows of this rank, H hidden, c MLP columns of this rank.
"""

from __future__ import annotations

from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.strategies.step import (
    Step,
    embed_rows,
    enter_attention,
    enter_mlp,
    keep_kv,
    leave_attention,
    leave_mlp,
    reduce_rows,
    reduced_out,
)
from hearth.plan.geometry import Span
from hearth.plan.phases import Phase, Work


def run_megatron(step: Step) -> Tensor:
    """Megatron-LM's split with a ring AllReduce (ReduceScatter, then AllGather) after attention and after the MLP."""
    everything = Span(0, step.rows.num_rows)
    x_TH = embed_rows(step, everything, everywhere=True)
    for index, layer in enumerate(step.shard.layers):
        entered_TH = enter_attention(step, index, layer, x_TH)
        qkv = x_TH.new_empty(x_TH.shape[0], step.spec.qkv_width(step.heads))
        if step.heads:
            with step.recorder.bar(Work.QKV, index):
                blocks.project_qkv(step.spec, layer, 0, entered_TH, step.rows, everything, qkv)
        keep_kv(step, index, qkv)
        y_sH = reduced_out(step, index, layer, qkv)
        y_TH = step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_ATTENTION, y_sH)
        x_TH = leave_attention(step, index, layer, x_TH, y_TH)
        entered_TH = enter_mlp(step, index, layer, x_TH)
        with step.recorder.bar(Work.UP, index):
            hidden_Tc = blocks.mlp_up(step.spec, layer, entered_TH)
        parts = [hidden_Tc[slice(*rows)] for rows in step.collectives.tiles]
        y_sH = reduce_rows(step, index, Phase.REDUCE_MLP, Work.DOWN, parts.__getitem__, layer.down_weight)
        y_TH = step.collectives.all_gather_rows(index, Phase.REDUCE_GATHER_MLP, y_sH)
        x_TH = leave_mlp(step, index, layer, x_TH, y_TH)
    return x_TH[slice(*step.own)]


STRATEGIES = {"megatron-tp": run_megatron}
