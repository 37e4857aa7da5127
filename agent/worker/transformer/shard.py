"""The weights of one rank, assembled from the chunks in the store.

Shapes: H hidden size, d head_dim, a heads of this rank (whole KV groups), w = a * d, q = qkv_width(a), c MLP columns of this
rank, V vocabulary rows of this rank, P positions.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent.worker.runtime import LoadGivenUp
from agent.worker.transformer.kernels.base import Partition, memory_range
from agent.worker.transformer.kernels.plain import FloatMatrix
from agent.worker.transformer.matrices import Matrix, empty_matrix
from hearth.errors import ChunkCorrupt
from hearth.plan.geometry import Span, spans
from hearth.plan.kernels import KernelChoice
from hearth.plan.layer import LAYER_CHUNK_KINDS, ChunkKind, TensorSlice, chunk_slices, layer_matrices, layer_tensors
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import LayerShare
from hearth.wire.messages import ChunkRef


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
        ranges = sorted(
            piece
            for part in _weights_in(self)
            for piece in (map(memory_range, part) if isinstance(part, tuple) else part.memory)
        )
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


def empty_embedding(
    spec: ModelSpec,
    head_rows: Span,
    device: torch.device,
    with_norm_and_positions: bool = True,
    kernels: Sequence[KernelChoice] = (),
    word_rows: Span | None = None,
) -> EmbeddingShard:
    """Allocate the word embeddings of `word_rows` (None: of `head_rows`) and the head.

    Positions, types and norm only with `with_norm_and_positions`.
    """
    word_rows = head_rows if word_rows is None else word_rows
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


def _layer_layout(plan: TransformerPlan, rank: int, index: int) -> LayerLayout:
    spec, body = plan.model, plan.body
    held, mode = body.layer_share(rank, index), body.mode(index)
    heads, columns = spans(body.heads), spans(body.columns)
    return LayerLayout(
        held,
        heads if mode.qkv == "replicated" and held.qkv.size else (held.qkv,),
        heads if mode.out == "replicated" and held.out.size else (),
        columns if mode.mlp == "replicated" and held.columns.size and spec.causal else (),
    )


class _EmbeddingLayout(NamedTuple):
    """The arguments of `empty_embedding` that depend on the plan."""

    head_rows: Span
    word_rows: Span
    with_norm_and_positions: bool


def _embedding_layout(plan: TransformerPlan, rank: int) -> _EmbeddingLayout:
    body = plan.body
    return _EmbeddingLayout(spans(body.vocabulary)[rank], body.word_rows(rank), body.allocates_embedding(rank))


class _HeldPart(NamedTuple):
    """A layer, or the embedding, with the layout and the chunks with which it was loaded."""

    part: LayerShard | EmbeddingShard
    layout: LayerLayout | _EmbeddingLayout
    chunks: frozenset[ChunkRef]


class HeldWeights:
    """Weights of ranks of earlier plans for one model, from which the shard of a new plan takes what it needs too.

    `num_bytes_read` counts the weights that the newest `load_shard` had to read from the store.
    """

    def __init__(self, chunks: Iterable[ChunkRef] = ()) -> None:
        """`chunks`: all that these plans have loaded, also those that are no longer held."""
        self.num_bytes_read = 0
        self._loaded = set(chunks)
        self._parts: dict[int | None, _HeldPart] = {}  # by layer; None: the embedding

    def has_loaded(self, chunk: ChunkRef) -> bool:
        return chunk in self._loaded

    def add_loaded(self, chunks: Iterable[ChunkRef]) -> None:
        """A plan with these chunks has been loaded, or a part of it."""
        self._loaded.update(chunks)

    def put(self, index: int | None, part: _HeldPart) -> None:
        """Hold a layer, or the embedding (None), from now on."""
        self._parts[index] = part

    def take(
        self, index: int | None, layout: LayerLayout | _EmbeddingLayout, chunks: frozenset[ChunkRef]
    ) -> LayerShard | EmbeddingShard | None:
        """A whole layer, or the embedding (None), if it is held as it is needed."""
        held = self._parts.get(index)
        if held is None or (held.layout, held.chunks) != (layout, chunks):
            return None
        del self._parts[index]
        return held.part

    def free(self, index: int | None) -> None:
        """Free the rest of a layer, or of the embedding (None)."""
        self._parts.pop(index, None)

    def free_layers_outside(self, kept: range) -> None:
        for index in self._parts.keys() - {None, *kept}:
            self.free(index)

    def tensors_of(self, spec: ModelSpec, chunk: ChunkRef) -> dict[str, Tensor] | None:
        """The content of a chunk; None if it is not held, or if its weight format has changed its values."""
        found = self._parts.get(_layer_of(chunk))
        if found is None or chunk not in found.chunks:
            return None
        tensors: dict[str, Tensor] = {}
        for piece in chunk_slices(spec, chunk.kind, chunk.grain):
            held, index = _place(spec, found.part, piece)
            values = (
                held[index]
                if isinstance(held, Tensor)
                else held.read(*_rows_and_columns(index))
                if held is not None
                else None
            )
            if values is None:
                return None
            tensors[piece.tensor.name] = values
        return tensors


def held_weights(plan: TransformerPlan, rank: int, chunks: Sequence[ChunkRef], shard: Shard) -> HeldWeights:
    """The weights of a rank whose plan has ended. Empties the shard's list of layers."""
    held, of_part = HeldWeights(chunks), _by_part(chunks)
    held.put(None, _HeldPart(shard.embedding, _embedding_layout(plan, rank), frozenset(of_part[None])))
    for index, layer in enumerate(shard.layers, shard.first_layer):
        held.put(index, _HeldPart(layer, _layer_layout(plan, rank, index), frozenset(of_part[index])))
    shard.layers.clear()
    return held


