"""Keeps one model served: plans, deploys, runs requests from a bounded queue, and plans anew when something is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.config import CoordinatorSettings
from coordinator.deployment import Deployment, Progress
from coordinator.fleet import Fleet
from coordinator.planners import PlanRequest, make_plan
from coordinator.profiling import Profiler
from coordinator.registry import Device
from coordinator.sentences import SentenceTokenizer, batches, mean_pool, pack
from coordinator.state import SavedState, ServingGoal, StateFile
from hearth.errors import (
    BadRequest,
    DeadlineExceeded,
    DeviceLost,
    HearthError,
    InternalError,
    NoDevices,
    NotServing,
    QueueFull,
    TextTooLong,
    WorkerDied,
)
from hearth.messages import DeviceTrace, WireStats
from hearth.model.families import read_spec
from hearth.model.sentence import read_pooling
from hearth.model.spec import ModelSpec
from hearth.plan import Plan
from hearth.units import format_bytes

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

DEFAULT_SEQ_LEN = 512  # planned for when the user names no length and the model allows it
_WAIT_FOR_DEVICES_SECONDS = 10.0  # after a restart, for the devices of the last plan
_RETRY_SECONDS = 2.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """float32 vectors [N,H] or [T,H]."""

    vectors: np.ndarray[Any, Any]
    latency_seconds: float
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = ()


@dataclass(frozen=True)
class Model:
    """What is read once from the model's directory."""

    directory: Path
    spec: ModelSpec
    seq_len: int  # a step holds at most this many rows, and a text at most this many tokens
    tokenizer: SentenceTokenizer | None  # without one, token ids still work


def open_model(goal: ServingGoal) -> Model:
    """Read config and tokenizer. Raises BadCheckpoint or UnsupportedArchitecture."""
    directory = Path(goal.model_dir)
    spec = read_spec(directory)
    read_pooling(directory)
    seq_len = min(goal.seq_len or DEFAULT_SEQ_LEN, spec.max_positions)
    has_tokenizer = (directory / "tokenizer.json").exists()
    return Model(directory, spec, seq_len, SentenceTokenizer(directory) if has_tokenizer else None)


def _fault(error: Exception) -> InternalError:
    """What is no HearthError is a fault of ours: it is logged whole, and the server lives on."""
    log.error("a fault", exc_info=error)
    return InternalError(where="the coordinator", reason=f"{type(error).__name__}: {error}")


