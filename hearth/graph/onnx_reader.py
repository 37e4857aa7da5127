"""GraphSpec from an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hearth.graph.spec import GraphSpec


class OnnxModel:
    """An ONNX model with every shape known; weights stay in the mapped file until one is read."""

    spec: GraphSpec

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the file, its external data and the dimensions given at load."""
        raise NotImplementedError


def read_onnx(path: str | Path, dims: Mapping[str, int] | None = None) -> OnnxModel:
    """Read a model and fix its dynamic dimensions: {"batch": 1}, or {"input.0": 1} for one without a name."""
    raise NotImplementedError
