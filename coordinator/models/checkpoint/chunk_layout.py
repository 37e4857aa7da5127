"""What each chunk of a model holds, on grains that depend on no plan, and which chunks a rank needs. Pure.

A chunk is one KV group's QKV or output projection, 64 MLP columns, one layer's replicated vectors, 1024 vocabulary rows of
the word embedding or of the head, or the rest of the embedding. A new plan moves chunks and renames none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grain_span, grains_of, num_grains, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import ChunkKind, ChunkRef

OF_LAYER: tuple[ChunkKind, ...] = ("qkv", "out", "mlp", "connective")


class Slice(NamedTuple):
    """Part of one tensor: which of ours, and the rows or columns of it (None: all)."""

    tensor: str
    rows: Span | None = None
    columns: Span | None = None


def attention_grain_span(spec: ModelSpec, grain: int) -> Span:
    """The rows of Q (and columns of the output projection) of one KV group."""
    width = spec.q_width(spec.group_size)
    return Span(grain * width, (grain + 1) * width)


def slices(spec: ModelSpec, kind: ChunkKind, grain: int) -> list[Slice]:
    """What a chunk holds, under our tensor names (DESIGN.md "Shards": row-parallel weights along their input)."""
    if kind == "qkv":
        q, kv = attention_grain_span(spec, grain), Span(grain * spec.head_dim, (grain + 1) * spec.head_dim)
        rows = {"q": q, "k": kv, "v": kv}
        return [Slice(f"{name}.{what}", rows=rows[name]) for name in rows for what in _suffixes(spec.qkv_bias)]
    if kind == "out":
        return [Slice("o.weight", columns=attention_grain_span(spec, grain))]
    if kind == "mlp":
        part = grain_span(grain, spec.ffn_size, COLUMN_GRAIN)
        by_column = ("gate", "up") if spec.gated else ("up",)
        up = [Slice(f"{name}.{what}", rows=part) for name in by_column for what in _suffixes(spec.mlp_bias)]
        return [*up, Slice("down.weight", columns=part)]
    if kind == "connective":
        biases = [name for name, there in (("o.bias", spec.out_bias), ("down.bias", spec.mlp_bias)) if there]
        of_heads = ["q_norm.weight", "k_norm.weight"] if spec.qk_norm else []
        return [Slice(name) for name in (*biases, *_norm(spec, "norm1"), *_norm(spec, "norm2"), *of_heads)]
    if kind in ("vocabulary", "head"):
        name = "word.weight" if kind == "vocabulary" else "head.weight"
        return [Slice(name, rows=grain_span(grain, spec.vocab_size, VOCABULARY_GRAIN))]
    positions = ["position.weight"] if spec.rotary is None else []
    types = ["type.weight"] if spec.type_vocab_size else []
    return [Slice(name) for name in (*positions, *types, *_norm(spec, "final" if spec.causal else "norm"))]


def _norm(spec: ModelSpec, name: str) -> list[str]:
    return [f"{name}.{what}" for what in _suffixes(spec.norm == "layer")]


def _suffixes(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape that each of our tensors has, outputs first."""
    H, F, V, d = spec.hidden_size, spec.ffn_size, spec.vocab_size, spec.head_dim
    q, kv = spec.q_width(spec.num_heads), spec.kv_width(spec.num_heads)
    shapes: dict[str, tuple[int, ...]] = {
        "q.weight": (q, H), "q.bias": (q,), "k.weight": (kv, H), "k.bias": (kv,), "v.weight": (kv, H), "v.bias": (kv,),
        "q_norm.weight": (d,), "k_norm.weight": (d,), "o.weight": (H, q), "o.bias": (H,), "gate.weight": (F, H),
        "gate.bias": (F,), "up.weight": (F, H), "up.bias": (F,), "down.weight": (H, F), "down.bias": (H,),
        "word.weight": (V, H), "head.weight": (V, H), "type.weight": (spec.type_vocab_size, H),
        "position.weight": (spec.max_positions + spec.position_offset, H),
    }  # fmt: skip
    for norm in ("norm1", "norm2", "norm", "final"):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (H,)
    return shapes


def all_chunks(spec: ModelSpec) -> Iterator[tuple[ChunkKind, int, int]]:
    """Every chunk of a model as `(kind, layer, grain)`, in a fixed order."""
    for grain in range(num_grains(spec.vocab_size, VOCABULARY_GRAIN)):
        yield "vocabulary", 0, grain
    if spec.has_separate_head:
        for grain in range(num_grains(spec.vocab_size, VOCABULARY_GRAIN)):
            yield "head", 0, grain
    yield "embedding", 0, 0
    for layer in range(spec.num_layers):
        for grain in range(spec.num_kv_heads):
            yield "qkv", layer, grain
            yield "out", layer, grain
        for grain in range(num_grains(spec.ffn_size, COLUMN_GRAIN)):
            yield "mlp", layer, grain
        yield "connective", layer, 0


def chunks_for_rank(refs: tuple[ChunkRef, ...], plan: TransformerPlan, rank: int) -> tuple[ChunkRef, ...]:
    """Exactly the chunks that this rank needs: not one byte more travels."""
    spec, body = plan.model, plan.body
    vocabulary = grains_of(spans(body.vocabulary)[rank], spec.vocab_size, VOCABULARY_GRAIN)
    held = [body.holding(rank, layer) for layer in range(spec.num_layers)]
    repeats = spec.causal and body.repeats_norms(rank)
    needed: list[dict[ChunkKind, range]] = [
        {
            "qkv": grains_of(each.qkv, spec.num_heads, spec.group_size),
            "out": grains_of(each.out, spec.num_heads, spec.group_size),
            "mlp": grains_of(each.columns, spec.ffn_size, COLUMN_GRAIN),
            "connective": range(1 if each.connective or repeats else 0),
            "vocabulary": vocabulary,
            "head": vocabulary,
            "embedding": range(1 if body.embeds(rank) or repeats else 0),
        }
        for each in held
    ]
    return tuple(ref for ref in refs if ref.grain in needed[ref.layer][ref.kind])


def chunk_weights(spec: ModelSpec, kind: ChunkKind, grain: int = 0) -> int:
    """How many weights a chunk holds, computed from the spec alone: for planners."""
    shapes = tensor_shapes(spec)
    total = 0
    for part in slices(spec, kind, grain):
        shape = shapes[part.tensor]
        if part.rows is not None:
            shape = (part.rows.size, *shape[1:])
        if part.columns is not None:
            shape = (shape[0], part.columns.size)
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
