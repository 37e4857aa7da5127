"""Layers and matrices of any weights, for measurements: the values do not affect the time of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import Partition
from agent.worker.transformer.matrices import Matrix, empty_matrix
from agent.worker.transformer.shard import EmbeddingShard, LayerShard, Norm, empty_embedding, empty_layer
from hearth.plan.geometry import Span
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.transformer import LayerShare


def filled_layer(spec: ModelSpec, device: torch.device, kernels: Sequence[KernelChoice] = ()) -> LayerShard:
    """A whole layer with constant matrices, norm weights of 1 and zeros in all other tensors."""
    heads = Span(0, spec.num_heads)
    layer = empty_layer(spec, LayerShare(heads, heads, Span(0, spec.ffn_size), True), (heads,), device, kernels=kernels)
    for matrix in layer_matrices(layer):
        matrix.fill()
    _set_neutral_values(layer)
    return layer


def filled_matrix(
    num_outputs: int,
    num_inputs: int,
    device: torch.device,
    weights: WeightFormat,
    kernels: Sequence[KernelChoice],
) -> Matrix:
    """A constant matrix that is used as a whole."""
    whole = Partition(0, (0, num_outputs))
    matrix = empty_matrix(num_outputs, num_inputs, weights, device, whole, kernels)
    matrix.fill()
    return matrix


def neutral_embedding(spec: ModelSpec, device: torch.device) -> EmbeddingShard:
    """An embedding without vocabulary, norm weights of 1 and zeros in all other tensors."""
    embedding = empty_embedding(spec, Span(0, 0), device)
    _set_neutral_values(embedding)
    return embedding


def _set_neutral_values(part: LayerShard | EmbeddingShard | Norm) -> None:
    """Set norm weights to 1 and all other tensors to 0."""
    for name in part.__dataclass_fields__:
        value = getattr(part, name)
        if isinstance(value, Norm):
            _set_neutral_values(value)
            value.weight.fill_(1.0)
        elif isinstance(value, Tensor):
            value.zero_()


def without_matrices(layer: LayerShard, device: torch.device) -> LayerShard:
    """A copy of the layer with empty matrices; each measurement brings its own."""
    none = empty_matrix(0, 0, "float32", device)
    gate = None if layer.gate_weight is None else none
    return replace(layer, qkv_weight=none, out_weight=none, gate_weight=gate, up_weight=none, down_weight=none)


def layer_matrices(layer: LayerShard) -> list[Matrix]:
    """The weight matrices of a layer."""
    matrices = (layer.qkv_weight, layer.out_weight, layer.gate_weight, layer.up_weight, layer.down_weight)
    return [matrix for matrix in matrices if matrix is not None]
