"""One deployed plan of a graph: its segments are pushed, its workers connected; requests run through it side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.deploy.distribution import Distribution, Progress
from coordinator.deploy.graph_chunks import Piece, Pieces
from coordinator.deploy.workers import Workers, errors_of
from coordinator.devices.fleet import Fleet
from coordinator.plan.graph.price import in_flight
from hearth.errors import BadMessage, DeviceLost, HearthError, WorkerDied
from hearth.plan.plan import GraphPlan
from hearth.plan.profile import Link
from hearth.trace import shift_to_common_clock
from hearth.wire.framing import pack_array, unpack_arrays
from hearth.wire.messages import Abort, DeviceTrace, Load, Run, RunDone, SegmentFiles, SegmentParts, WireStats

if TYPE_CHECKING:
    import numpy as np

_ABORT_SECONDS = 0.5
_SPARE = 4  # requests that a worker takes beyond those in flight: one that failed here may not yet have ended there
_LATE_SECONDS = 5.0  # by which the wait for an agent exceeds the worker's own, which knows better what to say


@dataclass(frozen=True)
class Inference:
    """`compute_seconds` by rank."""

    outputs: dict[str, np.ndarray[Any, Any]]
    latency_seconds: float
    compute_seconds: tuple[float, ...]
    traces: tuple[DeviceTrace, ...]


class GraphDeployment(Workers):
    """`max_in_flight` requests at once keep every stage busy; it is up to the caller to send no more."""

    def __init__(self, fleet: Fleet, plan: GraphPlan) -> None:
        super().__init__(fleet, plan.devices, plan.epoch)
        self.plan = plan
        self.max_in_flight = in_flight(plan.body.segments)
        self._step = 0
        self._inputs = [
            tuple(
                name
                for name in plan.model.inputs
                if any(name in segment.inputs for segment in plan.body.segments_of(rank))
            )
            for rank in range(plan.num_ranks)
        ]

    # ---- bringing it up -------------------------------------------------------------------------------------------

    async def push(self, pieces: Pieces, progress: Progress) -> list[tuple[SegmentFiles, ...]]:
        """Bring every device the pieces that it needs and does not have. By rank, what its segments are made from."""
        made = [await asyncio.to_thread(pieces.of, segment) for segment in self.plan.body.segments]
        ranks = range(self.plan.num_ranks)
        own = [
            [each for segment, each in zip(self.plan.body.segments, made, strict=True) if segment.rank == rank]
            for rank in ranks
        ]
        needed = [list({piece.hash: piece for each in of_rank for piece in each.pieces}.values()) for of_rank in own]
        distribution: Distribution[Piece] = Distribution(
            self._fleet, self.devices, lambda piece: piece.read(), progress
        )
        try:
            await distribution.run(needed)
        finally:
            self.sent_bytes, self.passed_bytes = distribution.sent_bytes, distribution.passed_bytes
        return [tuple(each.files for each in of_rank) for of_rank in own]

    async def load(
        self, files: Sequence[tuple[SegmentFiles, ...]], links: Mapping[tuple[str, str], Link], encrypt: bool
    ) -> None:
        """Start the workers, and connect them when all are bound."""

        def load(rank: int, token: bytes) -> Load:
            return Load(
                holder=self._fleet.holder,
                deployment=self.deployment,
                plan=self.plan,
                rank=rank,
                parts=SegmentParts(files=files[rank], max_in_flight=self.max_in_flight + _SPARE),
                encrypt_data_plane=encrypt,
                plan_token=token,
            )

        await self.start_workers(load, links)

    # ---- running --------------------------------------------------------------------------------------------------

    async def infer(self, inputs: Mapping[str, np.ndarray[Any, Any]], trace: bool = False) -> Inference:
        """One request through all ranks. Raises the error that caused the failure, not those that followed from it."""
        if self.failure is not None:
            raise self.failure
        self._step += 1
        step, timeout = self._step, self.plan.wait_seconds()
        frames = {name: pack_array(array) for name, array in inputs.items()}
        loop = asyncio.get_running_loop()
        began = loop.time()
        clocks: dict[int, tuple[float, float]] = {}

        async def one(rank: int) -> tuple[RunDone, dict[str, np.ndarray[Any, Any]]]:
            names = self._inputs[rank]
            request = Run(
                **self.command,
                step=step,
                timeout_seconds=timeout,
                names=names,
                trace=trace,
            )
            payload = [frame for name in names for frame in frames[name]]
            sent = loop.time()
            reply = await self._fleet.call(
                self.devices[rank].device_id, request, payload, timeout_seconds=timeout + _LATE_SECONDS
            )
            clocks[rank] = (sent, loop.time())
            if not isinstance(reply.message, RunDone):
                raise BadMessage(reason=f"a worker answered with {type(reply.message).__name__}")
            return reply.message, unpack_arrays(reply.message.names, reply.payload)

        tasks = [asyncio.ensure_future(one(rank)) for rank in range(self.plan.num_ranks)]
        try:
            while (
                (pending := {task for task in tasks if not task.done()}) and not self.failure and not errors_of(tasks)
            ):
                waits: set[asyncio.Future[Any]] = {*pending, self._failed}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None or errors_of(tasks):
                raise await self._drop(step, tasks)
        finally:
            for task in tasks:
                task.cancel()
        latency = loop.time() - began
        results = [task.result() for task in tasks]
        self.wire = WireStats.sum(done.wire for done, _ in results)
        self.dropped_messages = sum(done.dropped_messages for done, _ in results)
        made = {name: array for _, arrays in results for name, array in arrays.items()}
        if missing := [name for name in self.plan.model.outputs if name not in made]:
            raise BadMessage(reason=f"no worker gave the output {missing[0]}")
        return Inference(
            outputs={name: made[name] for name in self.plan.model.outputs},
            latency_seconds=latency,
            compute_seconds=tuple(sum(done.compute_seconds) for done, _ in results),
            traces=tuple(
                DeviceTrace(device=device.name, rank=rank, events=shift_to_common_clock(done, *clocks[rank]))
                for rank, (device, (done, _)) in enumerate(zip(self.devices, results, strict=True))
                if trace
            ),
        )

    async def _drop(self, step: int, tasks: Sequence[asyncio.Future[Any]]) -> HearthError:
        """Have every rank forget the request, unless all of them stop anyway; the error at the bottom of it."""
        aborts: list[asyncio.Future[Any]] = []
        if self.failure is None:
            reason = str(errors_of(tasks)[0])[:1000]
            request = Abort(**self.command, step=step, reason=reason)
            aborts = [
                asyncio.ensure_future(self._fleet.call(device.device_id, request, timeout_seconds=_ABORT_SECONDS))
                for device in self.devices
            ]
            # What another rank says meanwhile may be closer to the cause; a heartbeat may tell of a death.
            await asyncio.wait([*tasks, *aborts], timeout=_ABORT_SECONDS)
        for task in (*tasks, *aborts):
            task.cancel()
        await asyncio.gather(*tasks, *aborts, return_exceptions=True)
        found = [*([self.failure] if self.failure else []), *errors_of(tasks)]
        return min(found, key=lambda error: not isinstance(error, WorkerDied | DeviceLost))
