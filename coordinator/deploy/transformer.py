"""One deployed plan: its shards are pushed, its workers connected, its steps run. Ends when it fails or is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coordinator.deploy.distribution import Distribution, Progress
from coordinator.deploy.workers import Workers, errors_of
from coordinator.devices.fleet import Fleet
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.sharding import cached_manifest, chunk_bytes
from hearth.errors import BadMessage
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import Link
from hearth.plan.value_formats import Values
from hearth.trace import shift_to_common_clock
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import (
    ChunkRef,
    DeviceTrace,
    GenerateTokens,
    GenerationEnded,
    Load,
    Run,
    RunDone,
    Sampling,
    ShardParts,
    TokensGenerated,
    WireStats,
)
from hearth.wire.rpc import Reply

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class StepResult:
    """`rows` is [T,H] for hidden output; for mean output [N,H], sums over all rows of each sequence."""

    rows: np.ndarray[Any, Any]
    latency_seconds: float  # as a client sees it
    step_seconds: float  # as the workers see it: without the way to them and back, like a plan's prediction
    compute_seconds: tuple[float, ...]  # busy time of each rank
    traces: tuple[DeviceTrace, ...]


class Deployment(Workers):
    """Of a transformer. Steps run one at a time; generations side by side."""

    def __init__(self, fleet: Fleet, plan: TransformerPlan) -> None:
        super().__init__(fleet, plan.devices, plan.epoch)
        self.plan = plan
        self.weight_error = 0.0  # of the matrices, for the format that they are kept in; of the worst device
        self._step = 0

    # ---- bringing it up -------------------------------------------------------------------------------------------

    async def push(self, model_dir: Path, cache_dir: Path, progress: Progress) -> list[tuple[ChunkRef, ...]]:
        """Bring every device the chunks that it needs and does not have. Returns each rank's chunks."""
        plan = self.plan
        with Checkpoint(model_dir) as checkpoint:
            manifest = await asyncio.to_thread(cached_manifest, checkpoint, plan.model, cache_dir)
            per_rank = [chunks_for_rank(manifest, plan, rank) for rank in range(plan.num_ranks)]

            def read(chunk: ChunkRef) -> bytes:
                return chunk_bytes(checkpoint, plan.model, chunk.kind, chunk.layer, chunk.grain)

            distribution = Distribution(self._fleet, self.devices, read, progress)
            try:
                await distribution.run(per_rank)
            finally:
                self.sent_bytes, self.passed_bytes = distribution.sent_bytes, distribution.passed_bytes
        return per_rank

    async def load(
        self, chunks: Sequence[tuple[ChunkRef, ...]], links: Mapping[tuple[str, str], Link], encrypt: bool
    ) -> None:
        """Start the workers, and connect them when all are bound."""

        def load(rank: int, token: bytes) -> Load:
            return Load(
                holder=self._fleet.holder,
                deployment=self.deployment,
                plan=self.plan,
                rank=rank,
                parts=ShardParts(chunks=chunks[rank]),
                encrypt_data_plane=encrypt,
                plan_token=token,
            )

        bound = await self.start_workers(load, links)
        self.weight_error = max(each.weight_error for each in bound)

    # ---- running --------------------------------------------------------------------------------------------------

    async def run_step(
        self,
        token_ids: np.ndarray[Any, Any],
        cumulative_lengths: np.ndarray[Any, Any],
        output: Literal["hidden", "mean"],
        trace: bool = False,
        values: Values | None = None,
    ) -> StepResult:
        """One forward pass on all ranks, activations as `values` (None: as the plan says).

        Raises the error that caused the failure, not those that followed from it.
        """
        import numpy as np

        if self.failure is not None:
            raise self.failure
        self._step += 1
        timeout = self.plan.wait_seconds(len(token_ids))
        request = Run(
            **self.command,
            step=self._step,
            names=("token_ids", "cumulative_lengths"),
            output=output,
            timeout_seconds=timeout,
            trace=trace,
            values=values,
        )
        payload = [*pack_array(token_ids), *pack_array(cumulative_lengths)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        clocks: dict[int, tuple[float, float]] = {}

        async def one(rank: int) -> tuple[RunDone, np.ndarray[Any, Any]]:
            sent = loop.time()
            reply = await self._fleet.call(
                self.plan.devices[rank].device_id, request, payload, timeout_seconds=4 * timeout + 30.0
            )
            clocks[rank] = (sent, loop.time())
            if not isinstance(reply.message, RunDone):
                raise BadMessage(reason=f"a worker answered with {type(reply.message).__name__}")
            return reply.message, unpack_array(reply.payload)

        tasks = [asyncio.ensure_future(one(rank)) for rank in range(self.plan.num_ranks)]
        while (pending := {task for task in tasks if not task.done()}) and not self.failure and not errors_of(tasks):
            waits: set[asyncio.Future[Any]] = {*pending, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.failure is not None or errors_of(tasks):
            raise await self.give_up(tasks)
        latency = loop.time() - began
        results = [task.result() for task in tasks]
        self.wire = WireStats.sum(done.wire for done, _ in results)
        self.dropped_messages = sum(done.dropped_messages for done, _ in results)
        if output == "mean":
            rows = results[0][1].copy()
            for _, part in results[1:]:  # in rank order, so that results repeat bit for bit
                rows += part
        else:
            rows = np.concatenate([part for _, part in results])
        traces = tuple(
            DeviceTrace(device=device.name, rank=rank, events=shift_to_common_clock(done, *clocks[rank]))
            for rank, (device, (done, _)) in enumerate(zip(self.plan.devices, results, strict=True))
            if trace
        )
        return StepResult(
            rows,
            latency,
            step_seconds=max(done.ended_seconds - done.began_seconds for done, _ in results),
            compute_seconds=tuple(sum(done.compute_seconds) for done, _ in results),
            traces=traces,
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

        `timeout_seconds` bounds the wait for each answer. Raises as `run_step` does, for all sequences that run; an error
        of the scope `request` leaves the others alone.
        """
        if self.failure is not None:
            raise self.failure
        request = GenerateTokens(
            **self.command,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            first_index=first_index,
            timeout_seconds=timeout_seconds,
        )
        payload = pack_array(token_ids)
        first = self.plan.devices[0].device_id
        stream = self._fleet.stream(first, request, payload, GenerationEnded, timeout_seconds)
        async with aclosing(stream) as replies:
            while True:
                message = (await self._next(replies)).message
                if not isinstance(message, TokensGenerated | GenerationEnded):
                    raise BadMessage(reason=f"a worker answered with {type(message).__name__}")
                yield message
                if isinstance(message, GenerationEnded):
                    return

    async def _next(self, replies: AsyncGenerator[Reply, None]) -> Reply:
        """The next reply. Raises what ended it, or the plan while it was waited for."""
        following = asyncio.ensure_future(anext(replies))
        try:
            waits: set[asyncio.Future[Any]] = {following, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            errors = errors_of([following])
            if errors and errors[0].scope == "request":
                raise errors[0]
            if errors or self.failure is not None:
                raise await self.give_up([following])
            return following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