def load_shard(
    plan: TransformerPlan,
    rank: int,
    chunks: Sequence[ChunkRef],
    path_of: Callable[[str], Path],
    device: torch.device,
    held: HeldWeights | None = None,
    is_given_up: Callable[[], bool] = lambda: False,
    kernels: Sequence[KernelChoice] = (),
) -> Shard:
    """Load a shard layer by layer: what is `held` from memory, the rest from the store. The result is the same.

    Peak memory is the shard and one chunk; with `held`, which is used up, that of the larger of both shards and of a layer or
    the embedding. `kernels` applies to what is not held. Raises ChunkCorrupt, and LoadGivenUp once `is_given_up()`; `held` then
    has what was loaded, too.
    """
    spec, own = plan.model, plan.body.layers_of(rank, plan.model.num_layers)
    of_part = _by_part(chunks)
    held = held if held is not None else HeldWeights()
    held.num_bytes_read = 0
    held.free_layers_outside(range(own.start, own.stop))
    loaded: dict[int | None, _HeldPart] = {}
    try:
        for index in (None, *range(own.start, own.stop)):
            layout = _embedding_layout(plan, rank) if index is None else _layer_layout(plan, rank, index)
            part = held.take(index, layout, frozenset(of_part[index]))
            if part is None:
                part = _empty_part(spec, layout, device, kernels)
                _fill(spec, part, of_part[index], path_of, held, is_given_up)
                held.free(index)
            loaded[index] = _HeldPart(part, layout, frozenset(of_part[index]))
    except LoadGivenUp:
        held.add_loaded(chunks)
        for index, each in loaded.items():
            held.put(index, each)
        raise
    embedding, *layers = (each.part for each in loaded.values())
    assert isinstance(embedding, EmbeddingShard)
    return Shard(spec, embedding, [layer for layer in layers if isinstance(layer, LayerShard)], own.start)


def _empty_part(
    spec: ModelSpec,
    layout: LayerLayout | _EmbeddingLayout,
    device: torch.device,
    kernels: Sequence[KernelChoice],
) -> LayerShard | EmbeddingShard:
    if isinstance(layout, _EmbeddingLayout):
        return empty_embedding(
            spec, layout.head_rows, device, layout.with_norm_and_positions, kernels, layout.word_rows
        )
    return empty_layer(spec, layout, device, kernels)


