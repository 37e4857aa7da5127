"""A segment as content-named pieces: its ONNX protobuf, and each weight by itself, so that another cut renames no weight."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from pydantic import ValidationError

from coordinator.models.graph_file import Graph
from coordinator.plan.graph.memory import CHUNK_BYTES
from hearth.errors import BadModelFile
from hearth.plan.graph import Segment
from hearth.validation import first_error
from hearth.wire.messages import ArrayChunks, SegmentFiles


class Piece(NamedTuple):
    """At most CHUNK_BYTES. `read` gives its bytes, from the mapped file where it is a weight's."""

    hash: str
    num_bytes: int
    read: Callable[[], bytes | memoryview]


class SegmentPieces(NamedTuple):
    """What a device needs to run a segment, and how it is put together."""

    files: SegmentFiles
    pieces: tuple[Piece, ...]


class Pieces:
    """Of one model. A weight is hashed once, whatever cuts come. Raises BadModelFile for a weight of a type without a name."""

    def __init__(self, graph: Graph) -> None:
        assert graph.model is not None
        self._graph = graph
        self._weights: dict[str, tuple[Piece, ...]] = {}

    def of(self, segment: Segment) -> SegmentPieces:
        from coordinator.models.onnx.segments import segment_model

        assert self._graph.model is not None
        model = segment_model(self._graph.model, segment)
        graph = _cut(lambda: model.proto, len(model.proto))
        pieces, arrays = [*graph], []
        for weight in model.initializers:
            if weight.name not in self._weights:
                self._weights[weight.name] = _cut(weight.read, weight.num_bytes)
            own = self._weights[weight.name]
            pieces += own
            try:
                arrays.append(
                    ArrayChunks.model_validate(
                        {
                            "name": weight.name,
                            "dtype": weight.dtype,
                            "shape": weight.shape,
                            "chunks": tuple(piece.hash for piece in own),
                        }
                    )
                )
            except ValidationError as error:
                reason = f"the weight {weight.name} cannot be sent: {first_error(error)}"
                raise BadModelFile(path=str(self._graph.path), reason=reason) from None
        files = SegmentFiles(graph=tuple(piece.hash for piece in graph), initializers=tuple(arrays))
        return SegmentPieces(files, tuple(pieces))


def _cut(read: Callable[[], bytes | memoryview], num_bytes: int) -> tuple[Piece, ...]:
    data = memoryview(read()).cast("B")

    def piece(start: int) -> Piece:
        stop = min(start + CHUNK_BYTES, num_bytes)
        digest = hashlib.sha256(data[start:stop]).hexdigest()
        return Piece(digest, stop - start, lambda: memoryview(read()).cast("B")[start:stop])

    return tuple(piece(start) for start in range(0, max(num_bytes, 1), CHUNK_BYTES))
