"""Layers and matrices of any weights, for measurements: the values do not affect the time of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from agent.worker.transformer.kernels.base import Partition
from agent.worker.transformer.matrices import Matrix, empty_matrix
from agent.worker.transformer.shard import (
    EmbeddingLayout,
    EmbeddingShard,
    LayerLayout,
    LayerShard,
    Norm,
    empty_embedding,
    empty_layer,
)
from hearth.plan.geometry import Span
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.transformer import LayerShare


def filled_layer(spec: ModelSpec, device: torch.device, kernels: Sequence[KernelChoice] = ()) -> LayerShard:
    """A whole layer with constant matrices, norm weights of 1 and zeros in all other tensors."""
    heads = Span(0, spec.num_heads)
    layer = empty_layer(
        spec, LayerLayout(LayerShare(heads, heads, Span(0, spec.ffn_size), True), (heads,)), device, kernels
    )
    for matrix in layer.matrices.values():
        matrix.fill()
    for bias in layer.biases.values():
        bias.zero_()
    for norm in layer.norms.values():
        _make_neutral(norm)
    return layer


def filled_matrix(
    num_outputs: int, num_inputs: int, device: torch.device, weights: WeightFormat, kernels: Sequence[KernelChoice]
) -> Matrix:
    """A constant matrix that is used as a whole."""
    whole = Partition(0, (0, num_outputs))
    matrix = empty_matrix(num_outputs, num_inputs, weights, device, whole, kernels)
    matrix.fill()
    return matrix


def neutral_embedding(spec: ModelSpec, device: torch.device) -> EmbeddingShard:
    """An embedding without vocabulary, norm weights of 1 and zeros in all other tensors."""
    embedding = empty_embedding(spec, EmbeddingLayout(Span(0, 0), Span(0, 0), with_norm_and_positions=True), device)
    for tensor in (embedding.position, embedding.token_type):
        if tensor is not None:
            tensor.zero_()
    _make_neutral(embedding.norm)
    return embedding


def _make_neutral(norm: Norm) -> None:
    """Set the norm's weight to 1 and its bias to 0."""
    norm.weight.fill_(1.0)
    if norm.bias is not None:
        norm.bias.zero_()


def without_matrices(layer: LayerShard, device: torch.device) -> LayerShard:
    """A copy of the layer with empty matrices; each measurement brings its own."""
    return replace(layer, matrices=dict.fromkeys(layer.matrices, empty_matrix(0, 0, "float32", device)))
