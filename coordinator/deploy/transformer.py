"""Deployments of transformers: their weights, steps that run one at a time, and generations that run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coordinator.deploy.deployment import Deployment, Weights, errors_of
from coordinator.devices.fleet import Fleet
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.sharding import cached_manifest, chunk_bytes
from hearth.errors import BadMessage
from hearth.plan.plan import TransformerPlan
from hearth.plan.value_formats import Values
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.framing import pack_array
from hearth.wire.messages import (
    Abort,
    ChunkRef,
    DeviceTrace,
    GenerateTokens,
    GenerationEnded,
    Sampling,
    ShardParts,
    TokensGenerated,
)
from hearth.wire.rpc import Reply

if TYPE_CHECKING:
    import numpy as np


@asynccontextmanager
async def shard_weights(model_dir: Path, plan: TransformerPlan, cache_dir: Path) -> AsyncIterator[Weights[ChunkRef]]:
    """The chunks of every rank's shard; the checkpoint stays open inside. Raises BadCheckpoint."""
    with Checkpoint(model_dir) as checkpoint:
        manifest = await asyncio.to_thread(cached_manifest, checkpoint, plan.model, cache_dir)
        chunks = [chunks_for_rank(manifest, plan, rank) for rank in range(plan.num_ranks)]

        def read(chunk: ChunkRef) -> bytes:
            return chunk_bytes(checkpoint, plan.model, chunk.kind, chunk.layer, chunk.grain)

        yield Weights(chunks, [ShardParts(chunks=of_rank) for of_rank in chunks], read)


@dataclass(frozen=True)
class StepResult:
    """`rows` is [T,H] for hidden output; for mean output [N,H], sums over all rows of each sequence."""

    rows: np.ndarray[Any, Any]
    latency_seconds: float  # as a client sees it
    step_seconds: float  # as the workers see it: without the way to them and back, like a plan's prediction
    compute_seconds: tuple[float, ...]  # busy time of each rank
    traces: tuple[DeviceTrace, ...]


class TransformerDeployment(Deployment):
    """Steps run one at a time, which is up to the caller; generations run side by side."""

    plan: TransformerPlan

    def __init__(self, fleet: Fleet, plan: TransformerPlan, name: str = DEFAULT_DEPLOYMENT) -> None:
        super().__init__(fleet, plan, name)
        self.values: Values | None = None  # of activations in steps; None: as the plan says

    async def run_step(
        self,
        token_ids: np.ndarray[Any, Any],
        cumulative_lengths: np.ndarray[Any, Any],
        output: Literal["hidden", "mean"],
        trace: bool = False,
        values: Values | None = None,
    ) -> StepResult:
        """One forward pass on all ranks. Raises as `run` does."""
        import numpy as np

        inputs = {"token_ids": token_ids, "cumulative_lengths": cumulative_lengths}
        wait = self.plan.wait_seconds(len(token_ids))
        result = await self.run(
            [inputs] * self.plan.num_ranks, wait, 4 * wait + 30.0, trace, output, values or self.values
        )
        parts = [rank.arrays[output] for rank in result.ranks]
        if output == "mean":
            rows = parts[0].copy()
            for part in parts[1:]:  # in rank order, so that results repeat bit for bit
                rows += part
        else:
            rows = np.concatenate(parts)
        return StepResult(
            rows,
            result.latency_seconds,
            step_seconds=max(rank.done.ended_seconds - rank.done.began_seconds for rank in result.ranks),
            compute_seconds=result.compute_seconds,
            traces=result.traces,
        )

    async def generate(
        self,
        token_ids: np.ndarray[Any, Any],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int],
        first_index: int,
        timeout_seconds: float,
    ) -> AsyncGenerator[TokensGenerated | GenerationEnded, None]:
        """Rank 0 continues a prompt [T] int32: tokens as they come, then the end. Closed early, it forgets the sequence.

        `timeout_seconds` bounds the wait for each answer. Raises as `run` does, for all sequences that run; an error of
        the scope `request` leaves the others alone.
        """
        if self.failure is not None:
            raise self.failure
        request = GenerateTokens(
            **self.command,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            first_index=first_index,
        )
        first = self.plan.devices[0].device_id
        stream = self._fleet.stream(first, request, pack_array(token_ids), GenerationEnded, timeout_seconds)
        async with aclosing(stream) as replies:
            while True:
                message = (await self._next(replies)).message
                if not isinstance(message, TokensGenerated | GenerationEnded):
                    raise BadMessage(reason=f"a worker answered with {type(message).__name__}")
                yield message
                if isinstance(message, GenerationEnded):
                    return

    async def _next(self, replies: AsyncGenerator[Reply, None]) -> Reply:
        """The next reply. Raises the error that ended the stream, or the deployment while it was waited for."""
        following = asyncio.ensure_future(anext(replies))
        try:
            waits: set[asyncio.Future[Any]] = {following, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            errors = errors_of([following])
            if errors and errors[0].scope == "request":
                raise errors[0]
            if errors or self.failure is not None:
                raise await self.cause([following], Abort(**self.command, reason=""))
            return following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
