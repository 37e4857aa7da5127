"""A segment of a graph as an ONNX model of its own, with the weights that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hearth.graph.onnx_reader import OnnxModel
from hearth.graph.plan import Segment


class Initializer(NamedTuple):
    """A weight. `dtype` is a numpy (or ml_dtypes) name; `read` gives its little-endian bytes from the mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], memoryview]


class SegmentModel(NamedTuple):
    """`proto` is an ONNX model whose large initialisers are placeholders (external data with a dummy location).

    Each of `initializers` goes to onnxruntime by `SessionOptions.add_external_initializers`.
    """

    proto: bytes
    initializers: tuple[Initializer, ...]


def segment_model(model: OnnxModel, segment: Segment) -> SegmentModel:
    raise NotImplementedError
