"""Deployments of ONNX graphs: chunks of the segments, and concurrent requests through the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import numpy as np

from coordinator.deploy.deployment import Deployment, Result, Weights
from coordinator.deploy.graph_chunks import SegmentChunks
from coordinator.devices.fleet import Fleet
from coordinator.plan.graph.price import in_flight
from hearth.errors import BadMessage
from hearth.plan.plan import GraphPlan
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.messages import SegmentParts

Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
_SPARE = 4  # requests that a worker accepts above `max_in_flight`: a failed request may still run on other workers
_LATE_SECONDS = 5.0  # added to the worker's own timeout, so that its more specific error comes first


@asynccontextmanager
async def segment_weights(chunks: SegmentChunks, plan: GraphPlan) -> AsyncIterator[Weights]:
    """The weight chunks of every rank's segments. Raises BadModelFile."""
    segments = plan.body.segments
    made = [await asyncio.to_thread(chunks.of, segment) for segment in segments]
    by_rank = [
        [each for segment, each in zip(segments, made, strict=True) if segment.rank == rank]
        for rank in range(plan.num_ranks)
    ]
    yield Weights(
        chunks=[list({chunk.hash: chunk for _, own in of_rank for chunk in own}.values()) for of_rank in by_rank],
        parts=[
            SegmentParts(files=tuple(files for files, _ in of_rank), max_in_flight=in_flight(segments) + _SPARE)
            for of_rank in by_rank
        ],
    )


class GraphDeployment(Deployment):
    """`max_in_flight` concurrent requests keep every stage busy; the caller must not send more."""

    plan: GraphPlan

    def __init__(self, fleet: Fleet, plan: GraphPlan, name: str = DEFAULT_DEPLOYMENT) -> None:
        super().__init__(fleet, plan, name)
        self.max_in_flight = in_flight(plan.body.segments)
        self._inputs = [
            [name for name in plan.model.inputs if any(name in each.inputs for each in plan.body.segments_of(rank))]
            for rank in range(plan.num_ranks)
        ]

    async def infer(self, inputs: Mapping[str, np.ndarray[Any, Any]], trace: bool = False) -> Result[Arrays]:
        """Run one request through all ranks. Raises as `run` does."""

        def join(by_rank: Sequence[Arrays]) -> Arrays:
            made = {name: array for arrays in by_rank for name, array in arrays.items()}
            if missing := [name for name in self.plan.model.outputs if name not in made]:
                raise BadMessage(reason=f"no worker returned the output {missing[0]}")
            return {name: made[name] for name in self.plan.model.outputs}

        wait = self.plan.wait_seconds()
        of_rank = [{name: inputs[name] for name in names} for names in self._inputs]
        return await self.run(of_rank, join, wait, wait + _LATE_SECONDS, trace)
