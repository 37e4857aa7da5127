"""Decoding: the newest token of each running sequence on one rank, with tensor parallelism and one-shot AllReduce.

Few rows cannot be split, and the hops of a ring would dominate. So every rank computes norms and residuals of all B rows,
and sends its partial sums directly to every peer. Whatever the strategy of the prefill, a rank uses only its own heads and
columns; of replicated weights it uses that part.

Shapes: B rows, one per sequence and one per drafted token; H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.shard import LayerShard, Shard
from agent.worker.transformer.strategies.step import Step, embed_rows, run_layer
from hearth.plan.geometry import Span
from hearth.plan.layer import layer_matrices
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase, Work
from hearth.plan.plan import TransformerPlan


def decode_layers(plan: TransformerPlan, rank: int, shard: Shard) -> list[LayerShard]:
    """Views of the weights that this rank uses for decoding: its own heads and columns in each of its layers."""
    heads, columns = plan.body.decode_share(rank)
    return [_decode_part(plan.model, layer, heads, columns) for layer in shard.layers]


def _decode_part(spec: ModelSpec, layer: LayerShard, heads: Span, columns: Span) -> LayerShard:
    held = layer.held
    if heads == held.qkv and heads == held.out and columns == held.columns and len(layer.qkv_blocks) == 1:
        return layer
    used = {
        "qkv": layer.qkv_rows(spec, layer.qkv_blocks.index(heads)) if heads.size else slice(0, 0),
        "out": _local_slice(heads, held.out, spec.head_dim),
        "mlp": _local_slice(columns, held.columns, 1),
    }
    matrices, biases = {}, dict(layer.biases)
    for matrix in layer_matrices(spec):
        whole, part = layer.matrices[matrix.part], used[matrix.kind]
        matrices[matrix.part] = whole.rows(part) if matrix.axis == 0 else whole.columns(part)
        if matrix.axis == 0 and matrix.part in biases:
            biases[matrix.part] = biases[matrix.part][part]
    return replace(layer, qkv_blocks=(heads,), matrices=matrices, biases=biases)


def _local_slice(part: Span, held: Span, width: int) -> slice:
    start = (part.start - held.start) * width if part.size else 0
    return slice(start, start + part.size * width)


def run_decode_step(step: Step, layers: list[LayerShard]) -> Tensor:
    """Run one decoding step. Returns the hidden states after the final norm [B,H], on every rank.

    Call it in torch's inference mode.
    """
    spec, body, timed = step.spec, step.plan.body, step.recorder.timed
    with_heads = [rank for rank, heads in enumerate(body.heads) if heads]
    with_columns = [rank for rank, columns in enumerate(body.columns) if columns]

    def attention(step: Step, index: int, layer: LayerShard, x_BH: Tensor) -> Tensor:
        y_BH = None
        if step.heads:
            with timed(Work.ATTENTION_BLOCK, index):
                y_BH = blocks.attention_block(spec, index, layer, x_BH, step.rows)
        return step.collectives.one_shot_all_reduce(index, Phase.SUM_ATTENTION, y_BH, with_heads, x_BH)

    def mlp(step: Step, index: int, layer: LayerShard, x_BH: Tensor) -> Tensor:
        y_BH = None
        if layer.matrices["up"].shape[0]:
            with timed(Work.MLP_BLOCK, index):
                y_BH = blocks.mlp_block(spec, layer, x_BH)
        return step.collectives.one_shot_all_reduce(index, Phase.SUM_MLP, y_BH, with_columns, x_BH)

    x_BH = embed_rows(step, Span(0, step.rows.num_rows), replicated=True)
    for index, layer in enumerate(layers):
        x_BH = run_layer(step, index, layer, x_BH, attention, mlp)
    return blocks.normalise(spec, x_BH, step.shard.embedding.norm)
