"""Deployments of ONNX graphs: chunks of the segments, and concurrent requests through the pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import numpy as np

from coordinator.deploy.deployment import Deployment, RunResult, Weights
from coordinator.deploy.graph_chunks import SegmentChunks
from coordinator.devices.fleet import Fleet
from coordinator.plan.graph.predict import requests_in_flight
from hearth.errors import BadMessage
from hearth.plan.plan import GraphPlan
from hearth.platform.disk import FILE_SECONDS, on_disk, read_seconds
from hearth.protocol import DEFAULT_DEPLOYMENT, GRAPH_REPLY_MARGIN_SECONDS
from hearth.wire.messages import SegmentParts

Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
# Requests that a worker accepts above `max_in_flight`: a few failed requests may still run on other workers.
_EXTRA_REQUESTS = 4


@asynccontextmanager
async def segment_weights(chunks: SegmentChunks, plan: GraphPlan) -> AsyncIterator[Weights]:
    """The weight chunks of every rank's segments. Raises BadModelFile, DiskHung."""
    segments = plan.body.segments
    seconds = read_seconds(await on_disk(chunks.path, FILE_SECONDS, chunks.num_bytes))
    contents = [await on_disk(chunks.path, seconds, chunks.files_and_chunks, segment) for segment in segments]
    by_rank = [
        [each for segment, each in zip(segments, contents, strict=True) if segment.rank == rank]
        for rank in range(plan.num_ranks)
    ]
    yield Weights(
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

        peer_timeout_seconds = self.plan.peer_timeout_seconds()
        inputs_by_rank = [{name: inputs[name] for name in names} for names in self._input_names]
        return await self.run(
            inputs_by_rank, join, peer_timeout_seconds, peer_timeout_seconds + GRAPH_REPLY_MARGIN_SECONDS, trace
        )
