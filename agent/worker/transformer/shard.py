"""The weights of one rank, assembled from the chunks in the store.

Shapes: H hidden size, d head_dim, a heads of this rank (whole KV groups), w = a * d, q = qkv_width(a), c MLP columns of this
rank, V vocabulary rows of this rank, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent.worker.transformer.matrices import FloatMatrix, Matrix, Partition, empty_matrix, memory_range
from hearth.errors import ChunkCorrupt
from hearth.plan.chunks import LAYER_CHUNK_KINDS, chunk_slices
from hearth.plan.geometry import Span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import LayerShare
from hearth.wire.messages import ChunkRef

_GetTensor = Callable[[str], Tensor]
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

    vocabulary: Span  # the token ids whose rows this rank holds
    word: Tensor  # [V, H]
    head: Matrix | None  # [V, H]; a decoder's output head; if tied, the word embedding
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
        """Memory of all weights in bytes; tied weights count once."""
        tensors = (
            tensor for part in _weights_in(self) for tensor in (part if isinstance(part, tuple) else part.tensors)
        )
        return sum(dict(map(memory_range, tensors)).values())

    def weight_error(self) -> float:
        """Relative RMS error of the matrices against the checkpoint, due to their weight format."""
        errors = [part.quantisation_error for part in _weights_in(self) if isinstance(part, Matrix)]
        norm = sum(error.squared_norm for error in errors)
        return math.sqrt(sum(error.squared_error for error in errors) / norm) if norm else 0.0


class _Allocator:
    """Allocates uninitialised weights; weights that are not in the rank's chunks are never read."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device

    def matrix(self, num_outputs: int, num_inputs: int, partition: Partition | None = None) -> Matrix:
        return empty_matrix(num_outputs, num_inputs, self._spec.weights, self._device, partition)

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
) -> LayerShard:
    """Allocate a layer.

    `out_parts` are groups of heads whose outputs are projected separately, `mlp_parts` groups of columns that are used
    separately; if empty, the matrices are used as a whole.
    """
    new = _Allocator(spec, device)
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
    spec: ModelSpec, vocabulary: Span, device: torch.device, with_norm_and_positions: bool = True
) -> EmbeddingShard:
    """Allocate the word embedding and the head; positions, types and norm only with `with_norm_and_positions`."""
    new = _Allocator(spec, device)
    H = spec.hidden_size
    num_positions = spec.max_positions + spec.position_offset if with_norm_and_positions else 0
    word_type = getattr(torch, spec.weights) if spec.weights in ("float32", "float16") else torch.bfloat16
    word = torch.empty(vocabulary.size, H, dtype=word_type, device=device)
    head: Matrix | None = None
    if spec.causal:
        head = new.matrix(vocabulary.size, H) if spec.has_separate_head else FloatMatrix(word)
    return EmbeddingShard(
        vocabulary=vocabulary,
        word=word,
        head=head,
        position=new.tensor_if(spec.rotary is None, num_positions, H),
        token_type=new.tensor_if(spec.type_vocab_size > 0, spec.type_vocab_size if with_norm_and_positions else 0, H),
        norm=new.norm(H if with_norm_and_positions else 0),
    )


def empty_shard(plan: TransformerPlan, rank: int, device: torch.device) -> Shard:
    """Allocate all weights of a rank."""
    spec, body = plan.model, plan.body
    layers, own = [], body.layers_of(rank, spec.num_layers)
    for index in range(own.start, own.stop):
        held, mode = body.layer_share(rank, index), body.mode(index)
        heads, columns = spans(body.heads), spans(body.columns)
        layers.append(
            empty_layer(
                spec,
                held,
                heads if mode.qkv == "replicated" and held.qkv.size else (held.qkv,),
                device,
                heads if mode.out == "replicated" and held.out.size else (),
                columns if mode.mlp == "replicated" and held.columns.size and spec.causal else (),
            )
        )
    embedding = empty_embedding(spec, spans(body.vocabulary)[rank], device, body.allocates_embedding(rank))
    return Shard(spec, embedding, layers, own.start)


def load_shard(
    plan: TransformerPlan, rank: int, chunks: tuple[ChunkRef, ...], path_of: Callable[[str], Path], device: torch.device
) -> Shard:
    """Load a shard chunk by chunk, so that peak memory is the shard and one chunk. Raises ChunkCorrupt."""
    shard = empty_shard(plan, rank, device)
    for chunk in chunks:
        path = path_of(chunk.hash)
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                _copy_chunk(shard, chunk, stored.get_tensor)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ChunkCorrupt(chunk=f"{chunk.hash[:12]} ({chunk.kind}, {error})", where=str(path.parent)) from None
    return shard


def _copy_chunk(shard: Shard, chunk: ChunkRef, stored: _GetTensor) -> None:
    destinations = _qkv_destinations(shard, chunk) if chunk.kind == "qkv" else _destinations(shard, chunk)
    for part in chunk_slices(shard.spec, chunk.kind, chunk.grain):
        into, first = destinations[part.tensor]
        values, rows, columns = stored(part.tensor), _local_slice(part.rows, first), _local_slice(part.columns, first)
        if isinstance(into, Tensor):
            into[rows].copy_(values)
        elif into is not None:
            into.load(rows, columns, values)


def _local_slice(part: Span | None, first: int) -> slice:
    return slice(None) if part is None else slice(part.start - first, part.stop - first)


def _destinations(shard: Shard, chunk: ChunkRef) -> _Destinations:
    embedding, vocabulary = shard.embedding, shard.embedding.vocabulary.start
    if chunk.kind not in LAYER_CHUNK_KINDS:
        return {
            "word.weight": (embedding.word, vocabulary),
            "head.weight": (embedding.head, vocabulary),
            "position.weight": (embedding.position, 0),
            "type.weight": (embedding.token_type, 0),
            **_norm_destinations("final" if shard.spec.causal else "norm", embedding.norm),
        }
    layer = shard.layers[chunk.layer - shard.first_layer]
    columns = layer.held.columns.start
    return {
        "o.weight": (layer.out_weight, layer.held.out.start * shard.spec.head_dim),
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


def _qkv_destinations(shard: Shard, chunk: ChunkRef) -> _Destinations:
    """Destinations of a `qkv` chunk, in the block that contains its KV group."""
    spec, layer = shard.spec, shard.layers[chunk.layer - shard.first_layer]
    for index, block in enumerate(layer.qkv_blocks):
        if block.start <= chunk.grain * spec.group_size < block.stop:
            start, destinations = layer.qkv_rows(spec, index).start, _Destinations()
            for name, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)):
                first = width(block.start) - start
                destinations.update(
                    {f"{name}.weight": (layer.qkv_weight, first), f"{name}.bias": (layer.qkv_bias, first)}
                )
                start += width(block.size)
            return destinations
    raise RuntimeError(f"the KV group {chunk.grain} is not of this rank")


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
