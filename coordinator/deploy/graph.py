"""Deployments of ONNX graphs: the pieces of their segments, and requests that run through the pipeline side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.deploy.deployment import Deployment, Weights
from coordinator.deploy.graph_chunks import Piece, Pieces
from coordinator.devices.fleet import Fleet
from coordinator.plan.graph.price import in_flight
from hearth.errors import BadMessage
from hearth.plan.plan import GraphPlan
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.messages import DeviceTrace, SegmentParts

if TYPE_CHECKING:
    import numpy as np

_SPARE = 4  # requests that a worker takes above `max_in_flight`: one that failed here may still be running there
_LATE_SECONDS = 5.0  # added to the worker's own timeout, so that its error, which says more, comes first


@asynccontextmanager
async def segment_weights(pieces: Pieces, plan: GraphPlan) -> AsyncIterator[Weights[Piece]]:
    """The pieces of every rank's segments. Raises BadModelFile."""
    segments = plan.body.segments
    made = [await asyncio.to_thread(pieces.of, segment) for segment in segments]
    by_rank = [
        [each for segment, each in zip(segments, made, strict=True) if segment.rank == rank]
        for rank in range(plan.num_ranks)
    ]
    yield Weights(
        chunks=[list({piece.hash: piece for each in own for piece in each.pieces}.values()) for own in by_rank],
        parts=[
            SegmentParts(files=tuple(each.files for each in own), max_in_flight=in_flight(segments) + _SPARE)
            for own in by_rank
        ],
        read=lambda piece: piece.read(),
    )


@dataclass(frozen=True)
class Inference:
    """`compute_seconds` by rank."""

    outputs: dict[str, np.ndarray[Any, Any]]
    latency_seconds: float
    compute_seconds: tuple[float, ...]
    traces: tuple[DeviceTrace, ...]


class GraphDeployment(Deployment):
    """`max_in_flight` requests at once keep every stage busy; it is up to the caller to send no more."""

    plan: GraphPlan

    def __init__(self, fleet: Fleet, plan: GraphPlan, name: str = DEFAULT_DEPLOYMENT) -> None:
        super().__init__(fleet, plan, name)
        self.max_in_flight = in_flight(plan.body.segments)
        taken = [
            {name for segment in plan.body.segments_of(rank) for name in segment.inputs}
            for rank in range(plan.num_ranks)
        ]
        self._inputs = [[name for name in plan.model.inputs if name in own] for own in taken]

    async def infer(self, inputs: Mapping[str, np.ndarray[Any, Any]], trace: bool = False) -> Inference:
        """One request through all ranks. Raises as `run` does."""
        wait = self.plan.wait_seconds()
        of_rank = [{name: inputs[name] for name in names} for names in self._inputs]
        result = await self.run(of_rank, wait, wait + _LATE_SECONDS, trace)
        made = {name: array for rank in result.ranks for name, array in rank.arrays.items()}
        if missing := [name for name in self.plan.model.outputs if name not in made]:
            raise BadMessage(reason=f"no worker gave the output {missing[0]}")
        return Inference(
            outputs={name: made[name] for name in self.plan.model.outputs},
            latency_seconds=result.latency_seconds,
            compute_seconds=result.compute_seconds,
            traces=result.traces,
        )
