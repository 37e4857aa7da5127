"""Small files: written completely or not at all, and caches that may be damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to the disk, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_json(path: Path) -> object | None:
    """A cache file's content, or None when it is absent or damaged."""
    try:
        value: object = json.loads(path.read_text())
        return value
    except (OSError, ValueError):
        return None
