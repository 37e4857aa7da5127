"""Cuts a checkpoint into chunks on plan-independent grains, and says which chunks a rank needs.

A chunk is a safetensors blob named by its SHA-256: one KV group's QKV or output projection, 64 MLP columns, one layer's
replicated vectors, 1024 vocabulary rows, or the rest of the embedding. A re-plan moves chunks and renames none.

H hidden, g = query heads per group * head_dim (the rows of one attention grain), c columns of one MLP grain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from hearth.errors import BadCheckpoint
from hearth.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grain_span, grains_of, num_grains, spans
from hearth.messages import ChunkRef
from hearth.model.checkpoint import SAFETENSORS_DTYPES, Checkpoint
from hearth.model.families import FAMILIES, TensorNames
from hearth.model.spec import ModelSpec
from hearth.plan import Plan

if TYPE_CHECKING:
    import numpy as np

ChunkKind = Literal["qkv", "out", "mlp", "connective", "vocabulary", "embedding"]
_FORMAT_VERSION = 2  # of a chunk's content; raised when it changes, so that cached manifests are made anew
_MANIFEST: TypeAdapter[tuple[ChunkRef, ...]] = TypeAdapter(tuple[ChunkRef, ...])


class _Slice(NamedTuple):
    """Part of one tensor: which of ours, and the rows or columns of it (None: all)."""

    tensor: str
    rows: Span | None = None
    columns: Span | None = None


def attention_grain_span(spec: ModelSpec, grain: int) -> Span:
    """The rows of Q (and columns of the output projection) of one KV group."""
    width = spec.num_heads // spec.num_kv_heads * spec.head_dim
    return Span(grain * width, (grain + 1) * width)


def _slices(spec: ModelSpec, kind: ChunkKind, grain: int) -> list[_Slice]:
    """What a chunk holds, under our tensor names (DESIGN.md "Shards": row-parallel weights along their input)."""
    if kind == "qkv":
        part = attention_grain_span(spec, grain)
        return [_Slice(f"{name}.{what}", rows=part) for name in "qkv" for what in ("weight", "bias")]
    if kind == "out":
        return [_Slice("o.weight", columns=attention_grain_span(spec, grain))]
    if kind == "mlp":
        part = grain_span(grain, spec.ffn_size, COLUMN_GRAIN)
        return [
            _Slice("up.weight", rows=part),
            _Slice("up.bias", rows=part),
            _Slice("down.weight", columns=part),
        ]
    if kind == "connective":
        norms = [f"{norm}.{what}" for norm in ("norm1", "norm2") for what in ("weight", "bias")]
        return [_Slice(name) for name in ("o.bias", "down.bias", *norms)]
    if kind == "vocabulary":
        return [_Slice("word.weight", rows=grain_span(grain, spec.vocab_size, VOCABULARY_GRAIN))]
    types = [_Slice("type.weight")] if spec.type_vocab_size else []
    return [_Slice("position.weight"), *types, _Slice("norm.weight"), _Slice("norm.bias")]


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape that each of our tensors must have in the checkpoint."""
    H, q, F = spec.hidden_size, spec.num_heads * spec.head_dim, spec.ffn_size
    shapes: dict[str, tuple[int, ...]] = {
        "o.weight": (H, q), "o.bias": (H,), "up.weight": (F, H), "up.bias": (F,), "down.weight": (H, F),
        "down.bias": (H,), "word.weight": (spec.vocab_size, H), "position.weight": (spec.max_positions, H),
        "type.weight": (spec.type_vocab_size, H),
    }  # fmt: skip
    for name in "qkv":
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (q, H), (q,)
    for norm in ("norm1", "norm2", "norm"):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (H,)
    return shapes


def chunk_bytes(checkpoint: Checkpoint, spec: ModelSpec, kind: ChunkKind, layer: int, grain: int) -> bytes:
    """The chunk's content; the same bytes on every call. Raises BadCheckpoint for a tensor that is missing or misshapen."""
    names = TensorNames(FAMILIES[spec.family], checkpoint)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for part in _slices(spec, kind, grain):
        in_layer = kind in ("qkv", "out", "mlp", "connective")
        name = names.layer(layer, part.tensor) if in_layer else names.embedding(part.tensor)
        array = _checked(checkpoint, spec, name, part.tensor)
        if part.rows is not None:
            array = array[slice(*part.rows)]
        if part.columns is not None:
            array = array[:, slice(*part.columns)]
        tensors[part.tensor] = array
    return _safetensors_blob(tensors, SAFETENSORS_DTYPES[spec.dtype])


