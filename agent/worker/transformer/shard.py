"""The weights of one rank, put together from the chunks in the store.

H hidden, d head_dim, a heads of this rank (whole KV groups), w = a * d, q = qkv_width(a), c MLP columns of this rank,
V vocabulary rows of this rank, P positions.
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

from agent.worker.transformer.matrices import Floats, Int4, Int8, Matrix, Packed, Pieces, empty_matrix, memory_of
from hearth.errors import ChunkCorrupt
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grain_span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import Holding
from hearth.wire.messages import ChunkRef

_Stored = Callable[[str], Tensor]
_ALL = slice(None)


@dataclass
class Norm:
    weight: Tensor  # [H], or [d] for one head
    bias: Tensor | None  # none: RMS norm


@dataclass
class LayerShard:
    """One layer: `held` says which heads and columns. Row-parallel biases belong to the connective: they are added once.

    `qkv_blocks` are the heads of each block of `qkv_weight`: a block is Q, K and V of some heads, one after the other.
    Sharded, there is one block; replicated, one for each rank, so that what a rank is sent is one GEMM. What the model
    does not have is None.
    """

    held: Holding
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
        """Where a block lies in `qkv_weight` and `qkv_bias`."""
        start = sum(spec.qkv_width(before.size) for before in self.qkv_blocks[:block])
        return slice(start, start + spec.qkv_width(self.qkv_blocks[block].size))


@dataclass
class EmbeddingShard:
    """`norm` is the embedding's own (BERT) or the one after the last layer (decoders)."""

    vocabulary: Span  # the token ids whose rows are here
    word: Tensor  # [V, H]
    head: Matrix | None  # [V, H]; a decoder's output head, the word rows themselves where they are tied
    position: Tensor | None  # [P, H]; none: rotary
    token_type: Tensor | None  # [types, H]
    norm: Norm


@dataclass
class Shard:
    """`layers` are those from `first_layer` on: in a pipeline a rank holds some of them, else all."""

    spec: ModelSpec
    embedding: EmbeddingShard
    layers: list[LayerShard]
    first_layer: int = 0

    def num_bytes(self) -> int:
        """Tied weights count once."""
        tensors = (tensor for part in _parts(self) for tensor in (part if isinstance(part, tuple) else part.tensors))
        return sum(dict(map(memory_of, tensors)).values())

    def weight_error(self) -> float:
        """How far the matrices are off the checkpoint's, for the format that they are kept in: relative, root mean square."""
        losses = [part.loss for part in _parts(self) if isinstance(part, Floats | Packed | Int8 | Int4)]
        norm = sum(loss.squared_norm for loss in losses)
        return math.sqrt(sum(loss.squared_error for loss in losses) / norm) if norm else 0.0


