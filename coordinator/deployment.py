"""One deployed plan: its shards are pushed, its workers connected, its steps run. Ends when it fails or is closed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coordinator.distribution import Distribution, Progress
from coordinator.fleet import Fleet
from hearth.errors import (
    BadMessage,
    BadRequest,
    DeviceLost,
    FrameTooLarge,
    HearthError,
    QueueFull,
    StepFailed,
    WorkerDied,
)
from hearth.framing import pack_array, unpack_array
from hearth.messages import (
    AbortStep,
    ChunkRef,
    ConnectPeers,
    DeviceTrace,
    Done,
    GenerateTokens,
    GenerationEnded,
    LoadShard,
    Peer,
    RunStep,
    Sampling,
    StepDone,
    TokensGenerated,
    Unload,
    WireStats,
    WorkerBound,
)
from hearth.plan import Plan, Values
from hearth.profile import Link
from hearth.rpc import Reply
from hearth.tasks import all_or_first_error
from hearth.trace import shift_to_common_clock

if TYPE_CHECKING:
    import numpy as np

_LOAD_SECONDS = 320.0  # a little more than the agent's own limit, so that its error comes first
_ABORT_GRACE_SECONDS = 0.5
# What is wrong with one request and not with the plan: whatever else runs on it goes on.
_OF_THE_REQUEST = (BadRequest, FrameTooLarge, QueueFull)


@dataclass(frozen=True)
class StepResult:
    """`rows` is [T,H] for hidden output; for mean output [N,H], sums over all rows of each sequence."""

    rows: np.ndarray[Any, Any]
    latency_seconds: float  # as a client sees it
    step_seconds: float  # as the workers see it: without the way to them and back, like a plan's prediction
    compute_seconds: tuple[float, ...]  # busy time of each rank
    traces: tuple[DeviceTrace, ...]


class Deployment:
    """Made by `deploy`. `fail` may be called from outside, when a device is lost."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self.plan = plan
        self.sent_bytes = self.passed_bytes = 0  # weights that the coordinator sent, and that devices passed on
        self.weight_error = 0.0  # of the matrices, for the format that they are kept in; of the worst device
        self.wire = WireStats()
        self.dropped_messages = 0
        self._fleet = fleet
        self._step = 0
        self._failed: asyncio.Future[HearthError] = asyncio.get_running_loop().create_future()

    @property
    def failure(self) -> HearthError | None:
        return self._failed.result() if self._failed.done() else None

    def fail(self, error: HearthError) -> None:
        """A device or worker of this plan is gone: the running step, if any, ends with `error`."""
        if not self._failed.done():
            self._failed.set_result(error)

    # ---- bringing it up -------------------------------------------------------------------------------------------

    async def push(self, model_dir: Path, cache_dir: Path, progress: Progress) -> list[tuple[ChunkRef, ...]]:
        """Bring every device the chunks that it needs and does not have. Returns each rank's chunks."""
        distribution = Distribution(self._fleet, self.plan, progress)
        try:
            return await distribution.run(model_dir, cache_dir)
        finally:
            self.sent_bytes, self.passed_bytes = distribution.sent_bytes, distribution.passed_bytes

    async def load(
        self, chunks: Sequence[tuple[ChunkRef, ...]], links: Mapping[tuple[str, str], Link], encrypt: bool
    ) -> None:
        """Start the workers, and connect them when all are bound."""
        token = secrets.token_bytes(16)
        devices = self.plan.devices
        bound = await self._on_all(
            lambda rank: self._fleet.ask(
                devices[rank].device_id,
                LoadShard(
                    holder=self._fleet.holder,
                    plan=self.plan,
                    rank=rank,
                    chunks=chunks[rank],
                    encrypt_data_plane=encrypt,
                    plan_token=token,
                ),
                WorkerBound,
                timeout_seconds=_LOAD_SECONDS,
            )
        )

        def connect(rank: int) -> Awaitable[Done]:
            peers = tuple(
                Peer(
                    rank=other,
                    host=self._fleet.devices[devices[other].device_id].host,
                    port=bound[other].port,
                    public_key=bound[other].public_key,
                    bytes_per_second=links[devices[rank].device_id, devices[other].device_id].bytes_per_second,
                )
                for other in range(self.plan.num_ranks)
                if other != rank
            )
            request = ConnectPeers(holder=self._fleet.holder, epoch=self.plan.epoch, peers=peers)
            return self._fleet.ask(devices[rank].device_id, request, Done, timeout_seconds=35.0)

        await self._on_all(connect)
        self.weight_error = max(each.weight_error for each in bound)

    async def close(self) -> None:
        """Stop the workers, so that the next plan finds their memory free."""
        self.fail(StepFailed(device="the coordinator", reason="the plan was taken down"))
        request = Unload(holder=self._fleet.holder, epoch=self.plan.epoch)
        calls = (
            self._fleet.call(device.device_id, request, timeout_seconds=5.0)
            for device in self.plan.devices
            if self._fleet.devices[device.device_id].health == "alive"
        )
        await asyncio.gather(*calls, return_exceptions=True)

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
        request = RunStep(
            holder=self._fleet.holder,
            epoch=self.plan.epoch,
            step=self._step,
            output=output,
            timeout_seconds=timeout,
            trace=trace,
            values=values,
        )
        payload = [*pack_array(token_ids), *pack_array(cumulative_lengths)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        clocks: dict[int, tuple[float, float]] = {}

        async def one(rank: int) -> tuple[StepDone, np.ndarray[Any, Any]]:
            sent = loop.time()
            reply = await self._fleet.call(
                self.plan.devices[rank].device_id, request, payload, timeout_seconds=4 * timeout + 30.0
            )
            clocks[rank] = (sent, loop.time())
            if not isinstance(reply.message, StepDone):
                raise BadMessage(reason=f"a worker answered with {type(reply.message).__name__}")
            return reply.message, unpack_array(reply.payload)

        tasks = [asyncio.ensure_future(one(rank)) for rank in range(self.plan.num_ranks)]
        while (pending := {task for task in tasks if not task.done()}) and not self.failure and not _errors(tasks):
            waits: set[asyncio.Future[Any]] = {*pending, self._failed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.failure is not None or _errors(tasks):
            raise await self._give_up(tasks)
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
            DeviceTrace(device=device.name, events=shift_to_common_clock(done, *clocks[rank]))
            for rank, (device, (done, _)) in enumerate(zip(self.plan.devices, results, strict=True))
            if trace
        )
        return StepResult(
            rows,
            latency,
            step_seconds=max(done.ended_seconds - done.began_seconds for done, _ in results),
            compute_seconds=tuple(done.compute_seconds for done, _ in results),
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
        of this request alone (BadRequest, QueueFull) leaves the others alone.
        """
        if self.failure is not None:
            raise self.failure
        request = GenerateTokens(
            holder=self._fleet.holder,
            epoch=self.plan.epoch,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            first_index=first_index,
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
            errors = _errors([following])
            if errors and isinstance(errors[0], _OF_THE_REQUEST):
                raise errors[0]
            if errors or self.failure is not None:
                raise await self._give_up([following])
            return following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _give_up(self, tasks: Sequence[asyncio.Future[Any]]) -> HearthError:
        """End the step everywhere, and find the error at the bottom of it."""
        reason = str(self.failure or _errors(tasks)[0])[:1000]
        request = AbortStep(holder=self._fleet.holder, epoch=self.plan.epoch, reason=reason)
        aborts = [
            asyncio.ensure_future(self._fleet.call(device.device_id, request, timeout_seconds=_ABORT_GRACE_SECONDS))
            for device in self.plan.devices
        ]
        await asyncio.wait([*tasks, *aborts], timeout=_ABORT_GRACE_SECONDS)
        for task in (*tasks, *aborts):
            task.cancel()
        await asyncio.gather(*tasks, *aborts, return_exceptions=True)
        found = [*([self.failure] if self.failure else []), *_errors(tasks), *_errors(aborts)]
        return min(found, key=lambda error: not isinstance(error, WorkerDied | DeviceLost))

    async def _on_all(self, call: Callable[[int], Awaitable[Any]]) -> list[Any]:
        return await all_or_first_error(call(rank) for rank in range(self.plan.num_ranks))


def _errors(tasks: Sequence[asyncio.Future[Any]]) -> list[HearthError]:
    found = []
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, HearthError):
                raise error
            found.append(error)
    return found
