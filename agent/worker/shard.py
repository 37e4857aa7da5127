"""The weights of one rank, put together from the chunks in the store.

H hidden, w = heads * head_dim of this rank, c MLP columns of this rank, V vocabulary rows of this rank, P positions.
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
from hearth.plan import Plan


@dataclass
class Norm:
    weight: Tensor  # [H]
    bias: Tensor  # [H]


@dataclass
class LayerShard:
    """One layer. Row-parallel biases (`out_bias`, `down_bias`) belong to the connective: they are added once."""

    qkv_weight: Tensor  # [3w, H]
    qkv_bias: Tensor  # [3w]
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
    heads: int
    columns: int
    embedding: EmbeddingShard
    layers: list[LayerShard]

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self))


def empty_shard(spec: ModelSpec, heads: int, columns: int, vocabulary: Span, device: torch.device) -> Shard:
    """Memory for a shard, uninitialised: what is not in the rank's chunks is never read."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def norm() -> Norm:
        return Norm(new(spec.hidden_size), new(spec.hidden_size))

    H, w = spec.hidden_size, heads * spec.head_dim
    layers = [
        LayerShard(
            qkv_weight=new(3 * w, H), qkv_bias=new(3 * w), out_weight=new(H, w), out_bias=new(H), norm1=norm(),
            up_weight=new(columns, H), up_bias=new(columns), down_weight=new(H, columns), down_bias=new(H), norm2=norm(),
        )
        for _ in range(spec.num_layers)
    ]  # fmt: skip
    embedding = EmbeddingShard(
        vocabulary=vocabulary,
        word=new(vocabulary.size, H),
        position=new(spec.max_positions, H),
        token_type=new(spec.type_vocab_size, H) if spec.type_vocab_size else None,
        norm=norm(),
    )
    return Shard(spec, heads, columns, embedding, layers)


def load_shard(
    plan: Plan, rank: int, chunks: tuple[ChunkRef, ...], path_of: Callable[[str], Path], device: torch.device
) -> Shard:
    """Fill a shard chunk by chunk; peak memory is the shard and one chunk. Raises ChunkCorrupt."""
    spec, body = plan.model, plan.body
    whole = body.strategy == "sp"
    heads = Span(0, spec.num_heads) if whole else spans(body.heads)[rank]
    columns = Span(0, spec.ffn_size) if whole else spans(body.columns)[rank]
    shard = empty_shard(spec, heads.size, columns.size, spans(body.vocabulary)[rank], device)
    for chunk in chunks:
        path = path_of(chunk.hash)
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                _copy_chunk(shard, chunk, stored.get_tensor, heads.start, columns.start)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ChunkCorrupt(chunk=f"{chunk.hash[:12]} ({chunk.kind}, {error})", where=str(path.parent)) from None
    return shard


def _copy_chunk(
    shard: Shard, chunk: ChunkRef, stored: Callable[[str], Tensor], first_head: int, first_column: int
) -> None:
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
    if chunk.kind == "attention":
        width = spec.num_heads // spec.num_kv_heads * spec.head_dim
        start = chunk.grain * width - first_head * spec.head_dim
        w = shard.heads * spec.head_dim
        for i, name in enumerate(("q", "k", "v")):
            part = slice(i * w + start, i * w + start + width)
            layer.qkv_weight[part].copy_(stored(f"{name}.weight"))
            layer.qkv_bias[part].copy_(stored(f"{name}.bias"))
        layer.out_weight[:, start : start + width].copy_(stored("o.weight"))
    elif chunk.kind == "mlp":
        columns = grain_span(chunk.grain, spec.ffn_size, COLUMN_GRAIN)
        start = columns.start - first_column
        part = slice(start, start + columns.size)
        layer.up_weight[part].copy_(stored("up.weight"))
        layer.up_bias[part].copy_(stored("up.bias"))
        layer.down_weight[:, part].copy_(stored("down.weight"))
    else:
        layer.out_bias.copy_(stored("o.bias"))
        layer.down_bias.copy_(stored("down.bias"))
        _copy_norm(layer.norm1, stored, "norm1")
        _copy_norm(layer.norm2, stored, "norm2")


def _copy_norm(norm: Norm, stored: Callable[[str], Tensor], name: str) -> None:
    norm.weight.copy_(stored(f"{name}.weight"))
    norm.bias.copy_(stored(f"{name}.bias"))


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _tensors(item)
    elif hasattr(part, "__dataclass_fields__"):
        for name in part.__dataclass_fields__:
            yield from _tensors(getattr(part, name))
