"""Keeps one model served: plans, deploys, runs requests from a bounded queue, and plans anew when something is lost.

What generates text does so side by side instead (`generation`): there, rank 0 decides what runs in a step.

When devices drifted or came, `replanning` finds a better plan while requests go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from coordinator.accuracy import calibrate, choose, describe
from coordinator.config import CoordinatorSettings
from coordinator.deployment import Deployment, StepResult
from coordinator.distribution import Progress
from coordinator.drift import DriftMonitor
from coordinator.fleet import Fleet
from coordinator.generation import Deployed, Generations, TextModel, warm_up
from coordinator.goal import Model, allowed, open_model, plan_request, suits
from coordinator.limits import breach, unknown_names
from coordinator.planners import make_plan
from coordinator.profiling import Profiler
from coordinator.registry import Device
from coordinator.replanning import Replanner, Served, failure_of
from coordinator.sentences import SentenceTokenizer, batches, mean_pool, pack
from coordinator.state import SavedState, ServingGoal, StateFile
from hearth.errors import (
    BadRequest,
    BadSetting,
    DeadlineExceeded,
    DeviceLost,
    HearthError,
    NoDevices,
    NotServing,
    QueueFull,
    TextTooLong,
    WorkerDied,
)
from hearth.messages import ChunkRef, DeviceTrace, Generate, TextEnded, TextGenerated, WireStats
from hearth.plan import Plan, Values
from hearth.tasks import within
from hearth.units import format_bytes

if TYPE_CHECKING:
    import numpy as np

_WAIT_FOR_DEVICES_SECONDS = 10.0  # after a restart, for the devices of the last plan
_RETRY_SECONDS = 2.0
_WARM_UP_TOKENS = 8
_OF_THE_REQUEST = (BadRequest, TextTooLong, QueueFull)


@dataclass(frozen=True)
class Answer:
    """float32 vectors [N,H] or [T,H]."""

    vectors: np.ndarray[Any, Any]
    latency_seconds: float
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = ()


class Server:
    """One goal, one deployment at a time. An encoder runs one step at a time. `report` gets a line at each stage."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        fleet: Fleet,
        report: Callable[[str], None],
        progress: Progress = lambda name, done, total: None,
        clock: Callable[[], float] = time.monotonic,
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
        self._text_model: TextModel | None = None  # of a decoder
        self._deployment: Deployment | None = None
        self._stale = asyncio.Event()  # set: what is deployed is not what should be
        self._queue: asyncio.Queue[tuple[Callable[[], Awaitable[None]], float]] = asyncio.Queue(settings.queue_limit)
        self._ready = asyncio.Event()
        self._stepping = asyncio.Lock()  # held by who uses the workers: a request, a calibration, a change of plan
        self._generations = Generations(self, self._stepping, settings.queue_limit)
        self._values: Values | None = None  # of activations, where the accuracy budget chooses
        self._calibrated = False
        self._monitor: DriftMonitor | None = None
        self._chosen: Plan | None = None  # by the background, for the deployment that follows
        self._replanner = Replanner(
            fleet, self.profiler, self._stepping, self._served, self._push_ahead, self._swap, report, clock
        )

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
        """Serve `goal`, or what was served last. Raises NotServing when there is neither, BadCheckpoint, BadSetting, ..."""
        self._saved = self._file.load()
        if goal is None:
            goal, plan = self._saved.goal, self._saved.plan
        if goal is None:
            raise NotServing(state="nothing was served here before")
        self._model = open_model(goal)
        if self._model.spec.causal:
            if goal.accuracy_budget is not None:
                raise BadSetting(
                    setting="--accuracy-budget", reason="it is measured on models that embed, not generate"
                )
            self._text_model = TextModel.of(self._model)
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
        await asyncio.gather(self._deploy_loop(), self._serve_loop(), self._replanner.run())

    async def close(self) -> None:
        if self._deployment is not None:
            await self._deployment.close()

    # ---- requests -------------------------------------------------------------------------------------------------

    async def embed(self, texts: tuple[str, ...], timeout_seconds: float, trace: bool) -> Answer:
        """Normalised sentence embeddings [N,H]."""
        model = self._require_encoder()
        if not isinstance(model.tokenizer, SentenceTokenizer):
            raise BadRequest(reason="the model has no tokenizer.json; send token ids instead of texts")
        encoded = await asyncio.to_thread(model.tokenizer.encode, texts, model.seq_len)

        async def compute(deployment: Deployment) -> Answer:
            import numpy as np

            vectors: list[np.ndarray[Any, Any]] = []
            traces: list[DeviceTrace] = []
            seconds = 0.0
            for batch in batches([len(ids) for ids in encoded], model.seq_len):
                ids, lengths = pack([encoded[i] for i in batch])
                result = await self._run_step(deployment, ids, lengths, "mean", trace)
                vectors.append(mean_pool(result.rows, lengths))
                traces.extend(result.traces)
                seconds += result.latency_seconds
            return Answer(np.concatenate(vectors), seconds, sum(map(len, encoded)), tuple(traces))

        return await self._enqueue(compute, timeout_seconds)

    async def hidden_states(self, token_ids: np.ndarray[Any, Any], timeout_seconds: float) -> Answer:
        """Last hidden states [T,H] of one sequence."""
        import numpy as np

        model = self._require_encoder()
        if token_ids.ndim != 1 or token_ids.dtype != np.int32 or len(token_ids) == 0:
            raise BadRequest(reason="token ids must be a non-empty list of 32-bit integers")
        if len(token_ids) > model.seq_len:
            raise TextTooLong(index=0, num_tokens=len(token_ids), max_tokens=model.seq_len)
        if token_ids.min() < 0 or token_ids.max() >= model.spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {model.spec.vocab_size - 1}")
        ids, lengths = pack([token_ids.tolist()])

        async def compute(deployment: Deployment) -> Answer:
            result = await self._run_step(deployment, ids, lengths, "hidden")
            return Answer(result.rows, result.latency_seconds, len(ids))

        return await self._enqueue(compute, timeout_seconds)

    async def generate(
        self, request: Generate, token_ids: np.ndarray[Any, Any] | None
    ) -> AsyncGenerator[TextGenerated | TextEnded, None]:
        """The answer to a prompt, as it comes (see `Generations.run`); closed early, it ends on the workers too."""
        model = self._require_model()
        if self._text_model is None:
            raise BadRequest(reason=f"{model.spec.name} generates no text; it embeds (`hearth embed`, home.embed())")
        try:
            async with aclosing(self._generations.run(self._text_model, request, token_ids)) as parts:
                async for part in parts:
                    yield part
        except HearthError as error:
            self.failed += 1
            self.last_error = str(error)
            raise
        self.served += 1
        if isinstance(part, TextEnded):
            self.last_latency_seconds = part.first_token_seconds + part.decode_seconds

    async def _run_step(
        self,
        deployment: Deployment,
        ids: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        output: Literal["hidden", "mean"],
        trace: bool = False,
    ) -> StepResult:
        """A request's step: in the format that was chosen, and watched for drift."""
        result = await deployment.run_step(ids, lengths, output, trace, self._values)
        if deployment is self._deployment and self._monitor is not None:
            self._monitor.observe(len(ids), result.compute_seconds, result.step_seconds)
        return result

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
                failure = failure_of(error)
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

    def _require_encoder(self) -> Model:
        model = self._require_model()
        if model.spec.causal:
            raise BadRequest(
                reason=f"{model.spec.name} embeds nothing; it generates (`hearth generate`, home.generate())"
            )
        return model

    def _failed_request(self, error: HearthError, deployment: Deployment | None) -> None:
        self.failed += 1
        self.last_error = str(error)
        if deployment is not None:
            self.failed_on(deployment, error)

    async def deployed(self, timeout_seconds: float) -> Deployment:
        """What is served, once something is. Raises NotServing."""
        try:
            await within(max(timeout_seconds, 0.001), self._ready.wait())
        except asyncio.TimeoutError:
            raise NotServing(state=self.state) from None
        assert self._deployment is not None
        return self._deployment

    def serves(self, deployment: Deployed) -> bool:
        return self.ready and deployment is self._deployment

    def failed_on(self, deployment: Deployed, error: HearthError) -> None:
        """An error that is not the request's own ends the deployment it ran on (not a newer one)."""
        current = self._deployment
        if current is not None and current is deployment and not isinstance(error, _OF_THE_REQUEST):
            current.fail(error)
            self._lost(current)

    async def _serve_loop(self) -> None:
        while True:
            work, deadline = await self._queue.get()
            done = False
            while not done:
                try:
                    await asyncio.wait_for(self._ready.wait(), max(deadline - time.monotonic(), 0.001))
                except asyncio.TimeoutError:
                    break  # its own wait has told the client
                async with self._stepping:
                    if self.ready:  # the plan was not taken down while this waited
                        await work()
                        done = True

    # ---- deployment -----------------------------------------------------------------------------------------------

    def _lost(self, deployment: Deployment) -> None:
        if deployment is self._deployment and not self._stale.is_set():
            error = deployment.failure
            self.last_error = str(error)
            self._set_state(f"planning anew: {error.explanation() if error else ''}")
            for device in deployment.plan.devices:
                if isinstance(error, WorkerDied | DeviceLost) and error.device == device.name:
                    self._replanner.lost(device.device_id)
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
                await self._calibrate()
            except Exception as error:
                failure = failure_of(error)
                self.last_error = str(failure)
                self._set_state(f"not ready, trying again: {failure}")
                await asyncio.sleep(_RETRY_SECONDS)
                self._stale.set()

    async def _deploy(self) -> None:
        assert self.goal is not None
        model = self._require_model()
        self._ready.clear()
        await self._replanner.stop()
        previous, self._deployment = self._deployment, None
        if previous is not None:
            await previous.close()
        plan = await self._choose_plan(self.goal, model)
        epoch = max(self._saved.last_epoch, self._fleet.last_epoch) + 1
        plan = plan.with_epoch(epoch)
        self._monitor = DriftMonitor(plan)
        self._calibrated = self.goal.accuracy_budget is None
        self._values = None if self._calibrated else "exact"
        self._saved = SavedState(goal=self.goal, plan=plan, last_epoch=epoch)
        self._file.save(self._saved)
        deployment = Deployment(self._fleet, plan)
        self._deployment, self.plan = deployment, plan
        names = ", ".join(device.name for device in plan.devices)
        self._set_state(f"pushing shards to {names}")
        chunks = await self._push(deployment, model)
        self._report(
            f"pushed {format_bytes(deployment.sent_bytes)} of weights, devices passed on "
            f"{format_bytes(deployment.passed_bytes)}; what was there already was not sent again"
        )
        self._set_state(f"loading on {names}")
        await deployment.load(chunks, self.profiler.links, self._settings.encrypt_data_plane)
        if deployment.weight_error:
            lost = f"{100 * deployment.weight_error:.2g} %"
            self._report(f"weights in {model.spec.weights} are {lost} off the checkpoint's (root mean square)")
        await self._warm_up(deployment, model)
        if deployment.failure is not None:
            raise deployment.failure
        self._set_state(f"serving {model.spec.name} on {names} ({plan.body.strategy})")
        self._ready.set()

    async def _choose_plan(self, goal: ServingGoal, model: Model) -> Plan:
        """At the start the saved plan, when all its devices are there (after a power cut); else a new one."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            return chosen
        restored, self._restored = self._restored, None
        if restored is not None and suits(restored, model):
            self._set_state("waiting for the devices of the last plan")
            if await self._all_there(restored):
                against = breach(restored, goal.limits, goal.exclude, self._offered_bytes())
                if against is None:
                    self._replanner.restored(restored)
                    return restored
                self._report(f"the given plan is not used: {against}")
        self._set_state("looking for devices")
        # Once something was served, what is left must do: the user's minimum and the wait for newcomers are for starts.
        settle_seconds, min_devices = (
            (self._settings.settle_seconds, self._settings.min_devices) if self.plan is None else (0.0, 1)
        )
        await self._fleet.settle(settle_seconds, min_devices, _WAIT_FOR_DEVICES_SECONDS)
        devices = allowed(goal, self._fleet.usable())
        if not devices:
            raise NoDevices(seconds=_WAIT_FOR_DEVICES_SECONDS)
        self.goal = goal.model_copy(update={"keep_plan": False})  # what was to be kept could not be
        self._warn_of_unknown(goal)
        self._set_state(f"profiling {len(devices)} devices")
        cluster = await self.profiler.cluster(devices, model.spec, model.seq_len)
        self._set_state("planning")
        plan = await asyncio.to_thread(make_plan, plan_request(goal, model, cluster, self._values))
        self._replanner.considered(devices, plan)
        return plan

    def _offered_bytes(self) -> dict[str, int]:
        there = self._fleet.usable()
        return {device.device_id: device.telemetry.memory_budget_bytes for device in there if device.telemetry}

    def _warn_of_unknown(self, goal: ServingGoal) -> None:
        """A name with a typing error would silently limit nothing; a device that is off now may come later."""
        names = [*(limit.device for limit in goal.limits), *goal.exclude]
        for name in unknown_names(names, self._fleet.devices.values()):
            self._report(f"warning: no device here is called {name} yet; its limit holds when one comes")

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
        if model.spec.causal:
            await warm_up(deployment)
            return
        length = min(_WARM_UP_TOKENS, model.seq_len)
        ids, lengths = pack([[0] * length])
        await deployment.run_step(ids, lengths, "mean")

    async def _calibrate(self) -> None:
        """Choose how activations travel, between requests; until then they travel exactly."""
        deployment, model = self._deployment, self._require_model()
        budget = self.goal.accuracy_budget if self.goal else None
        if budget is None or deployment is None:
            return
        if deployment.plan.num_ranks > 1:  # one device sends nothing

            async def run(values: Values, ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
                async with self._stepping:
                    result = await deployment.run_step(*pack([ids.tolist()]), "hidden", values=values)
                return result.rows, result.step_seconds

            try:
                measured = await calibrate(run, model.spec.vocab_size, model.seq_len)
            except HearthError as error:
                deployment.fail(error)
                self._lost(deployment)
                return
            chosen = choose(measured, budget)
            self._values = chosen.values
            if self._monitor is not None:
                self._monitor.rebase()  # steps in another format are no measure for those that follow
            self._report(describe(measured, chosen, budget))
        self._calibrated = True

    # ---- a better plan from the background ------------------------------------------------------------------------

    def _served(self) -> Served | None:
        goal, model, deployment, monitor = self.goal, self._model, self._deployment, self._monitor
        if goal is None or goal.keep_plan or model is None or deployment is None or monitor is None:
            return None
        if not self.ready or not self._calibrated:
            return None
        return Served(goal, model, deployment, monitor, self._values)

    async def _push_ahead(self, plan: Plan) -> None:
        await self._push(Deployment(self._fleet, plan), self._require_model())

    async def _push(self, deployment: Deployment, model: Model) -> list[tuple[ChunkRef, ...]]:
        return await deployment.push(model.directory, self._settings.state_dir / "manifests", self._progress)

    def _swap(self, served: Served, plan: Plan) -> None:
        if served.deployment is self._deployment and self.ready:
            self._ready.clear()
            self._chosen = plan
            self._stale.set()

    def _set_state(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._report(state)
