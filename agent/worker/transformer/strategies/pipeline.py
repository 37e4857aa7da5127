"""Pipeline parallelism: each rank is a stage of whole layers.

Shapes: T rows of the step, s rows of this rank, H hidden size, w = heads * head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.shard import LayerShard
from agent.worker.transformer.strategies.step import Step, local_mlp, run_layer
from hearth.plan.phases import Phase, Work


def run_pipeline(step: Step) -> Tensor:
    """One pass through all stages. The rows end on their owner, which need not be the last stage: [s,H]."""
    x_TH = run_stage(step)
    last, owner = step.plan.num_ranks - 1, step.plan.body.row_weights.index(max(step.plan.body.row_weights))
    if owner != last and step.rank == last:
        step.collectives.send_rows(owner, 0, Phase.HEAD_ROWS, x_TH)
    elif owner != last and step.rank == owner:
        x_TH = torch.empty_like(x_TH)
        step.collectives.receive_rows(0, Phase.HEAD_ROWS, last, x_TH)
    return x_TH[slice(*step.own_rows)]


def run_stage(step: Step) -> Tensor:
    """Run all rows of the step through this rank's layers [T,H]; unless it is the last, send them to the next stage."""
    x_TH = _stage_input(step)
    for index, layer in enumerate(step.shard.layers, step.shard.first_layer):
        x_TH = run_layer(step, index, layer, x_TH, _attention, local_mlp)
    if step.rank + 1 < step.plan.num_ranks:
        step.collectives.send_rows(step.rank + 1, step.shard.first_layer, Phase.STAGE_ROWS, x_TH)
    return x_TH


def _stage_input(step: Step) -> Tensor:
    """The input of this stage: embeddings on the first stage, else the rows of the previous stage: [T,H]."""
    spec, embedding, rows = step.spec, step.shard.embedding, step.rows
    if step.rank == 0:
        with step.recorder.timed(Work.EMBEDDING):
            return blocks.finish_embedding(spec, embedding, embedding.word[rows.token_ids].float(), rows.positions)
    before = step.plan.body.layers_of(step.rank - 1, spec.num_layers)
    x_TH = torch.empty(rows.num_rows, spec.hidden_size, device=rows.token_ids.device)
    step.collectives.receive_rows(before.start, Phase.STAGE_ROWS, step.rank - 1, x_TH)
    return x_TH


def _attention(step: Step, index: int, layer: LayerShard, x_TH: Tensor) -> Tensor:
    """Attention of all heads for all rows; keys and values go into the KV cache."""
    with step.recorder.timed(Work.ATTENTION_BLOCK, index):
        return blocks.attention_block(step.spec, index, layer, x_TH, step.rows, step.kv_stored)


STRATEGIES = {"pipeline": run_pipeline}