class _Empty:
    """Memory for weights, uninitialised: what is not in the rank's chunks is never read."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device

    def matrix(self, num_outputs: int, num_inputs: int, used: Pieces | None = None) -> Matrix:
        return empty_matrix(num_outputs, num_inputs, self._spec.weights, self._device, used)

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def where(self, there: bool, *shape: int) -> Tensor | None:
        return self.tensor(*shape) if there else None

    def norm(self, size: int) -> Norm:
        return Norm(self.tensor(size), self.where(self._spec.norm == "layer", size))


def empty_layer(
    spec: ModelSpec,
    held: Holding,
    qkv_blocks: tuple[Span, ...],
    device: torch.device,
    out_parts: tuple[Span, ...] = (),
    mlp_parts: tuple[Span, ...] = (),
) -> LayerShard:
    """Memory for a layer. Where it is not used as a whole only: `out_parts` are the heads whose outputs are projected by
    themselves, `mlp_parts` the columns that are decoded by themselves."""
    new = _Empty(spec, device)
    H, d, c = spec.hidden_size, spec.head_dim, held.columns.size
    qkv = _pieces(0, qkv_blocks, spec.qkv_width)
    out = _pieces(1, out_parts or (held.out,), lambda heads: heads * d)
    columns = mlp_parts or (held.columns,)
    up, down = _pieces(0, columns), _pieces(1, columns)
    width = qkv.borders[-1]
    return LayerShard(
        held=held,
        qkv_blocks=qkv_blocks,
        qkv_weight=new.matrix(width, H, qkv),
        qkv_bias=new.where(spec.qkv_bias, width),
        q_norm=Norm(new.tensor(d), None) if spec.qk_norm else None,
        k_norm=Norm(new.tensor(d), None) if spec.qk_norm else None,
        out_weight=new.matrix(H, held.out.size * d, out),
        out_bias=new.where(spec.out_bias, H),
        norm1=new.norm(H),
        gate_weight=new.matrix(c, H, up) if spec.gated else None,
        gate_bias=new.where(spec.gated and spec.mlp_bias, c),
        up_weight=new.matrix(c, H, up),
        up_bias=new.where(spec.mlp_bias, c),
        down_weight=new.matrix(H, c, down),
        down_bias=new.where(spec.mlp_bias, H),
        norm2=new.norm(H),
    )


def _pieces(axis: int, parts: tuple[Span, ...], width: Callable[[int], int] = int) -> Pieces:
    """Of a matrix that consists of these, one after the other, each so wide."""
    return Pieces(axis, tuple(accumulate((width(part.size) for part in parts if part.size), initial=0)))


def empty_embedding(
    spec: ModelSpec, vocabulary: Span, device: torch.device, beside_words: bool = True
) -> EmbeddingShard:
    """Memory for words and head; for positions, types and norm only with `beside_words`."""
    new = _Empty(spec, device)
    H = spec.hidden_size
    num_positions = spec.max_positions + spec.position_offset if beside_words else 0
    word_type = getattr(torch, spec.weights) if spec.weights in ("float32", "float16") else torch.bfloat16
    word = torch.empty(vocabulary.size, H, dtype=word_type, device=device)
    head: Matrix | None = None
    if spec.causal:
        head = new.matrix(vocabulary.size, H) if spec.has_separate_head else Floats(word)
    return EmbeddingShard(
        vocabulary=vocabulary,
        word=word,
        head=head,
        position=new.where(spec.rotary is None, num_positions, H),
        token_type=new.where(spec.type_vocab_size > 0, spec.type_vocab_size if beside_words else 0, H),
        norm=new.norm(H if beside_words else 0),
    )


def empty_shard(plan: TransformerPlan, rank: int, device: torch.device) -> Shard:
    """Memory for all that a rank holds."""
    spec, body = plan.model, plan.body
    layers, own = [], body.layers_of(rank, spec.num_layers)
    for index in range(own.start, own.stop):
        held, mode = body.holding(rank, index), body.mode(index)
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
    """Fill a shard chunk by chunk; peak memory is the shard and one chunk. Raises ChunkCorrupt."""
    shard = empty_shard(plan, rank, device)
    for chunk in chunks:
        path = path_of(chunk.hash)
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                _copy_chunk(shard, chunk, stored.get_tensor)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ChunkCorrupt(chunk=f"{chunk.hash[:12]} ({chunk.kind}, {error})", where=str(path.parent)) from None
    return shard


def _copy_chunk(shard: Shard, chunk: ChunkRef, stored: _Stored) -> None:
    spec, embedding = shard.spec, shard.embedding
    if chunk.kind in ("vocabulary", "head"):
        rows = grain_span(chunk.grain, spec.vocab_size, VOCABULARY_GRAIN)
        start = rows.start - embedding.vocabulary.start
        part = slice(start, start + rows.size)
        if chunk.kind == "vocabulary":
            embedding.word[part].copy_(stored("word.weight"))
        elif embedding.head is not None:
            embedding.head.fill(part, _ALL, stored("head.weight"))
        return
    if chunk.kind == "embedding":
        _copy(embedding.position, stored, "position.weight")
        _copy(embedding.token_type, stored, "type.weight")
        _copy_norm(embedding.norm, stored, "final" if spec.causal else "norm")
        return
    layer = shard.layers[chunk.layer - shard.first_layer]
    if chunk.kind == "qkv":
        _copy_qkv(spec, layer, chunk.grain, stored)
    elif chunk.kind == "out":
        heads = _grain_heads(spec, chunk.grain)
        start = (heads.start - layer.held.out.start) * spec.head_dim
        layer.out_weight.fill(_ALL, slice(start, start + heads.size * spec.head_dim), stored("o.weight"))
    elif chunk.kind == "mlp":
        _copy_mlp(spec, layer, chunk.grain, stored)
    else:
        _copy(layer.out_bias, stored, "o.bias")
        _copy(layer.down_bias, stored, "down.bias")
        _copy_norm(layer.norm1, stored, "norm1")
        _copy_norm(layer.norm2, stored, "norm2")
        for norm, name in ((layer.q_norm, "q_norm"), (layer.k_norm, "k_norm")):
            if norm is not None:
                _copy_norm(norm, stored, name)


def _copy_qkv(spec: ModelSpec, layer: LayerShard, grain: int, stored: _Stored) -> None:
    heads = _grain_heads(spec, grain)
    for index, block in enumerate(layer.qkv_blocks):
        if block.start <= heads.start < block.stop:
            skipped = heads.start - block.start
            start = layer.qkv_rows(spec, index).start
            for name, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)):
                part = slice(start + width(skipped), start + width(skipped + heads.size))
                layer.qkv_weight.fill(part, _ALL, stored(f"{name}.weight"))
                if layer.qkv_bias is not None:
                    layer.qkv_bias[part].copy_(stored(f"{name}.bias"))
                start += width(block.size)
            return
    raise RuntimeError(f"heads {heads} are not of this rank")


def _copy_mlp(spec: ModelSpec, layer: LayerShard, grain: int, stored: _Stored) -> None:
    columns = grain_span(grain, spec.ffn_size, COLUMN_GRAIN)
    start = columns.start - layer.held.columns.start
    part = slice(start, start + columns.size)
    if layer.gate_weight is not None:
        layer.gate_weight.fill(part, _ALL, stored("gate.weight"))
    layer.up_weight.fill(part, _ALL, stored("up.weight"))
    for bias, name in ((layer.gate_bias, "gate.bias"), (layer.up_bias, "up.bias")):
        _copy(None if bias is None else bias[part], stored, name)
    layer.down_weight.fill(_ALL, part, stored("down.weight"))


def _grain_heads(spec: ModelSpec, grain: int) -> Span:
    """The heads of one KV group."""
    return Span(grain * spec.group_size, (grain + 1) * spec.group_size)


def _copy(into: Tensor | None, stored: _Stored, name: str) -> None:
    if into is not None:
        into.copy_(stored(name))


def _copy_norm(norm: Norm, stored: _Stored, name: str) -> None:
    norm.weight.copy_(stored(f"{name}.weight"))
    _copy(norm.bias, stored, f"{name}.bias")


def _parts(part: object) -> Iterator[Matrix | tuple[Tensor]]:
    """All matrices, and all tensors that are none."""
    if isinstance(part, Tensor):
        yield (part,)
    elif isinstance(part, Floats | Packed | Int8 | Int4):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _parts(item)
    elif isinstance(part, LayerShard | EmbeddingShard | Shard | Norm):
        for name in part.__dataclass_fields__:
            yield from _parts(getattr(part, name))
