"""Serves one transformer, which `upkeep` keeps deployed: runs requests from a bounded queue.

What generates text does so side by side instead (`generation`): there, rank 0 decides what runs in a step.

When devices drifted or came, `replanning` finds a better plan while requests go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from coordinator.deploy.distribution import Progress
from coordinator.deploy.transformer import Deployment, StepResult
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from coordinator.plan.transformer.make import make_plan
from coordinator.serve.accuracy import calibrate, choose, describe
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.drift import DriftMonitor
from coordinator.serve.generation import Generations, TextModel, warm_up
from coordinator.serve.goal import Model, open_model, plan_request, suits
from coordinator.serve.replanning import Replanner, Served, failure_of
from coordinator.serve.sentences import SentenceTokenizer, batches, mean_pool, pack
from coordinator.serve.state import TransformerGoal
from coordinator.serve.upkeep import Upkeep
from hearth.errors import (
    BadRequest,
    BadSetting,
    DeadlineExceeded,
    HearthError,
    NotServing,
    QueueFull,
    TextTooLong,
)
from hearth.plan.plan import TransformerPlan
from hearth.plan.value_formats import Values
from hearth.platform.units import format_bytes
from hearth.wire.messages import ChunkRef, DeviceTrace, Generate, TextEnded, TextGenerated

if TYPE_CHECKING:
    import numpy as np

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """float32 vectors [N,H] or [T,H]."""

    vectors: np.ndarray[Any, Any]
    latency_seconds: float
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = ()


class Server(Upkeep[TransformerGoal, TransformerPlan, Deployment]):
    """Of transformers. An encoder runs one step at a time."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        fleet: Fleet,
        report: Callable[[str], None],
        progress: Progress = lambda name, done, total: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings, fleet, report, progress)
        self._model: Model | None = None
        self._text_model: TextModel | None = None  # of a decoder
        self._queue: asyncio.Queue[tuple[Callable[[], Awaitable[None]], float]] = asyncio.Queue(settings.queue_limit)
        self._stepping = asyncio.Lock()  # held by who uses the workers: a request, a calibration, a change of plan
        self._generations = Generations(self, self._stepping, settings.queue_limit)
        self._values: Values | None = None  # of activations, where the accuracy budget chooses
        self._calibrated = False
        self._monitor: DriftMonitor | None = None
        self._replanner = Replanner(
            fleet, self.profiler, self._stepping, self._served, self._push_ahead, self._swap, report, clock
        )

    @property
    def queued(self) -> int:
        return self._queue.qsize()

    async def run(self) -> None:
        """Deploy and serve until cancelled."""
        await asyncio.gather(self._deploy_loop(), self._serve_loop(), self._replanner.run())

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

    def _open(self, goal: TransformerGoal) -> None:
        self._model = open_model(goal)
        if self._model.spec.causal:
            if goal.accuracy_budget is not None:
                raise BadSetting(
                    setting="--accuracy-budget", reason="it is measured on models that embed, not generate"
                )
            self._text_model = TextModel.of(self._model)

    def _suits(self, plan: TransformerPlan) -> bool:
        return suits(plan, self._require_model())

    def _reused(self, plan: TransformerPlan) -> None:
        self._replanner.restored(plan)

    def _lost_device(self, device_id: str) -> None:
        self._replanner.lost(device_id)

    async def _before_deploying(self) -> None:
        await self._replanner.stop()

    async def _make_plan(self, goal: TransformerGoal, devices: Sequence[Device]) -> TransformerPlan:
        model = self._require_model()
        self._set_state(f"profiling {len(devices)} devices")
        cluster = await self.profiler.cluster(devices, model.spec, model.seq_len)
        self._set_state("planning")
        plan = await asyncio.to_thread(make_plan, plan_request(goal, model, cluster, self._values))
        self._replanner.considered(devices, plan)
        return plan

    def _deploying(self, plan: TransformerPlan) -> Deployment:
        self._monitor = DriftMonitor(plan)
        self._calibrated = self.goal is None or self.goal.accuracy_budget is None
        self._values = None if self._calibrated else "exact"
        return Deployment(self._fleet, plan)

    async def _bring_up(self, deployment: Deployment) -> None:
        model, names = self._require_model(), ", ".join(device.name for device in deployment.devices)
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

    def _serving(self, plan: TransformerPlan) -> str:
        names = ", ".join(device.name for device in plan.devices)
        return f"serving {plan.model.name} on {names} ({plan.body.strategy})"

    async def _warm_up(self, deployment: Deployment, model: Model) -> None:
        """One small step: proves that all workers reach each other, and loads the kernels."""
        self._set_state("warming up")
        if model.spec.causal:
            await warm_up(deployment)
            return
        length = min(_WARM_UP_TOKENS, model.seq_len)
        ids, lengths = pack([[0] * length])
        await deployment.run_step(ids, lengths, "mean")

    async def _after_deploying(self) -> None:
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

    async def _push_ahead(self, plan: TransformerPlan) -> None:
        await self._push(Deployment(self._fleet, plan), self._require_model())

    async def _push(self, deployment: Deployment, model: Model) -> list[tuple[ChunkRef, ...]]:
        return await deployment.push(model.directory, self._settings.state_dir / "manifests", self._progress)

    def _swap(self, served: Served, plan: TransformerPlan) -> None:
        if served.deployment is self._deployment and self.ready:
            self._ready.clear()
            self._chosen = plan
            self._stale.set()