class Server:
    """One goal, one deployment at a time, one step at a time. `report` gets a line for people at each stage."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        fleet: Fleet,
        report: Callable[[str], None],
        progress: Progress = lambda name, done, total: None,
    ) -> None:
        self.state = "starting"
        self.goal: ServingGoal | None = None
        self.plan: Plan | None = None
        self.served = 0
        self.failed = 0
        self.last_error = ""
        self.last_latency_seconds: float | None = None
        self.profiler = Profiler(fleet, settings.state_dir / "profiles", report)
        self._settings = settings
        self._fleet = fleet
        self._report = report
        self._progress = progress
        self._file = StateFile(settings.state_dir)
        self._saved = SavedState()
        self._restored: Plan | None = None  # to be tried once, at the start
        self._model: Model | None = None
        self._deployment: Deployment | None = None
        self._stale = asyncio.Event()  # set: what is deployed is not what should be
        self._queue: asyncio.Queue[tuple[Callable[[], Awaitable[None]], float]] = asyncio.Queue(settings.queue_limit)
        self._ready = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def queued(self) -> int:
        return self._queue.qsize()

    @property
    def wire(self) -> WireStats:
        return self._deployment.wire if self._deployment else WireStats()

    @property
    def dropped_messages(self) -> int:
        return self._deployment.dropped_messages if self._deployment else 0

    def start(self, goal: ServingGoal | None, plan: Plan | None = None) -> None:
        """Serve `goal`, or what was served last. Raises NotServing when there is neither, BadCheckpoint, ..."""
        self._saved = self._file.load()
        if goal is None:
            goal, plan = self._saved.goal, self._saved.plan
        if goal is None:
            raise NotServing(state="nothing was served here before")
        self._model = open_model(goal)
        self.goal = goal
        self._restored = plan
        self._saved = self._saved.model_copy(update={"goal": goal, "plan": plan})
        self._file.save(self._saved)
        self._stale.set()

    def device_changed(self, device: Device) -> None:
        """The fleet saw a change: fail what ran there, and plan anew."""
        deployment = self._deployment
        if deployment is None or device.device_id not in {d.device_id for d in deployment.plan.devices}:
            return
        state = device.state
        if device.health == "dead" or device.health == "busy":
            deployment.fail(DeviceLost(device=device.name, reason=device.reason))
        elif state is None:
            deployment.fail(DeviceLost(device=device.name, reason="its agent was restarted"))
        elif state.worker == "failed" and state.epoch == deployment.plan.epoch:
            deployment.fail(WorkerDied(device=device.name, reason=state.failure))
        elif state.worker == "none" and self.ready:
            deployment.fail(DeviceLost(device=device.name, reason="its worker is gone"))
        if deployment.failure is not None:
            self._lost(deployment)

    async def run(self) -> None:
        """Deploy and serve until cancelled."""
        await asyncio.gather(self._deploy_loop(), self._serve_loop())

    async def close(self) -> None:
        if self._deployment is not None:
            await self._deployment.close()

    # ---- requests -------------------------------------------------------------------------------------------------

    async def embed(self, texts: tuple[str, ...], timeout_seconds: float, trace: bool) -> Answer:
        """Normalised sentence embeddings [N,H]."""
        model = self._require_model()
        if model.tokenizer is None:
            raise BadRequest(reason="the model has no tokenizer.json; send token ids instead of texts")
        encoded = await asyncio.to_thread(model.tokenizer.encode, texts, model.seq_len)

        async def compute(deployment: Deployment) -> Answer:
            import numpy as np

            vectors: list[np.ndarray[Any, Any]] = []
            traces: list[DeviceTrace] = []
            seconds = 0.0
            for batch in batches([len(ids) for ids in encoded], model.seq_len):
                ids, lengths = pack([encoded[i] for i in batch])
                result = await deployment.run_step(ids, lengths, "mean", trace)
                vectors.append(mean_pool(result.rows, lengths))
                traces.extend(result.traces)
                seconds += result.latency_seconds
            return Answer(np.concatenate(vectors), seconds, sum(map(len, encoded)), tuple(traces))

        return await self._enqueue(compute, timeout_seconds)

    async def hidden_states(self, token_ids: np.ndarray[Any, Any], timeout_seconds: float) -> Answer:
        """Last hidden states [T,H] of one sequence."""
        import numpy as np

        model = self._require_model()
        if token_ids.ndim != 1 or token_ids.dtype != np.int32 or len(token_ids) == 0:
            raise BadRequest(reason="token ids must be a non-empty list of 32-bit integers")
        if len(token_ids) > model.seq_len:
            raise TextTooLong(index=0, num_tokens=len(token_ids), max_tokens=model.seq_len)
        if token_ids.min() < 0 or token_ids.max() >= model.spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {model.spec.vocab_size - 1}")
        ids, lengths = pack([token_ids.tolist()])

        async def compute(deployment: Deployment) -> Answer:
            result = await deployment.run_step(ids, lengths, "hidden")
            return Answer(result.rows, result.latency_seconds, len(ids))

        return await self._enqueue(compute, timeout_seconds)

    async def _enqueue(self, compute: Callable[[Deployment], Awaitable[Answer]], timeout_seconds: float) -> Answer:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

        async def work() -> None:
            if answer.done():
                return  # its client has given up: nobody waits for this
            deployment = self._deployment
            try:
                if deployment is None:  # lost between the signal that it is ready and now
                    raise NotServing(state=self.state)
                result = await compute(deployment)
            except Exception as error:
                failure = error if isinstance(error, HearthError) else _fault(error)
                self._failed_request(failure, deployment)
                if not answer.done():
                    answer.set_exception(failure)
                return
            self.served += 1
            self.last_latency_seconds = result.latency_seconds
            if not answer.done():
                answer.set_result(result)

        try:
            self._queue.put_nowait((work, time.monotonic() + timeout_seconds))
        except asyncio.QueueFull:
            raise QueueFull(limit=self._settings.queue_limit) from None
        try:
            return await asyncio.wait_for(answer, timeout_seconds)
        except asyncio.TimeoutError:
            if not self.ready:
                raise NotServing(state=self.state) from None
            raise DeadlineExceeded(action="the request", seconds=timeout_seconds) from None

    def _require_model(self) -> Model:
        if self._model is None:
            raise NotServing(state=self.state)
        return self._model

    def _failed_request(self, error: HearthError, deployment: Deployment | None) -> None:
        """Count it; an error that is not the request's own ends the deployment it ran on (not a newer one)."""
        self.failed += 1
        self.last_error = str(error)
        if deployment is not None and not isinstance(error, BadRequest | TextTooLong):
            deployment.fail(error)
            self._lost(deployment)

    async def _serve_loop(self) -> None:
        while True:
            work, deadline = await self._queue.get()
            try:
                await asyncio.wait_for(self._ready.wait(), max(deadline - time.monotonic(), 0.001))
            except asyncio.TimeoutError:
                continue  # its own wait has told the client
            await work()

    # ---- deployment -----------------------------------------------------------------------------------------------

    def _lost(self, deployment: Deployment) -> None:
        if deployment is self._deployment and not self._stale.is_set():
            error = deployment.failure
            self.last_error = str(error)
            self._set_state(f"planning anew: {error.explanation() if error else ''}")
            for device in deployment.plan.devices:
                if isinstance(error, WorkerDied) and error.device == device.name:
                    self._fleet.punish(device.device_id)
            self._ready.clear()
            self._stale.set()

    async def _deploy_loop(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._deploy()
            except Exception as error:
                failure = error if isinstance(error, HearthError) else _fault(error)
                self.last_error = str(failure)
                self._set_state(f"not ready, trying again: {failure}")
                await asyncio.sleep(_RETRY_SECONDS)
                self._stale.set()

    async def _deploy(self) -> None:
        assert self.goal is not None
        model = self._require_model()
        previous, self._deployment = self._deployment, None
        if previous is not None:
            await previous.close()
        plan = await self._choose_plan(self.goal, model)
        epoch = max(self._saved.last_epoch, self._fleet.last_epoch) + 1
        plan = plan.with_epoch(epoch)
        self._saved = SavedState(goal=self.goal, plan=plan, last_epoch=epoch)
        self._file.save(self._saved)
        deployment = Deployment(self._fleet, plan)
        self._deployment, self.plan = deployment, plan
        names = ", ".join(device.name for device in plan.devices)
        self._set_state(f"pushing shards to {names}")
        chunks = await deployment.push(model.directory, self._settings.state_dir / "manifests", self._progress)
        self._report(
            f"pushed {format_bytes(deployment.sent_bytes)} of weights; what was there already was not sent again"
        )
        self._set_state(f"loading on {names}")
        await deployment.load(chunks, self.profiler.links, self._settings.encrypt_data_plane)
        await self._warm_up(deployment, model)
        if deployment.failure is not None:
            raise deployment.failure
        self._set_state(f"serving {model.spec.name} on {names} ({plan.body.strategy})")
        self._ready.set()

    async def _choose_plan(self, goal: ServingGoal, model: Model) -> Plan:
        """At the start the saved plan, when all its devices are there (after a power cut); else a new one."""
        restored, self._restored = self._restored, None
        if restored is not None and restored.model == model.spec and restored.seq_len == model.seq_len:
            self._set_state("waiting for the devices of the last plan")
            if await self._all_there(restored):
                return restored
        self._set_state("looking for devices")
        # Once something was served, what is left must do: the user's minimum and the wait for newcomers are for starts.
        settle_seconds, min_devices = (
            (self._settings.settle_seconds, self._settings.min_devices) if self.plan is None else (0.0, 1)
        )
        await self._fleet.settle(settle_seconds, min_devices, _WAIT_FOR_DEVICES_SECONDS)
        devices = [device for device in self._fleet.usable() if not {device.name, device.device_id} & set(goal.exclude)]
        if not devices:
            raise NoDevices(seconds=_WAIT_FOR_DEVICES_SECONDS)
        self._set_state(f"profiling {len(devices)} devices")
        cluster = await self.profiler.cluster(devices, model.spec, model.seq_len)
        self._set_state("planning")
        request = PlanRequest(
            spec=model.spec, cluster=cluster, seq_len=model.seq_len, wire=goal.wire, strategy=goal.strategy
        )
        return await asyncio.to_thread(make_plan, request)

    async def _all_there(self, plan: Plan) -> bool:
        """Whether all devices of a plan came in time, with the links between them measured (cached, mostly)."""
        wanted = {device.device_id for device in plan.devices}
        deadline = time.monotonic() + _WAIT_FOR_DEVICES_SECONDS
        while time.monotonic() < deadline:
            there = [device for device in self._fleet.usable() if device.device_id in wanted]
            if len(there) == len(wanted):
                links = await self.profiler.measure_links(there)
                return len(links) == len(wanted) * (len(wanted) - 1)
            await asyncio.sleep(0.1)
        return False

    async def _warm_up(self, deployment: Deployment, model: Model) -> None:
        """One small step: proves that all workers reach each other, and loads the kernels."""
        self._set_state("warming up")
        length = min(_WARM_UP_TOKENS, model.seq_len)
        ids, lengths = pack([[0] * length])
        await deployment.run_step(ids, lengths, "mean")

    def _set_state(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._report(state)
