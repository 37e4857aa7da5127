"""Chunks of a segment: its ONNX protobuf, and each weight separately, so that another cut reuses the weights' chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from coordinator.deploy.chunk_scheduler import Chunk
from coordinator.models.graph_file import GraphFile
from coordinator.plan.graph.memory import MAX_GRAPH_CHUNK_BYTES
from hearth.errors import BadModelFile
from hearth.plan.graph import Segment
from hearth.validation import first_error
from hearth.wire.messages import ArrayChunks, SegmentFiles


class SegmentChunks:
    """The chunks of one model's segments. Each weight is hashed once and reused for every cut."""

    def __init__(self, graph: GraphFile) -> None:
        assert graph.model is not None
        self.path = graph.path
        self._model = graph.model
        self._weight_chunks: dict[str, tuple[Chunk, ...]] = {}

    def num_bytes(self) -> int:
        """The size of the model's files. Raises OSError."""
        return sum(path.stat().st_size for path in self._model.file.paths())

    def files_and_chunks(self, segment: Segment) -> tuple[SegmentFiles, list[Chunk]]:
        """How a device assembles the segment, and its chunks. Raises BadModelFile for a weight that cannot be described."""
        from coordinator.models.onnx.file import dtype_name
        from coordinator.models.onnx.segments import segment_model

        proto, weights = segment_model(self._model, segment)
        graph = _split(self.path, lambda: memoryview(proto))
        chunks, arrays = [*graph], []
        for weight in weights:
            if weight.name not in self._weight_chunks:
                self._weight_chunks[weight.name] = _split(self.path, partial(self._model.file.read, weight))
            weight_chunks = self._weight_chunks[weight.name]
            chunks += weight_chunks
            array = {"name": weight.name, "dtype": dtype_name(weight.data_type), "shape": tuple(weight.dims)}
            try:
                arrays.append(
                    ArrayChunks.model_validate({**array, "chunks": tuple(chunk.hash for chunk in weight_chunks)})
                )
            except ValidationError as error:
                reason = f"the weight {weight.name} cannot be sent: {first_error(error)}"
                raise BadModelFile(path=str(self.path), reason=reason) from None
        return SegmentFiles(graph=tuple(chunk.hash for chunk in graph), initializers=tuple(arrays)), chunks


def _split(path: Path, read: Callable[[], memoryview]) -> tuple[Chunk, ...]:
    data = read()

    def chunk(start: int) -> Chunk:
        part = data[start : start + MAX_GRAPH_CHUNK_BYTES]
        end = start + MAX_GRAPH_CHUNK_BYTES
        return Chunk(hashlib.sha256(part).hexdigest(), len(part), lambda: read()[start:end], str(path))

    return tuple(chunk(start) for start in range(0, max(len(data), 1), MAX_GRAPH_CHUNK_BYTES))
