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

from agent.worker.loading import LoadGivenUp
from agent.worker.transformer.kernels.base import Partition, memory_range
from agent.worker.transformer.kernels.plain import FloatMatrix
from agent.worker.transformer.matrices import Matrix, empty_matrix
from hearth.errors import ChunkCorrupt
from hearth.plan.chunks import LAYER_CHUNK_KINDS, chunk_slices
from hearth.plan.geometry import Span, spans
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import LayerShare
from hearth.wire.messages import ChunkRef

# For each tensor of a chunk: the destination, and the index of its first row (of row-parallel weights: column) on this rank.
_Destinations = dict[str, tuple[Matrix | Tensor | None, int]]


@dataclass
class Norm:
    """The parameters of a LayerNorm or an RMS norm."""

    weight: Tensor  # [H], or [d] for one head
    bias: Tensor | None  # None: RMS norm


@dataclass
class LayerShard:
    """This rank's part of one layer; `held` gives its heads and columns. Parts that the model does not have are None.

    `qkv_blocks` are the heads of each block of `qkv_weight`; a block holds Q, K and V of its heads, concatenated. A sharded
    layer has one block. A replicated layer has one per rank, so that one GEMM computes what is sent to a rank. Biases of
    row-parallel matrices are added in the connective, once.
    """

    held: LayerShare
    qkv_blocks: tuple[Span, ...]
    qkv_weight: Matrix  # [sum of q, H]
    qkv_bias: Tensor | None  # [sum of q]
    q_norm: Norm | None
    k_norm: Norm | None
    out_weight: Matrix  # [H, w]
    out_bias: Tensor | None  # [H]
    norm1: Norm
    gate_weight: Matrix | None  # [c, H]
    gate_bias: Tensor | None  # [c]
    up_weight: Matrix  # [c, H]
    up_bias: Tensor | None  # [c]
    down_weight: Matrix  # [H, c]
    down_bias: Tensor | None  # [H]
    norm2: Norm

    def qkv_rows(self, spec: ModelSpec, block: int) -> slice:
        """The rows of a block in `qkv_weight` and `qkv_bias`."""
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


def empty_layer(
    spec: ModelSpec,
    held: LayerShare,
    qkv_blocks: tuple[Span, ...],
    device: torch.device,
    out_parts: tuple[Span, ...] = (),
    mlp_parts: tuple[Span, ...] = (),
    kernels: Sequence[KernelChoice] = (),
) -> LayerShard:
    """Allocate a layer.

    `out_parts` are groups of heads whose outputs are projected separately, `mlp_parts` groups of columns that are used
    separately; if empty, the matrices are used as a whole. `kernels`: the measured choice.
    """
    new = _Allocator(spec, device, kernels)
    H, d, c = spec.hidden_size, spec.head_dim, held.columns.size
    qkv = _partition(0, qkv_blocks, spec.qkv_width)
    out = _partition(1, out_parts or (held.out,), lambda heads: heads * d)
    columns = mlp_parts or (held.columns,)
    up, down = _partition(0, columns), _partition(1, columns)
    width = qkv.borders[-1]
    return LayerShard(
        held=held,
        qkv_blocks=qkv_blocks,
        qkv_weight=new.matrix(width, H, qkv),
        qkv_bias=new.tensor_if(spec.qkv_bias, width),
        q_norm=Norm(new.tensor(d), None) if spec.qk_norm else None,
        k_norm=Norm(new.tensor(d), None) if spec.qk_norm else None,
        out_weight=new.matrix(H, held.out.size * d, out),
        out_bias=new.tensor_if(spec.out_bias, H),
        norm1=new.norm(H),
        gate_weight=new.matrix(c, H, up) if spec.gated else None,
        gate_bias=new.tensor_if(spec.gated and spec.mlp_bias, c),
        up_weight=new.matrix(c, H, up),
        up_bias=new.tensor_if(spec.mlp_bias, c),
        down_weight=new.matrix(H, c, down),
        down_bias=new.tensor_if(spec.mlp_bias, H),
        norm2=new.norm(H),
    )


def _partition(axis: int, parts: tuple[Span, ...], width: Callable[[int], int] = int) -> Partition:
    """The pieces of a matrix that consists of these parts, concatenated; `width` converts a part's size to elements."""
    return Partition(axis, tuple(accumulate((width(part.size) for part in parts if part.size), initial=0)))


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
        tied = word[_local_slice(head_rows, word_rows.start)]
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


class _LayerLayout(NamedTuple):
    """The arguments of `empty_layer` that depend on the plan."""

    held: LayerShare
    qkv_blocks: tuple[Span, ...]
    out_parts: tuple[Span, ...]
    mlp_parts: tuple[Span, ...]


