"""The weights of one rank: what it holds of each layer, its allocation, and any weights for measurements.

Shapes: H hidden size, d head_dim, a heads of this rank (whole KV groups), w = a * d, q = qkv_width(a), c MLP columns of this
rank, V vocabulary rows of this rank, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from agent.worker.transformer.kernels.base import Partition, memory_range
from agent.worker.transformer.kernels.plain import FloatMatrix
from agent.worker.transformer.matrices import Matrix, empty_matrix
from hearth.plan.geometry import Span
from hearth.plan.kernels import KernelChoice
from hearth.plan.layer import ChunkKind, layer_matrices, layer_tensors
from hearth.plan.model_spec import ModelSpec, WeightFormat
from hearth.plan.transformer import LayerShare


@dataclass
class Norm:
    """The parameters of a LayerNorm or an RMS norm."""

    weight: Tensor  # [H], or [d] for one head
    bias: Tensor | None  # None: RMS norm


@dataclass
class LayerShard:
    """This rank's part of one layer, by the parts of `hearth.plan.layer`; `held` gives its heads and columns.

    `qkv_blocks` are the heads of each block of the matrix `qkv`; a block holds Q, K and V of its heads, concatenated. A sharded
    layer has one block. A replicated layer has one per rank, so that one GEMM computes what is sent to a rank. Biases of
    row-parallel matrices are added in the connective, once.
    """

    held: LayerShare
    qkv_blocks: tuple[Span, ...]
    matrices: dict[str, Matrix]  # qkv [sum of q, H], o [H, w], gate and up [c, H], down [H, c]
    biases: dict[str, Tensor]  # by the matrix, if it has one
    norms: dict[str, Norm]

    def qkv_rows(self, spec: ModelSpec, block: int) -> slice:
        """The rows of a block in the matrix `qkv` and its bias."""
        start = sum(spec.qkv_width(before.size) for before in self.qkv_blocks[:block])
        return slice(start, start + spec.qkv_width(self.qkv_blocks[block].size))


@dataclass
class EmbeddingShard:
    """This rank's part of the embedding. `norm` is the embedding's norm (BERT), or the final norm (decoders)."""

    word_rows: Span  # the token ids whose word embeddings this rank holds, V' of them
    head_rows: Span  # those whose logits it computes, V of them, all among `word_rows`
    word: Tensor  # [V', H]
    head: Matrix | None  # [V, H]; a decoder's output head; if tied, these rows of the word embedding
    position: Tensor | None  # [P, H]; None: rotary positions
    token_type: Tensor | None  # [types, H]
    norm: Norm


@dataclass
class Shard:
    """All weights of a rank. `layers` begin with `first_layer`: in a pipeline, a rank holds only its stage."""

    spec: ModelSpec
    embedding: EmbeddingShard
    layers: list[LayerShard]
    first_layer: int = 0

    def num_bytes(self) -> int:
        """Memory of all weights in bytes; tied weights, which may be a part of the word embeddings, count once."""
        parts = (map(memory_range, part) if isinstance(part, tuple) else part.memory for part in _weights_in(self))
        ranges = sorted(chain.from_iterable(parts))
        total = counted_to = 0
        for start, size in ranges:
            total += max(start + size - max(start, counted_to), 0)
            counted_to = max(counted_to, start + size)
        return total

    def weight_error(self) -> float:
        """Relative RMS error of the matrices against the checkpoint, due to their weight format."""
        errors = [part.quantisation_error for part in _weights_in(self) if isinstance(part, Matrix)]
        norm = sum(error.squared_norm for error in errors)
        return math.sqrt(sum(error.squared_error for error in errors) / norm) if norm else 0.0


class _Allocator:
    """Allocates uninitialised weights; weights that are not in the rank's chunks are never read."""

    def __init__(self, spec: ModelSpec, device: torch.device, kernels: Sequence[KernelChoice]) -> None:
        self._spec = spec
        self._device = device
        self._kernels = kernels

    def matrix(self, num_outputs: int, num_inputs: int, partition: Partition | None = None) -> Matrix:
        return empty_matrix(num_outputs, num_inputs, self._spec.weights, self._device, partition, self._kernels)

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def tensor_if(self, condition: bool, *shape: int) -> Tensor | None:
        return self.tensor(*shape) if condition else None

    def norm(self, size: int) -> Norm:
        return Norm(self.tensor(size), self.tensor_if(self._spec.norm == "layer", size))


