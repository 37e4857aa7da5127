"""Loading of a rank's shard from the chunks in the store, and from the weights of earlier plans."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent.worker.runtime import LoadGivenUp
from agent.worker.transformer.matrices import Matrix
from agent.worker.transformer.shard import (
    EmbeddingLayout,
    EmbeddingShard,
    LayerLayout,
    LayerShard,
    Shard,
    empty_embedding,
    empty_layer,
)
from hearth.errors import ChunkCorrupt
from hearth.plan.geometry import spans
from hearth.plan.kernels import KernelChoice
from hearth.plan.layer import LAYER_CHUNK_KINDS, TensorSlice, chunk_slices, layer_tensors
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import ChunkRef


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


def _embedding_layout(plan: TransformerPlan, rank: int) -> EmbeddingLayout:
    body = plan.body
    return EmbeddingLayout(spans(body.vocabulary)[rank], body.word_rows(rank), body.allocates_embedding(rank))


class _HeldPart(NamedTuple):
    """A layer, or the embedding, with the layout and the chunks with which it was loaded."""

    part: LayerShard | EmbeddingShard
    layout: LayerLayout | EmbeddingLayout
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
        self, index: int | None, layout: LayerLayout | EmbeddingLayout, chunks: frozenset[ChunkRef]
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
            values = _place(spec, found.part, piece).read()
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
                if isinstance(layout, EmbeddingLayout):
                    part = empty_embedding(spec, layout, device, kernels)
                else:
                    part = empty_layer(spec, layout, device, kernels)
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
        _place(spec, part, piece).write(stored(piece.tensor.name))


class _Place(NamedTuple):
    """Where a rank holds a chunk's part of a tensor: a matrix or tensor (None: not allocated), and the index in it."""

    into: Matrix | Tensor | None
    where: tuple[slice, ...]

    def read(self) -> Tensor | None:
        """The values; None if there are none, or if their weight format has changed them."""
        if isinstance(self.into, Tensor):
            return self.into[self.where]
        return None if self.into is None else self.into.read(*self._rows_and_columns)

    def write(self, values: Tensor) -> None:
        if isinstance(self.into, Tensor):
            self.into[self.where].copy_(values)
        elif self.into is not None:
            self.into.load(*self._rows_and_columns, values)

    @property
    def _rows_and_columns(self) -> tuple[slice, slice]:
        rows, *columns = self.where
        return rows, columns[0] if columns else slice(None)


def _place(spec: ModelSpec, part: LayerShard | EmbeddingShard, piece: TensorSlice) -> _Place:
    tensor = piece.tensor
    if tensor.role == "norm":
        norm = part.norm if isinstance(part, EmbeddingShard) else part.norms[tensor.part]
        return _Place(norm.bias if tensor.name.endswith(".bias") else norm.weight, piece.place())
    if isinstance(part, EmbeddingShard):
        into, first = {
            "word": (part.word, part.word_rows.start),
            "head": (part.head, part.head_rows.start),
            "position": (part.position, 0),
            "type": (part.token_type, 0),
        }[tensor.part]
        return _Place(into, piece.place(first))
    held = part.matrices if tensor.role == "matrix" else part.biases
    return _Place(held[tensor.part], piece.place(_first_index(spec, part, piece)))


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
