"""Cut a checkpoint into chunks: safetensors blobs named by their SHA-256. `hearth.plan.layer` defines their contents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from coordinator.models.cache_files import read_cached, write_cached
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import all_chunks, chunk_header
from coordinator.models.checkpoint.families import FAMILIES, TensorNames, TensorSource
from hearth.errors import BadCheckpoint
from hearth.plan.layer import LAYER_CHUNK_KINDS, ChunkKind, ModelTensor, chunk_slices
from hearth.plan.model_spec import ModelSpec
from hearth.wire.messages import ChunkRef

_FORMAT_VERSION = 2  # of a chunk's content; raised with each change, which invalidates cached manifests
_MANIFEST: TypeAdapter[tuple[ChunkRef, ...]] = TypeAdapter(tuple[ChunkRef, ...])


def chunk_bytes(checkpoint: Checkpoint, spec: ModelSpec, kind: ChunkKind, layer: int, grain: int) -> bytes:
    """The chunk's content; the same bytes on every call. Raises BadCheckpoint if a tensor is missing or has a wrong shape."""
    names = TensorNames(FAMILIES[spec.family], checkpoint)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for piece in chunk_slices(spec, kind, grain):
        name = piece.tensor.name
        source = names.layer(layer, name) if kind in LAYER_CHUNK_KINDS else names.embedding(name)
        _check(checkpoint, spec, source, piece.tensor)
        stored = checkpoint.read(source.name, source.region(piece.tensor.shape, piece.place()))
        tensors[name] = np.ascontiguousarray(stored.T) if source.transposed else stored
    return _safetensors_blob(spec, tensors)


def _safetensors_blob(spec: ModelSpec, tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Encode tensors in the safetensors format.

    Not by the library: the chunk's hash depends on every byte, and another version may order or pad differently. Also,
    the library supports bfloat16 only through torch.
    """
    header = chunk_header(spec, {name: array.shape for name, array in tensors.items()})
    return b"".join([header, *(array.data for array in tensors.values())])


def _check(checkpoint: Checkpoint, spec: ModelSpec, source: TensorSource, tensor: ModelTensor) -> None:
    """Raises BadCheckpoint for an unexpected shape or dtype."""
    name = source.name
    expected, stored = source.stored_shape(tensor.shape), checkpoint.shape(name)
    if stored != expected:
        reason = f"the tensor {name} has the shape {list(stored)}; config.json implies {list(expected)}"
        raise BadCheckpoint(path=str(checkpoint.path), reason=reason)
    if checkpoint.dtype(name) != spec.dtype:
        reason = f"the tensor {name} holds {checkpoint.dtype(name)}, others {spec.dtype}"
        raise BadCheckpoint(path=str(checkpoint.path), reason=reason)


def build_manifest(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[ChunkRef, ...]:
    """Hash every chunk, in one pass over the checkpoint."""
    refs = []
    for kind, layer, grain in all_chunks(spec):
        data = chunk_bytes(checkpoint, spec, kind, layer, grain)
        digest = hashlib.sha256(data).hexdigest()
        refs.append(ChunkRef(hash=digest, num_bytes=len(data), kind=kind, layer=layer, grain=grain))
    return tuple(refs)


def manifest_path(checkpoint: Checkpoint, spec: ModelSpec, cache_dir: Path) -> Path:
    """The file of the cached manifest."""
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files]
    shape = spec.model_dump(exclude={"name"})
    key = hashlib.sha256(json.dumps([_FORMAT_VERSION, stamps, shape], sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir / f"manifest-{key}.json"


def cached_manifest(checkpoint: Checkpoint, spec: ModelSpec, cache_dir: Path) -> tuple[ChunkRef, ...]:
    """Like `build_manifest`, but cached in `cache_dir` until a file of the checkpoint changes."""
    path = manifest_path(checkpoint, spec, cache_dir)
    try:
        return _MANIFEST.validate_json(read_cached(path))
    except (OSError, ValidationError):
        refs = build_manifest(checkpoint, spec)
    write_cached(path, _MANIFEST.dump_json(refs))
    return refs