def _safetensors_blob(tensors: dict[str, np.ndarray[Any, Any]], dtype: str) -> bytes:
    """The safetensors format, written here because a chunk's name hangs on every byte: the library may order or pad
    otherwise in its next version, and knows bfloat16 only through torch."""
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in tensors.values())])


def _checked(checkpoint: Checkpoint, spec: ModelSpec, name: str, tensor: str) -> np.ndarray[Any, Any]:
    expected, found = _shapes(spec)[tensor], checkpoint.shape(name)
    if found != expected:
        raise BadCheckpoint(
            path=str(checkpoint.path),
            reason=f"the tensor {name} has the shape {list(found)}; config.json implies {list(expected)}",
        )
    if checkpoint.dtype(name) != spec.dtype:
        raise BadCheckpoint(
            path=str(checkpoint.path),
            reason=f"the tensor {name} holds {checkpoint.dtype(name)}, others {spec.dtype}",
        )
    return checkpoint.array(name)


def all_chunks(spec: ModelSpec) -> Iterator[tuple[ChunkKind, int, int]]:
    """Every chunk of a model as `(kind, layer, grain)`, in a fixed order."""
    for grain in range(num_grains(spec.vocab_size, VOCABULARY_GRAIN)):
        yield "vocabulary", 0, grain
    yield "embedding", 0, 0
    for layer in range(spec.num_layers):
        for grain in range(spec.num_kv_heads):
            yield "qkv", layer, grain
            yield "out", layer, grain
        for grain in range(num_grains(spec.ffn_size, COLUMN_GRAIN)):
            yield "mlp", layer, grain
        yield "connective", layer, 0


def manifest(
    checkpoint: Checkpoint, spec: ModelSpec, progress: Callable[[int], None] = lambda num_bytes: None
) -> tuple[ChunkRef, ...]:
    """Hash every chunk; one pass over the checkpoint. `progress` is told the bytes of each."""
    refs = []
    for kind, layer, grain in all_chunks(spec):
        data = chunk_bytes(checkpoint, spec, kind, layer, grain)
        digest = hashlib.sha256(data).hexdigest()
        refs.append(ChunkRef(hash=digest, num_bytes=len(data), kind=kind, layer=layer, grain=grain))
        progress(len(data))
    return tuple(refs)


def cached_manifest(checkpoint: Checkpoint, spec: ModelSpec, cache_dir: Path) -> tuple[ChunkRef, ...]:
    """As `manifest`, kept under `cache_dir` until a file of the checkpoint changes."""
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files]
    shape = spec.model_dump(exclude={"name"})
    key = hashlib.sha256(json.dumps([_FORMAT_VERSION, stamps, shape], sort_keys=True).encode()).hexdigest()[:24]
    path = cache_dir / f"manifest-{key}.json"
    try:
        return _MANIFEST.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        refs = manifest(checkpoint, spec)
    cache_dir.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_bytes(_MANIFEST.dump_json(refs))
    beside.replace(path)
    return refs


def chunks_for_rank(refs: tuple[ChunkRef, ...], plan: Plan, rank: int) -> tuple[ChunkRef, ...]:
    """Exactly the chunks that this rank needs: not one byte more travels."""
    spec, body = plan.model, plan.body
    group = spec.num_heads // spec.num_kv_heads
    has_rows = body.has_rows(rank)
    of_model: dict[ChunkKind, range] = {
        "vocabulary": grains_of(spans(body.vocabulary)[rank], spec.vocab_size, VOCABULARY_GRAIN),
        "embedding": range(1 if has_rows else 0),
    }

    def of_layer(layer: int) -> dict[ChunkKind, range]:
        held = body.holding(rank, layer)
        return {
            "qkv": grains_of(held.qkv, spec.num_heads, group),
            "out": grains_of(held.out, spec.num_heads, group),
            "mlp": grains_of(held.columns, spec.ffn_size, COLUMN_GRAIN),
            "connective": range(1 if held.connective else 0),
        }

    per_layer = [of_layer(layer) for layer in range(spec.num_layers)]
    return tuple(ref for ref in refs if ref.grain in {**of_model, **per_layer[ref.layer]}[ref.kind])


def chunk_weights(spec: ModelSpec, kind: ChunkKind, grain: int = 0) -> int:
    """How many weights a chunk holds, computed from the spec alone: for planners."""
    shapes = _shapes(spec)
    total = 0
    for part in _slices(spec, kind, grain):
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
