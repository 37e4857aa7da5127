"""Chunks for the shard store, and references to all chunks of a model."""

from __future__ import annotations

import hashlib

from coordinator.models.checkpoint.chunk_layout import all_chunks
from hearth.plan.model_spec import ModelSpec
from hearth.wire.messages import ChunkRef


def chunk(index: int, size: int = 100) -> tuple[str, bytes]:
    data = bytes([index % 256]) * size
    return hashlib.sha256(data).hexdigest(), data


def refs_of(spec: ModelSpec) -> tuple[ChunkRef, ...]:
    """All chunks of a model, with made-up hashes."""
    return tuple(
        ChunkRef(hash=f"{index:064x}", num_bytes=1, kind=kind, layer=layer, grain=grain)
        for index, (kind, layer, grain) in enumerate(all_chunks(spec))
    )
