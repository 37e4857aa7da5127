"""One deployed plan: push the weights, start and connect the workers, send requests to them, stop them.

A deployment ends when it fails or is closed. Subclasses add the requests of their kind of model (`transformer`, `graph`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from coordinator.deploy.chunk_scheduler import Chunk
from coordinator.deploy.distribution import Distribution, PushPause, PushProgress, no_pause
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from hearth import errors
from hearth.plan.plan import Plan
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import cancel_all, loop_time
from hearth.protocol import CONNECT_SECONDS, DEFAULT_DEPLOYMENT, LOAD_SECONDS
from hearth.trace import clock_error_seconds, shift_to_common_clock
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, unpack_arrays

log = logging.getLogger(__name__)

# For a worker to end the requests of the coordinator before: its control thread is always free.
_TAKE_OVER_SECONDS = 3.0
_UNLOAD_SECONDS = 5.0  # for an agent to confirm that its worker stopped, which frees its memory for the next plan
_UNLOAD_AFTER_LOSS_SECONDS = 0.5  # the same after a loss: requests wait for the next plan
# Wait after the first failure: another rank's error may be closer to the cause, or a heartbeat (every 0.5 s) may report a
# lost device.
_ROOT_CAUSE_WAIT_SECONDS = 0.5
# Attempts of a step whose connection to an agent broke while the agent is well; a connection that breaks every time is lost.
_STEP_ATTEMPTS = 3

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Weights:
    """For each rank: the chunks that it needs, and how its worker assembles them."""

    chunks: Sequence[Sequence[Chunk]]
    parts: Sequence[wire.ShardParts | wire.SegmentParts]


@dataclass(frozen=True)
class RunResult(Generic[R]):
    """The outputs of a request, with its times and traces."""

    outputs: R
    latency_seconds: float  # measured by the coordinator
    step_seconds: float  # measured by the workers: excludes the round trip to them, like the prediction of a plan
    segment_seconds: tuple[tuple[float, ...], ...]  # compute time of each rank's segments
    traces: tuple[wire.DeviceTrace, ...]
    clock_errors: tuple[float, ...] = ()  # greatest error of each rank's trace on the common clock, in seconds

    @property
    def compute_seconds(self) -> tuple[float, ...]:
        """Busy time of each rank."""
        return tuple(map(sum, self.segment_seconds))


@dataclass(frozen=True)
class Kept:
    """State that the workers take over from the plan before: KV caches of running streams, blocks of the prefix cache."""

    caches: tuple[wire.KeptCache, ...] = ()
    prefixes: wire.KeptPrefixes | None = None


class Deployment:
    """The workers of `plan`, one on each of its devices. The owner calls `fail` when a device is lost."""

    def __init__(self, fleet: Fleet, plan: Plan, name: str = DEFAULT_DEPLOYMENT) -> None:
        self.plan = plan
        self.name = name
        self.sent_bytes = self.forwarded_bytes = 0  # weights sent by the coordinator, and forwarded by devices
        self.weight_error = 0.0  # of quantised matrices: relative, root mean square, on the worst device
        self.wire = wire.WireStats()
        self.dropped_messages = 0
        self._fleet = fleet
        self.parts: Sequence[wire.ShardParts | wire.SegmentParts] = ()  # of each rank; its chunks are on its device
        self.last_step = 0  # the number of the newest step
        self._failed: asyncio.Future[errors.HearthError] = asyncio.get_running_loop().create_future()

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def command_fields(self) -> dict[str, Any]:
        """The common fields of every `PlanCommand` to these workers."""
        return {"holder": self._fleet.holder, "deployment": self.name, "epoch": self.epoch}

    @property
    def failure(self) -> errors.HearthError | None:
        return self._failed.result() if self._failed.done() else None

    def fail(self, error: errors.HearthError) -> None:
        """Mark the deployment as failed: running and later requests raise `error`. Only the first call counts."""
        if not self._failed.done():
            self._failed.set_result(error)

    async def unless_failed(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the deployment fails; then raises its error."""
        task = asyncio.ensure_future(work)
        try:
            futures: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            return task.result()
        finally:
            await cancel_all([task])

    def check_may_run(self) -> None:
        """Raise the error of a failed deployment; LeaseLost if another coordinator may have taken over."""
        if self.failure is not None:
            raise self.failure
        if not self._fleet.may_compute():
            raise errors.LeaseLost(device="most devices of this home")

    # ---- bring-up -------------------------------------------------------------------------------------------------

    async def push(
        self,
        weights: Weights,
        progress: PushProgress,
        pause: PushPause = no_pause,
        room_bytes: dict[str, int] | None = None,
    ) -> None:
        """Send every device the chunks that it needs and lacks. Raises BadCheckpoint, StoreFull, DeviceLost, ...

        `room_bytes`: as of `Distribution`, for chunks that are sent ahead.
        """
        distribution = Distribution(self._fleet, progress, pause, room_bytes)
        try:
            ids = [device.device_id for device in self.plan.devices]
            await distribution.run(dict(zip(ids, weights.chunks, strict=True)))
        finally:
            self.sent_bytes, self.forwarded_bytes = distribution.sent_bytes, distribution.forwarded_bytes
        self.parts = weights.parts

    async def load(self, links: Mapping[tuple[str, str], Link], encrypt: bool) -> None:
        """Start the workers with the pushed weights; once all have bound their sockets, connect them.

        Raises as `gather_or_abort` does.
        """
        token, devices = secrets.token_bytes(16), self.plan.devices
        known = [self._fleet.devices.get(device.device_id) for device in devices]
        ports = {device.welcome.data_ports if device is not None else (0, 0) for device in known}

        def start(rank: int) -> Awaitable[wire.WorkerBound]:
            request = wire.Load(
                holder=self._fleet.holder,
                deployment=self.name,
                plan=self.plan,
                rank=rank,
                parts=self.parts[rank],
                encrypt_data_plane=encrypt,
                plan_token=token,
                data_ports=() if (0, 0) in ports else tuple(sorted(ports)),
            )
            return self._ask_to_start(rank, request, wire.WorkerBound, LOAD_SECONDS)

        workers = await self.gather_or_abort(map(start, range(self.plan.num_ranks)))
        self.weight_error = max(worker.weight_error for worker in workers)
        kept = self._kept_caches(workers, links)

        def connect(rank: int) -> Awaitable[wire.Done]:
            peers = tuple(
                wire.Peer(
                    rank=other,
                    host=self._fleet.devices[devices[other].device_id].host,
                    port=workers[other].port,
                    public_key=workers[other].public_key,
                    bytes_per_second=links[devices[rank].device_id, devices[other].device_id].bytes_per_second,
                )
                for other in range(len(devices))
                if other != rank
            )
            request = wire.ConnectPeers(**self.command_fields, peers=peers, caches=kept.caches, prefixes=kept.prefixes)
            return self._ask_to_start(rank, request, wire.Done, CONNECT_SECONDS)

        await self.gather_or_abort(map(connect, range(self.plan.num_ranks)))

    def _kept_caches(self, workers: Sequence[wire.WorkerBound], links: Mapping[tuple[str, str], Link]) -> Kept:
        """The state of requests of the plan before that these workers go on with."""
        return Kept()

    async def _ask_to_start(self, rank: int, request: wire.Message, expected: type[T], seconds: float) -> T:
        """Ask a rank. Raises WorkerDied if it does not answer in time, although its agent is alive."""
        device = self.plan.devices[rank]
        try:
            return await self._fleet.ask(device.device_id, request, expected, timeout_seconds=seconds)
        except errors.DeadlineExceeded:
            reason = f"it did not answer {type(request).__name__} within {seconds:g} s"
            raise errors.WorkerDied(device=device.name, reason=reason) from None

    async def take_over(self, last_step: int) -> None:
        """Take over workers that an earlier coordinator has loaded; `last_step` is the newest step that any of them knows.

        Raises as `gather_or_abort` does.
        """
        self.last_step = last_step
        if not self.ends_requests_alone:
            abort = wire.Abort(**self.command_fields, reason="another coordinator has taken over")
            await self.gather_or_abort(
                self._fleet.ask(device.device_id, abort, wire.Done, timeout_seconds=_TAKE_OVER_SECONDS)
                for device in self.plan.devices
            )

    @property
    def ends_requests_alone(self) -> bool:
        """Whether the workers end requests whose coordinator is gone without an `Abort`."""
        return False

    async def close(self) -> None:
        """Stop the workers, which frees their memory for the next plan. Lost devices are not asked; errors are ignored.

        A device whose connection has just broken may answer over a new one; its worker would keep its memory otherwise.
        """
        seconds = _UNLOAD_SECONDS if self.failure is None else _UNLOAD_AFTER_LOSS_SECONDS
        self.fail(errors.NotServing(state="the plan was unloaded"))
        request = wire.Unload(**self.command_fields)

        async def unload(device_id: str) -> None:
            if self._is_reachable(device_id) or await self._fleet.answers_again(device_id):
                await self._fleet.call(device_id, request, timeout_seconds=seconds)

        await asyncio.gather(*(unload(device.device_id) for device in self.plan.devices), return_exceptions=True)

    # ---- requests -------------------------------------------------------------------------------------------------

    async def run(
        self,
        request: wire.Run,
        inputs: Sequence[Mapping[str, np.ndarray[Any, Any]]],
        join: Callable[[Sequence[dict[str, np.ndarray[Any, Any]]]], R],
        reply_timeout_seconds: float,
    ) -> RunResult[R]:
        """Run `request`, which gets its step number here, on all ranks. Waits at most `reply_timeout_seconds` for a rank.

        `inputs` are by rank; `join` combines the ranks' outputs into the result. Raises the error that caused a failure
        rather than its consequences on other ranks.
        """
        for attempt in range(_STEP_ATTEMPTS):
            try:
                return await self._run_once(request, inputs, join, reply_timeout_seconds)
            except errors.ConnectionLost as error:
                log.warning("%s Step %d runs again.", error.explanation(), self.last_step)
                if attempt == _STEP_ATTEMPTS - 1:
                    raise
        raise AssertionError("there is at least one attempt")

    async def _run_once(
        self,
        request: wire.Run,
        inputs: Sequence[Mapping[str, np.ndarray[Any, Any]]],
        join: Callable[[Sequence[dict[str, np.ndarray[Any, Any]]]], R],
        reply_timeout_seconds: float,
    ) -> RunResult[R]:
        """As `run`. Raises ConnectionLost if only the connection to an agent broke."""
        self.check_may_run()
        self.last_step += 1
        step = self.last_step
        # Pack an array that several ranks receive only once.
        frames = {id(array): pack_array(array) for arrays in inputs for array in arrays.values()}
        began = loop_time()
        clocks: dict[int, tuple[float, float]] = {}

        async def run_rank(rank: int) -> tuple[wire.RunDone, dict[str, np.ndarray[Any, Any]]]:
            of_rank = request.model_copy(update={"step": step, "names": tuple(inputs[rank])})
            payload = [frame for array in inputs[rank].values() for frame in frames[id(array)]]
            sent = loop_time()
            device = self.plan.devices[rank].device_id
            try:
                reply = await self._fleet.call(device, of_rank, payload, timeout_seconds=reply_timeout_seconds)
            except errors.DeviceLost:
                if await self._fleet.answers_again(device):
                    raise errors.ConnectionLost(endpoint=self.plan.devices[rank].name) from None
                raise
            clocks[rank] = (sent, loop_time())
            done = reply.message
            if not isinstance(done, wire.RunDone):
                raise errors.BadMessage(reason=f"a worker answered with {type(done).__name__}")
            return done, unpack_arrays(done.names, reply.payload)

        abort = wire.Abort(**self.command_fields, step=step, reason="")
        replies = await self.gather_or_abort(map(run_rank, range(self.plan.num_ranks)), abort)
        latency = loop_time() - began
        results = [done for done, _ in replies]
        self.wire = wire.WireStats.sum(done.wire for done in results)
        self.dropped_messages = sum(done.dropped_messages for done in results)
        return RunResult(
            outputs=join([arrays for _, arrays in replies]),
            latency_seconds=latency,
            step_seconds=max(done.ended_seconds - done.began_seconds for done in results),
            segment_seconds=tuple(done.compute_seconds for done in results),
            traces=tuple(
                wire.DeviceTrace(device=device.name, rank=rank, events=shift_to_common_clock(done, *clocks[rank]))
                for rank, (device, done) in enumerate(zip(self.plan.devices, results, strict=True))
                if request.trace
            ),
            clock_errors=tuple(clock_error_seconds(done, *clocks[rank]) for rank, done in enumerate(results)),
        )

    async def gather_or_abort(self, calls: Iterable[Awaitable[T]], abort: wire.Abort | None = None) -> list[T]:
        """Await all calls concurrently. At the first failure, send `abort` to all ranks and raise the error that caused it."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            while (pending := {task for task in tasks if not task.done()}) and not (
                self.failure or _task_errors(tasks)
            ):
                futures: set[asyncio.Future[Any]] = {*pending, self._failed}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None or _task_errors(tasks):
                raise self._with_device_names(await self._root_cause(tasks, abort))
            return [task.result() for task in tasks]
        finally:
            await cancel_all(tasks)

    def _with_device_names(self, error: errors.HearthError) -> errors.HearthError:
        """The same error, with the names of devices instead of ranks, which mean nothing to users and to the next plan."""
        for field in ("device", "peer"):
            kind, _, rank = str(getattr(error, field, "")).partition(" ")
            if kind == "rank" and rank.isdigit() and int(rank) < self.plan.num_ranks:
                setattr(error, field, self.plan.devices[int(rank)].name)
        return error

    async def _root_cause(self, tasks: Sequence[asyncio.Future[Any]], abort: wire.Abort | None) -> errors.HearthError:
        """Abort the request on all ranks and return the error that caused the others.

        If the whole deployment has failed it is unloaded anyway, so there is nothing to abort or to wait for.
        """
        aborts: list[asyncio.Future[Any]] = []
        reachable = [rank for rank, device in enumerate(self.plan.devices) if self._is_reachable(device.device_id)]
        is_known = any(isinstance(error, errors.PartLost) for error in _task_errors(tasks))
        if self.failure is None:
            if abort is not None:
                abort = abort.model_copy(update={"reason": str(_task_errors(tasks)[0])[:1000]})
                aborts = [
                    asyncio.ensure_future(
                        self._fleet.call(
                            self.plan.devices[rank].device_id, abort, timeout_seconds=_ROOT_CAUSE_WAIT_SECONDS
                        )
                    )
                    for rank in reachable
                ]
            try:
                if waited_for := [*aborts] if is_known else [*tasks, *aborts]:
                    await asyncio.wait(waited_for, timeout=_ROOT_CAUSE_WAIT_SECONDS)
            finally:  # also if the caller is cancelled meanwhile
                await cancel_all(aborts)
        await cancel_all(tasks)
        known = [*([self.failure] if self.failure else []), *_task_errors(tasks), *_task_errors(aborts, reachable)]
        return min(known, key=_distance_from_cause)

    def _is_reachable(self, device_id: str) -> bool:
        return device_id in self._fleet.devices and self._fleet.devices[device_id].reachable


def _distance_from_cause(error: errors.HearthError) -> int:
    """How far an error is from the cause, compared with other errors of the same request."""
    if isinstance(error, errors.PartLost):
        return 0
    return 1 if isinstance(error, errors.ConnectionLost) else 2


def _task_errors(tasks: Sequence[asyncio.Future[Any]], ranks: Sequence[int] | None = None) -> list[errors.HearthError]:
    """The HearthErrors of failed tasks. Raises any other exception.

    `ranks` are those that the tasks asked; None: all, in order. An error that names no device, or "this device", gets the
    rank's name.
    """
    found = []
    for rank, task in zip(range(len(tasks)) if ranks is None else ranks, tasks, strict=False):
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, errors.HearthError):
                raise error
            if getattr(error, "device", None) in ("", "this device"):
                vars(error)["device"] = f"rank {rank}"
            found.append(error)
    return found


def health_error(device: Device) -> errors.DeviceLost | None:
    """The error if no deployment can use a device in this state, else None."""
    if device.health in ("dead", "busy", "refused"):
        return errors.DeviceLost(device=device.name, reason=device.reason)
    return None


def loss_error(device: Device, deployment: Deployment, loaded: bool) -> errors.HearthError | None:
    """The error if this state of a device breaks a deployment, else None. `loaded`: its workers should be running."""
    if device.device_id not in {planned.device_id for planned in deployment.plan.devices}:
        return None
    if (lost := health_error(device)) is not None:
        return lost
    if device.state is None:
        return errors.DeviceLost(device=device.name, reason="its agent was restarted")
    if (worker := device.failed_worker(deployment.name, deployment.epoch)) is not None:
        return errors.WorkerDied(device=device.name, reason=worker.failure)
    if loaded and device.worker(deployment.name) is None:
        return errors.DeviceLost(device=device.name, reason="its worker is gone")
    return None