def _fill(
    spec: ModelSpec,
    part: LayerShard | EmbeddingShard,
    chunks: Sequence[ChunkRef],
    path_of: Callable[[str], Path],
    held: HeldWeights,
    is_given_up: Callable[[], bool],
) -> None:
    """Copy the chunks of a layer, or of the embedding, to their places. Raises ChunkCorrupt, LoadGivenUp."""
    for chunk in chunks:
        if is_given_up():
            raise LoadGivenUp
        tensors = held.tensors_of(spec, chunk)
        if tensors is not None:
            _copy_chunk(spec, part, chunk, tensors.__getitem__)
            continue
        path = path_of(chunk.hash)
        try:
            # The daemon has verified only the chunks that are new here.
            if held.has_loaded(chunk) and hashlib.sha256(path.read_bytes()).hexdigest() != chunk.hash:
                raise RuntimeError("its content has changed")
            with safe_open(path, framework="pt", device="cpu") as stored:
                _copy_chunk(spec, part, chunk, stored.get_tensor)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ChunkCorrupt(chunk=f"{chunk.hash[:12]} ({chunk.kind}, {error})", where=str(path.parent)) from None
        held.num_bytes_read += chunk.num_bytes


def _by_part(chunks: Iterable[ChunkRef]) -> defaultdict[int | None, list[ChunkRef]]:
    """The chunks of each layer, and of the embedding (None)."""
    of_part: defaultdict[int | None, list[ChunkRef]] = defaultdict(list)
    for chunk in chunks:
        of_part[_layer_of(chunk)].append(chunk)
    return of_part


def _layer_of(chunk: ChunkRef) -> int | None:
    """The layer that a chunk belongs to; None: the embedding."""
    return chunk.layer if chunk.kind in LAYER_CHUNK_KINDS else None


def _copy_chunk(
    spec: ModelSpec, part: LayerShard | EmbeddingShard, chunk: ChunkRef, stored: Callable[[str], Tensor]
) -> None:
    for piece in chunk_slices(spec, chunk.kind, chunk.grain):
        into, index = _place(spec, part, piece)
        values = stored(piece.tensor.name)
        if isinstance(into, Tensor):
            into[index].copy_(values)
        elif into is not None:
            into.load(*_rows_and_columns(index), values)


def _place(
    spec: ModelSpec, part: LayerShard | EmbeddingShard, piece: TensorSlice
) -> tuple[Matrix | Tensor | None, tuple[slice, ...]]:
    """The matrix or tensor that holds a chunk's part of a tensor, and its index there. None: it is not allocated."""
    tensor = piece.tensor
    if tensor.role == "norm":
        norm = part.norm if isinstance(part, EmbeddingShard) else part.norms[tensor.part]
        return norm.bias if tensor.name.endswith(".bias") else norm.weight, piece.place()
    if isinstance(part, EmbeddingShard):
        into, first = {
            "word": (part.word, part.word_rows.start),
            "head": (part.head, part.head_rows.start),
            "position": (part.position, 0),
            "type": (part.token_type, 0),
        }[tensor.part]
        return into, piece.place(first)
    return (part.matrices if tensor.role == "matrix" else part.biases)[tensor.part], piece.place(
        _first_index(spec, part, piece)
    )


def _first_index(spec: ModelSpec, layer: LayerShard, piece: TensorSlice) -> int:
    """The index in the whole tensor that would be element 0 of the axis of the matrix or bias that holds this piece."""
    wanted = piece.tensor
    if piece.span is None:
        return 0
    together = [each for each in layer_tensors(spec) if (each.part, each.role) == (wanted.part, wanted.role)]
    start = 0
    for block in layer.qkv_blocks if wanted.kind == "qkv" else (layer.held.by_kind()[wanted.kind],):
        for each in together:
            held = each.span(block)
            if each == wanted and held.start <= piece.span.start < held.stop:
                return held.start - start
            start += held.size
    raise RuntimeError(f"a part of {wanted.name} is not of this rank")


def _rows_and_columns(index: tuple[slice, ...]) -> tuple[slice, slice]:
    rows, *columns = index
    return rows, columns[0] if columns else slice(None)


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
