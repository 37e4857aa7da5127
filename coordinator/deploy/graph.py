"""Deployments of ONNX graphs: concurrent requests through the pipeline, and the chunks of its segments.

A segment has chunks of its ONNX protobuf, and of each weight separately, so that another cut reuses the weights' chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from coordinator.deploy.chunk_scheduler import Chunk
from coordinator.deploy.deployment import Deployment, RunResult, Weights
from coordinator.devices.fleet import Fleet
from coordinator.models.graph_file import GraphFile
from coordinator.plan.graph.memory import MAX_GRAPH_CHUNK_BYTES
from coordinator.plan.graph.predict import requests_in_flight
from hearth.errors import BadMessage, BadModelFile
from hearth.plan.graph import Segment
from hearth.plan.plan import GraphPlan
from hearth.platform.disk import FILE_SECONDS, on_disk, read_seconds
from hearth.protocol import DEFAULT_DEPLOYMENT, GRAPH_REPLY_MARGIN_SECONDS
from hearth.validation import first_error
from hearth.wire.messages import ArrayChunks, Run, SegmentFiles, SegmentParts

Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
# Requests that a worker accepts above `max_in_flight`: a few failed requests may still run on other workers.
_EXTRA_REQUESTS = 4


async def segment_weights(chunks: SegmentChunks, plan: GraphPlan) -> Weights:
    """The weight chunks of every rank's segments. Raises BadModelFile, DiskHung."""
    segments = plan.body.segments
    seconds = read_seconds(await on_disk(chunks.path, FILE_SECONDS, chunks.num_bytes))
    contents = [await on_disk(chunks.path, seconds, chunks.files_and_chunks, segment) for segment in segments]
    of_segments = list(zip(segments, contents, strict=True))
    by_rank = [[each for segment, each in of_segments if segment.rank == rank] for rank in range(plan.num_ranks)]
    return Weights(
        chunks=[
            list({chunk.hash: chunk for _, own in contents_of_rank for chunk in own}.values())
            for contents_of_rank in by_rank
        ],
        parts=[
            SegmentParts(
                files=tuple(files for files, _ in contents_of_rank),
                max_in_flight=requests_in_flight(segments) + _EXTRA_REQUESTS,
            )
            for contents_of_rank in by_rank
        ],
    )


class GraphDeployment(Deployment):
    """`max_in_flight` concurrent requests keep every stage busy; the caller must not send more."""

    plan: GraphPlan

    def __init__(self, fleet: Fleet, plan: GraphPlan, name: str = DEFAULT_DEPLOYMENT) -> None:
        super().__init__(fleet, plan, name)
        self.max_in_flight = requests_in_flight(plan.body.segments)
        self._input_names = [
            [name for name in plan.model.inputs if any(name in each.inputs for each in plan.body.segments_of(rank))]
            for rank in range(plan.num_ranks)
        ]

    async def infer(self, inputs: Mapping[str, np.ndarray[Any, Any]], trace: bool = False) -> RunResult[Arrays]:
        """Run one request through all ranks. Raises as `run` does."""

        def join(by_rank: Sequence[Arrays]) -> Arrays:
            outputs = {name: array for arrays in by_rank for name, array in arrays.items()}
            if missing := [name for name in self.plan.model.outputs if name not in outputs]:
                raise BadMessage(reason=f"no worker returned the output {missing[0]}")
            return {name: outputs[name] for name in self.plan.model.outputs}

        seconds = self.plan.peer_timeout_seconds()
        inputs_by_rank = [{name: inputs[name] for name in names} for names in self._input_names]
        request = Run(**self.command_fields, step=0, timeout_seconds=seconds, trace=trace)
        return await self.run(request, inputs_by_rank, join, seconds + GRAPH_REPLY_MARGIN_SECONDS)


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
        from coordinator.models.onnx.file import dtype_name, num_bytes_of
        from coordinator.models.onnx.segments import segment_model

        proto, weights = segment_model(self._model, segment)
        graph = _split(self.path, len(proto), lambda part: memoryview(proto)[part])
        chunks, arrays = [*graph], []
        for weight in weights:
            if weight.name not in self._weight_chunks:
                num_bytes = num_bytes_of(weight.data_type, tuple(weight.dims))
                self._weight_chunks[weight.name] = _split(self.path, num_bytes, partial(self._model.file.read, weight))
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


def _split(path: Path, num_bytes: int, read: Callable[[slice], memoryview]) -> tuple[Chunk, ...]:
    def chunk(start: int) -> Chunk:
        part = slice(start, min(start + MAX_GRAPH_CHUNK_BYTES, num_bytes))
        return Chunk(hashlib.sha256(read(part)).hexdigest(), part.stop - start, partial(read, part), str(path))

    return tuple(chunk(start) for start in range(0, max(num_bytes, 1), MAX_GRAPH_CHUNK_BYTES))
