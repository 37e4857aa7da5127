"""The files of the corpus in `data/`: JSON; large ones are compressed deterministically."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from corpus.compare import Intended

DATA = Path(__file__).parent / "data"


def save(name: str, value: Any) -> int:
    """Write JSON, compressed if the name ends in .gz. Returns the bytes written."""
    compressed = name.endswith(".gz")
    text = json.dumps(
        value, sort_keys=True, indent=None if compressed else 1, separators=(",", ":") if compressed else None
    )
    data = (text + "\n").encode()
    return (DATA / name).write_bytes(gzip.compress(data, mtime=0) if compressed else data)


@cache
def load(name: str) -> Any:
    data = (DATA / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def load_intended() -> list[Intended]:
    return [Intended(**each) for each in load("intended.json")]
