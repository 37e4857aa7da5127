"""The weights of one rank, put together from the chunks in the store.

H hidden, d head_dim, w = heads * d of this rank, c MLP columns of this rank, V vocabulary rows of this rank, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hearth.errors import ChunkCorrupt
from hearth.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grain_span, spans
from hearth.messages import ChunkRef
from hearth.model.spec import ModelSpec
from hearth.plan import Holding, Plan


@dataclass
class Norm:
    weight: Tensor  # [H]
    bias: Tensor  # [H]


@dataclass
class LayerShard:
    """One layer: `held` says which heads and columns. Row-parallel biases belong to the connective: they are added once.

    `qkv_blocks` are the heads of each block of `qkv_weight`: a block is Q, K and V of some heads, one after the other.
    Sharded, there is one block; replicated, one for each rank, so that what a rank is sent is one GEMM.
    """

    held: Holding
    qkv_blocks: tuple[Span, ...]
    qkv_weight: Tensor  # [sum of 3w, H]
    qkv_bias: Tensor  # [sum of 3w]
    out_weight: Tensor  # [H, w]
    out_bias: Tensor  # [H]
    norm1: Norm
    up_weight: Tensor  # [c, H]
    up_bias: Tensor  # [c]
    down_weight: Tensor  # [H, c]
    down_bias: Tensor  # [H]
    norm2: Norm


@dataclass
class EmbeddingShard:
    vocabulary: Span  # the token ids whose rows are here
    word: Tensor  # [V, H]
    position: Tensor  # [P, H]
    token_type: Tensor | None  # [types, H]
    norm: Norm


@dataclass
class Shard:
    spec: ModelSpec
    embedding: EmbeddingShard
    layers: list[LayerShard]

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self))


def empty_layer(spec: ModelSpec, held: Holding, qkv_blocks: tuple[Span, ...], device: torch.device) -> LayerShard:
    """Memory for a layer, uninitialised: what is not in the rank's chunks is never read."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    H, d = spec.hidden_size, spec.head_dim
    width = 3 * d * sum(block.size for block in qkv_blocks)
    return LayerShard(
        held=held, qkv_blocks=qkv_blocks,
        qkv_weight=new(width, H), qkv_bias=new(width), out_weight=new(H, held.out.size * d), out_bias=new(H),
        norm1=Norm(new(H), new(H)), up_weight=new(held.columns.size, H), up_bias=new(held.columns.size),
        down_weight=new(H, held.columns.size), down_bias=new(H), norm2=Norm(new(H), new(H)),
    )  # fmt: skip


def empty_embedding(spec: ModelSpec, vocabulary: Span, device: torch.device) -> EmbeddingShard:
    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return EmbeddingShard(
        vocabulary=vocabulary,
        word=new(vocabulary.size, spec.hidden_size),
        position=new(spec.max_positions, spec.hidden_size),
        token_type=new(spec.type_vocab_size, spec.hidden_size) if spec.type_vocab_size else None,
        norm=Norm(new(spec.hidden_size), new(spec.hidden_size)),
    )


def empty_shard(plan: Plan, rank: int, device: torch.device) -> Shard:
    """Memory for all that a rank holds."""
    spec, body = plan.model, plan.body
    layers = []
    for index in range(spec.num_layers):
        held, mode = body.holding(rank, index), body.mode(index)
        by_rank = mode.qkv == "replicated" and mode.attention == "heads" and held.qkv.size
        layers.append(empty_layer(spec, held, spans(body.heads) if by_rank else (held.qkv,), device))
    return Shard(spec, empty_embedding(spec, spans(body.vocabulary)[rank], device), layers)


def load_shard(
    plan: Plan, rank: int, chunks: tuple[ChunkRef, ...], path_of: Callable[[str], Path], device: torch.device
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


def _copy_chunk(shard: Shard, chunk: ChunkRef, stored: Callable[[str], Tensor]) -> None:
    spec = shard.spec
    if chunk.kind == "vocabulary":
        rows = grain_span(chunk.grain, spec.vocab_size, VOCABULARY_GRAIN)
        start = rows.start - shard.embedding.vocabulary.start
        shard.embedding.word[start : start + rows.size].copy_(stored("word.weight"))
        return
    if chunk.kind == "embedding":
        shard.embedding.position.copy_(stored("position.weight"))
        if shard.embedding.token_type is not None:
            shard.embedding.token_type.copy_(stored("type.weight"))
        _copy_norm(shard.embedding.norm, stored, "norm")
        return
    layer = shard.layers[chunk.layer]
    if chunk.kind == "qkv":
        _copy_qkv(spec, layer, chunk.grain, stored)
    elif chunk.kind == "out":
        heads = _grain_heads(spec, chunk.grain)
        start = (heads.start - layer.held.out.start) * spec.head_dim
        layer.out_weight[:, start : start + heads.size * spec.head_dim].copy_(stored("o.weight"))
    elif chunk.kind == "mlp":
        columns = grain_span(chunk.grain, spec.ffn_size, COLUMN_GRAIN)
        start = columns.start - layer.held.columns.start
        part = slice(start, start + columns.size)
        layer.up_weight[part].copy_(stored("up.weight"))
        layer.up_bias[part].copy_(stored("up.bias"))
        layer.down_weight[:, part].copy_(stored("down.weight"))
    else:
        layer.out_bias.copy_(stored("o.bias"))
        layer.down_bias.copy_(stored("down.bias"))
        _copy_norm(layer.norm1, stored, "norm1")
        _copy_norm(layer.norm2, stored, "norm2")


def _copy_qkv(spec: ModelSpec, layer: LayerShard, grain: int, stored: Callable[[str], Tensor]) -> None:
    heads, d = _grain_heads(spec, grain), spec.head_dim
    before = 0
    for block in layer.qkv_blocks:
        if block.start <= heads.start < block.stop:
            for i, name in enumerate(("q", "k", "v")):
                start = before + (i * block.size + heads.start - block.start) * d
                part = slice(start, start + heads.size * d)
                layer.qkv_weight[part].copy_(stored(f"{name}.weight"))
                layer.qkv_bias[part].copy_(stored(f"{name}.bias"))
            return
        before += 3 * block.size * d
    raise RuntimeError(f"heads {heads} are not of this rank")


def _grain_heads(spec: ModelSpec, grain: int) -> Span:
    """The heads of one KV group."""
    group = spec.num_heads // spec.num_kv_heads
    return Span(grain * group, (grain + 1) * group)


def _copy_norm(norm: Norm, stored: Callable[[str], Tensor], name: str) -> None:
    norm.weight.copy_(stored(f"{name}.weight"))
    norm.bias.copy_(stored(f"{name}.bias"))


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _tensors(item)
    elif isinstance(part, LayerShard | EmbeddingShard | Shard | Norm):
        for name in part.__dataclass_fields__:
            yield from _tensors(getattr(part, name))
