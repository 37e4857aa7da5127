"""GraphSpec from the JSON of exported Keras graphs."""

from __future__ import annotations

from pathlib import Path

from hearth.graph.spec import GraphSpec


def read_json(path: str | Path) -> GraphSpec:
    raise NotImplementedError
