"""All chunks of a model, their sizes, and the chunks that each rank needs. Pure.

A chunk is a blob in the safetensors format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from hearth.plan.geometry import Span, grains_of, num_grains, spans
from hearth.plan.layer import ChunkKind, chunk_items, chunk_slices
from hearth.plan.model_spec import DTYPE_BYTES, ModelSpec
from hearth.plan.plan import TransformerPlan

if TYPE_CHECKING:
    from hearth.wire.messages import ChunkRef

_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # names of our dtypes in that format


def all_chunks(spec: ModelSpec) -> Iterator[tuple[ChunkKind, int, int]]:
    """Every chunk of a model as `(kind, layer, grain)`, in a fixed order."""
    outside: tuple[ChunkKind, ...] = (
        ("vocabulary", "head", "embedding") if spec.has_separate_head else ("vocabulary", "embedding")
    )
    for kind in outside:
        for grain in range(_num_chunks(spec, kind)):
            yield kind, 0, grain
    for layer in range(spec.num_layers):
        for grain in range(_num_chunks(spec, "qkv")):
            yield "qkv", layer, grain
            yield "out", layer, grain
        for grain in range(_num_chunks(spec, "mlp")):
            yield "mlp", layer, grain
        yield "connective", layer, 0


def _num_chunks(spec: ModelSpec, kind: ChunkKind) -> int:
    """Number of chunks of a kind in one layer, or in the embedding."""
    return num_grains(*chunk_items(spec, kind))


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
    repeats = spec.causal and body.replicates_norms(rank)

    def grains(held: Mapping[ChunkKind, Span]) -> dict[ChunkKind, range]:
        return {kind: grains_of(span, *chunk_items(spec, kind)) for kind, span in held.items()}

    outside = grains(
        {
            "vocabulary": body.word_rows(rank),
            "head": spans(body.vocabulary)[rank],
            "embedding": Span(0, int(body.needs_embedding(rank) or repeats)),
        }
    )
    layers = [body.layer_share(rank, layer) for layer in range(spec.num_layers)]
    return [
        outside | grains({**each.by_kind(), "connective": Span(0, int(each.connective or repeats))}) for each in layers
    ]


def num_chunk_weights(spec: ModelSpec, kind: ChunkKind, grain: int = 0) -> int:
    """Number of weights in a chunk, computed from the spec alone (for planners)."""
    return sum(math.prod(piece.shape) for piece in chunk_slices(spec, kind, grain))


def num_chunk_bytes(spec: ModelSpec, kind: ChunkKind, grain: int) -> int:
    """Size of a chunk's file, computed from the spec alone (for planners)."""
    is_last = grain + 1 == _num_chunks(spec, kind)
    return _num_chunk_bytes(spec, kind, grain if is_last else 0)  # only the last one may be shorter


@lru_cache(maxsize=256)
def _num_chunk_bytes(spec: ModelSpec, kind: ChunkKind, grain: int) -> int:
    shapes = {piece.tensor.name: piece.shape for piece in chunk_slices(spec, kind, grain)}
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
