"""All chunks of a model, their sizes, and the chunks that each rank needs. Pure.

A chunk is a blob in the safetensors format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from hearth.plan.chunks import ChunkKind, chunk_slices
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_of, num_grains, spans
from hearth.plan.model_spec import DTYPE_BYTES, ModelSpec
from hearth.plan.plan import TransformerPlan

if TYPE_CHECKING:
    from hearth.wire.messages import ChunkRef

_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # names of our dtypes in that format


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by our name for it; the output axis comes first."""
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
    """The chunks that this rank needs, and no others."""
    needed = _needed_grains(plan, rank)
    return tuple(ref for ref in refs if ref.grain in needed[ref.layer][ref.kind])


def chunk_keys_for_rank(plan: TransformerPlan, rank: int) -> list[tuple[ChunkKind, int, int]]:
    """The chunks that this rank needs as `(kind, layer, grain)`, in the order of `all_chunks`."""
    needed = _needed_grains(plan, rank)
    return [(kind, layer, grain) for kind, layer, grain in all_chunks(plan.model) if grain in needed[layer][kind]]


def _needed_grains(plan: TransformerPlan, rank: int) -> list[dict[ChunkKind, range]]:
    """The grains that this rank needs, by layer and kind; kinds that belong to no layer have the same in each."""
    spec, body = plan.model, plan.body
    words, logits = (
        grains_of(rows, spec.vocab_size, VOCABULARY_GRAIN)
        for rows in (body.word_rows(rank), spans(body.vocabulary)[rank])
    )
    held = [body.layer_share(rank, layer) for layer in range(spec.num_layers)]
    repeats = spec.causal and body.replicates_norms(rank)
    return [
        {
            "qkv": grains_of(each.qkv, spec.num_heads, spec.group_size),
            "out": grains_of(each.out, spec.num_heads, spec.group_size),
            "mlp": grains_of(each.columns, spec.ffn_size, COLUMN_GRAIN),
            "connective": range(1 if each.connective or repeats else 0),
            "vocabulary": words,
            "head": logits,
            "embedding": range(1 if body.needs_embedding(rank) or repeats else 0),
        }
        for each in held
    ]


def num_chunk_weights(spec: ModelSpec, kind: ChunkKind, grain: int = 0) -> int:
    """Number of weights in a chunk, computed from the spec alone (for planners)."""
    return sum(map(math.prod, _slice_shapes(spec, kind, grain).values()))


def num_chunk_bytes(spec: ModelSpec, kind: ChunkKind, grain: int) -> int:
    """Size of a chunk's file, computed from the spec alone (for planners)."""
    last = {"mlp": num_grains(spec.ffn_size, COLUMN_GRAIN), "vocabulary": num_grains(spec.vocab_size, VOCABULARY_GRAIN)}
    last["head"] = last["vocabulary"]
    return _num_chunk_bytes(spec, kind, grain if grain + 1 == last.get(kind) else 0)  # only the last one may be shorter


@lru_cache(maxsize=256)
def _num_chunk_bytes(spec: ModelSpec, kind: ChunkKind, grain: int) -> int:
    shapes = _slice_shapes(spec, kind, grain)
    return len(chunk_header(spec, shapes)) + sum(map(math.prod, shapes.values())) * spec.bytes_per_weight


def chunk_header(spec: ModelSpec, shapes: Mapping[str, Sequence[int]]) -> bytes:
    """The beginning of a chunk with tensors of these shapes, whose bytes follow one after the other."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * DTYPE_BYTES[spec.dtype]
        header[name] = {"dtype": _SAFETENSORS_DTYPES[spec.dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _slice_shapes(spec: ModelSpec, kind: ChunkKind, grain: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor's part in a chunk."""
    shapes, parts = tensor_shapes(spec), {}
    for part in chunk_slices(spec, kind, grain):
        shape = shapes[part.tensor]
        if part.rows is not None:
            shape = (part.rows.size, *shape[1:])
        if part.columns is not None:
            shape = (shape[0], part.columns.size)
        parts[part.tensor] = shape
    return parts