def _layer_layout(plan: TransformerPlan, rank: int, index: int) -> _LayerLayout:
    spec, body = plan.model, plan.body
    held, mode = body.layer_share(rank, index), body.mode(index)
    heads, columns = spans(body.heads), spans(body.columns)
    return _LayerLayout(
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
    layout: _LayerLayout | _EmbeddingLayout
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
        self, index: int | None, layout: _LayerLayout | _EmbeddingLayout, chunks: frozenset[ChunkRef]
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
        destinations = _destinations(spec, found.part, chunk)
        tensors: dict[str, Tensor] = {}
        for piece in chunk_slices(spec, chunk.kind, chunk.grain):
            held, first = destinations[piece.tensor]
            rows, columns = _local_slice(piece.rows, first), _local_slice(piece.columns, first)
            values = held[rows] if isinstance(held, Tensor) else held.read(rows, columns) if held is not None else None
            if values is None:
                return None
            tensors[piece.tensor] = values
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
    layout: _LayerLayout | _EmbeddingLayout,
    device: torch.device,
    kernels: Sequence[KernelChoice],
) -> LayerShard | EmbeddingShard:
    if isinstance(layout, _EmbeddingLayout):
        return empty_embedding(
            spec, layout.head_rows, device, layout.with_norm_and_positions, kernels, layout.word_rows
        )
    return empty_layer(spec, layout.held, layout.qkv_blocks, device, layout.out_parts, layout.mlp_parts, kernels)


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
    destinations = _destinations(spec, part, chunk)
    for piece in chunk_slices(spec, chunk.kind, chunk.grain):
        into, first = destinations[piece.tensor]
        values, rows, columns = (
            stored(piece.tensor),
            _local_slice(piece.rows, first),
            _local_slice(piece.columns, first),
        )
        if isinstance(into, Tensor):
            into[rows].copy_(values)
        elif into is not None:
            into.load(rows, columns, values)


def _local_slice(part: Span | None, first: int) -> slice:
    return slice(None) if part is None else slice(part.start - first, part.stop - first)


def _destinations(spec: ModelSpec, part: LayerShard | EmbeddingShard, chunk: ChunkRef) -> _Destinations:
    if isinstance(part, EmbeddingShard):
        return {
            "word.weight": (part.word, part.word_rows.start),
            "head.weight": (part.head, part.head_rows.start),
            "position.weight": (part.position, 0),
            "type.weight": (part.token_type, 0),
            **_norm_destinations("final" if spec.causal else "norm", part.norm),
        }
    layer = part
    if chunk.kind == "qkv":
        return _qkv_destinations(spec, layer, chunk.grain)
    columns = layer.held.columns.start
    return {
        "o.weight": (layer.out_weight, layer.held.out.start * spec.head_dim),
        "o.bias": (layer.out_bias, 0),
        "gate.weight": (layer.gate_weight, columns),
        "gate.bias": (layer.gate_bias, columns),
        "up.weight": (layer.up_weight, columns),
        "up.bias": (layer.up_bias, columns),
        "down.weight": (layer.down_weight, columns),
        "down.bias": (layer.down_bias, 0),
        **_norm_destinations("norm1", layer.norm1),
        **_norm_destinations("norm2", layer.norm2),
        **_norm_destinations("q_norm", layer.q_norm),
        **_norm_destinations("k_norm", layer.k_norm),
    }


def _norm_destinations(name: str, norm: Norm | None) -> _Destinations:
    return {} if norm is None else {f"{name}.weight": (norm.weight, 0), f"{name}.bias": (norm.bias, 0)}


def _qkv_destinations(spec: ModelSpec, layer: LayerShard, group: int) -> _Destinations:
    """Destinations of a `qkv` chunk, in the block that contains its KV group."""
    for index, block in enumerate(layer.qkv_blocks):
        if block.start <= group * spec.group_size < block.stop:
            start, destinations = layer.qkv_rows(spec, index).start, _Destinations()
            for name, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)):
                first = width(block.start) - start
                destinations.update(
                    {f"{name}.weight": (layer.qkv_weight, first), f"{name}.bias": (layer.qkv_bias, first)}
                )
                start += width(block.size)
            return destinations
    raise RuntimeError(f"the KV group {group} is not of this rank")


def _weights_in(part: object) -> Iterator[Matrix | tuple[Tensor]]:
    """All matrices of a part, and all tensors that are not matrices."""
    if isinstance(part, Tensor):
        yield (part,)
    elif isinstance(part, Matrix):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _weights_in(item)
    elif isinstance(part, LayerShard | EmbeddingShard | Shard | Norm):
        for name in part.__dataclass_fields__:
            yield from _weights_in(getattr(part, name))