class LayerLayout(NamedTuple):
    """The division of a layer that a plan prescribes.

    `out_parts` are groups of heads whose outputs are projected separately, `mlp_parts` groups of columns that are used
    separately; if empty, the matrices are used as a whole.
    """

    held: LayerShare
    qkv_blocks: tuple[Span, ...]
    out_parts: tuple[Span, ...] = ()
    mlp_parts: tuple[Span, ...] = ()


def empty_layer(
    spec: ModelSpec, layout: LayerLayout, device: torch.device, kernels: Sequence[KernelChoice] = ()
) -> LayerShard:
    """Allocate a layer. `kernels`: the measured choice."""
    new, held = _Allocator(spec, device, kernels), layout.held
    groups: dict[ChunkKind, tuple[Span, ...]] = {
        "qkv": layout.qkv_blocks,
        "out": layout.out_parts or (held.out,),
        "mlp": layout.mlp_parts or (held.columns,),
    }
    layer = LayerShard(held, layout.qkv_blocks, {}, {}, {})
    for matrix in layer_matrices(spec):
        sizes = (matrix.size(group.size) for group in groups[matrix.kind] if group.size)
        partition = Partition(matrix.axis, tuple(accumulate(sizes, initial=0)))
        shape = list(matrix.shape)
        shape[matrix.axis] = partition.borders[-1]
        layer.matrices[matrix.part] = new.matrix(shape[0], shape[1], partition)
    for tensor in layer_tensors(spec):
        if tensor.role == "bias" and tensor.part not in layer.biases:
            layer.biases[tensor.part] = new.tensor(layer.matrices[tensor.part].shape[0])
        elif tensor.role == "norm" and tensor.part not in layer.norms:
            layer.norms[tensor.part] = Norm(new.tensor(*tensor.shape), None)
        elif tensor.role == "norm":
            layer.norms[tensor.part].bias = new.tensor(*tensor.shape)
    return layer


class EmbeddingLayout(NamedTuple):
    """The part of the embedding that a plan prescribes. Positions, types and norm only with `with_norm_and_positions`."""

    head_rows: Span
    word_rows: Span
    with_norm_and_positions: bool


def empty_embedding(
    spec: ModelSpec, layout: EmbeddingLayout, device: torch.device, kernels: Sequence[KernelChoice] = ()
) -> EmbeddingShard:
    """Allocate the word embeddings, the head and the rest of the embedding."""
    head_rows, word_rows, with_norm_and_positions = layout
    new = _Allocator(spec, device, kernels)
    H = spec.hidden_size
    num_positions = spec.max_positions + spec.position_offset if with_norm_and_positions else 0
    word_type = getattr(torch, spec.weights) if spec.weights in ("float32", "float16") else torch.bfloat16
    word = torch.empty(word_rows.size, H, dtype=word_type, device=device)
    head: Matrix | None = None
    if spec.causal:
        whole = Partition(0, (0, head_rows.size)) if kernels else None
        tied = word[head_rows.start - word_rows.start : head_rows.stop - word_rows.start]
        head = new.matrix(head_rows.size, H, whole) if spec.has_separate_head else FloatMatrix(tied)
    return EmbeddingShard(
        word_rows=word_rows,
        head_rows=head_rows,
        word=word,
        head=head,
        position=new.tensor_if(spec.rotary is None, num_positions, H),
        token_type=new.tensor_if(spec.type_vocab_size > 0, spec.type_vocab_size if with_norm_and_positions else 0, H),
        norm=new.norm(H if with_norm_and_positions else 0),
    )


def _weights_in(part: object) -> Iterator[Matrix | tuple[Tensor]]:
    """All matrices of a part, and all tensors that are not matrices."""
    if isinstance(part, Tensor):
        yield (part,)
    elif isinstance(part, Matrix):
        yield part
    elif isinstance(part, list | dict):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _weights_in(item)
    elif isinstance(part, LayerShard | EmbeddingShard | Shard | Norm):
        for name in part.__dataclass_fields__:
            yield from _weights_in(getattr(part, name))


def filled_layer(spec: ModelSpec, device: torch.device, kernels: Sequence[KernelChoice] = ()) -> LayerShard:
    """A whole layer with constant matrices, norm weights of 1 and zeros in all other tensors.

    For measurements: the values do not affect the time of a product.
    """
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
