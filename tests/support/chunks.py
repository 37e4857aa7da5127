"""Chunks for the shard store."""

from __future__ import annotations

import hashlib


def chunk(index: int, size: int = 100) -> tuple[str, bytes]:
    data = bytes([index % 256]) * size
    return hashlib.sha256(data).hexdigest(), data
