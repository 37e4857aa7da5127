"""The content of each chunk of a transformer. Pure.

The coordinator cuts checkpoints, and the worker assembles shards, by this table.

A chunk holds one KV group's QKV or output projection, 64 MLP columns, one layer's replicated vectors, 1024 vocabulary rows
of the word embedding or of the head, or the rest of the embedding. Chunk boundaries (grains) do not depend on the plan, so a
new plan moves chunks between devices and leaves their content and names unchanged.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grain_span
from hearth.plan.model_spec import ModelSpec

ChunkKind: TypeAlias = Literal["qkv", "out", "mlp", "connective", "vocabulary", "head", "embedding"]
LAYER_CHUNK_KINDS: tuple[ChunkKind, ...] = ("qkv", "out", "mlp", "connective")


class TensorSlice(NamedTuple):
    """Part of one tensor: the tensor's name in Hearth, and the range of its rows or columns (None: all)."""

    tensor: str
    rows: Span | None = None
    columns: Span | None = None


def attention_grain_span(spec: ModelSpec, grain: int) -> Span:
    """The rows of Q, which are also the columns of the output projection, of one KV group."""
    width = spec.q_width(spec.group_size)
    return Span(grain * width, (grain + 1) * width)


def chunk_slices(spec: ModelSpec, kind: ChunkKind, grain: int) -> list[TensorSlice]:
    """The slices that one chunk holds. Row-parallel weights (`o`, `down`) are cut along their inputs."""
    if kind == "qkv":
        q, kv = attention_grain_span(spec, grain), Span(grain * spec.head_dim, (grain + 1) * spec.head_dim)
        rows = {"q": q, "k": kv, "v": kv}
        return [
            TensorSlice(f"{name}.{suffix}", rows=rows[name]) for name in rows for suffix in _suffixes(spec.qkv_bias)
        ]
    if kind == "out":
        return [TensorSlice("o.weight", columns=attention_grain_span(spec, grain))]
    if kind == "mlp":
        part = grain_span(grain, spec.ffn_size, COLUMN_GRAIN)
        by_column = ("gate", "up") if spec.gated else ("up",)
        up = [TensorSlice(f"{name}.{suffix}", rows=part) for name in by_column for suffix in _suffixes(spec.mlp_bias)]
        return [*up, TensorSlice("down.weight", columns=part)]
    if kind == "connective":
        biases = [name for name, present in (("o.bias", spec.out_bias), ("down.bias", spec.mlp_bias)) if present]
        of_heads = ["q_norm.weight", "k_norm.weight"] if spec.qk_norm else []
        return [TensorSlice(name) for name in (*biases, *_norm(spec, "norm1"), *_norm(spec, "norm2"), *of_heads)]
    if kind in ("vocabulary", "head"):
        name = "word.weight" if kind == "vocabulary" else "head.weight"
        return [TensorSlice(name, rows=grain_span(grain, spec.vocab_size, VOCABULARY_GRAIN))]
    positions = ["position.weight"] if spec.rotary is None else []
    types = ["type.weight"] if spec.type_vocab_size else []
    return [TensorSlice(name) for name in (*positions, *types, *_norm(spec, "final" if spec.causal else "norm"))]


def _norm(spec: ModelSpec, name: str) -> list[str]:
    return [f"{name}.{suffix}" for suffix in _suffixes(spec.norm == "layer")]


def _suffixes(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
