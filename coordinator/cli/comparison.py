"""Runs plans for real, one deployment after the other, and holds what was measured against what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from coordinator.deploy.distribution import Progress
from coordinator.deploy.transformer import Deployment
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.explain import label_of
from coordinator.serve.generation import context_tokens
from coordinator.serve.goal import Model
from coordinator.serve.sentences import pack
from hearth.errors import DeviceLost, HearthError, StepFailed, WorkerDied
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import Link
from hearth.platform.units import format_seconds
from hearth.wire.messages import GenerationEnded, Sampling

_SEED = 20240525
_ANSWER_SECONDS = 600.0  # between two tokens


@dataclass(frozen=True)
class Comparison:
    """One plan: the seconds of each timed step as its workers measured them, or why there are none.

    For a decoder, each is of a whole request instead: a prompt and all tokens of its answer (see `timed_work`).
    """

    plan: TransformerPlan
    step_seconds: tuple[float, ...]
    failure: str = ""

    @property
    def predicted_seconds(self) -> float:
        """The prediction for what `step_seconds` measures."""
        return seconds_of(self.plan)

    @property
    def median_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def min_seconds(self) -> float | None:
        return min(self.step_seconds, default=None)

    @property
    def error_percent(self) -> float | None:
        """How far the prediction lies above (+) or below (-) the measured median."""
        measured = self.median_seconds
        return 100 * (self.predicted_seconds / measured - 1) if measured else None

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.plan.body.strategy,
            "devices": [device.name for device in self.plan.devices],
            "predicted_seconds": self.predicted_seconds,
            "median_seconds": self.median_seconds,
            "min_seconds": self.min_seconds,
            "step_seconds": list(self.step_seconds),
            "error_percent": self.error_percent,
            "failure": self.failure or None,
        }


class Comparer:
    """Deploys on a fleet that holds the leases. `device_changed` is the fleet's `on_change`."""

    def __init__(self, report: Callable[[str], None], progress: Progress = lambda name, done, total: None) -> None:
        self._report = report
        self._progress = progress
        self._deployment: Deployment | None = None

    def device_changed(self, device: Device) -> None:
        """Fail what runs on a device that is gone, rather than wait for it."""
        deployment = self._deployment
        if deployment is None or device.device_id not in {planned.device_id for planned in deployment.plan.devices}:
            return
        if device.health in ("dead", "busy") or device.state is None:
            deployment.fail(DeviceLost(device=device.name, reason=device.reason or "its agent was restarted"))
        elif (worker := device.failed_worker(deployment.deployment, deployment.epoch)) is not None:
            deployment.fail(WorkerDied(device=device.name, reason=worker.failure))

    async def compare(
        self,
        fleet: Fleet,
        links: Mapping[tuple[str, str], Link],
        model: Model,
        plans: Sequence[TransformerPlan],
        rounds: int,
        cache_dir: Path,
        encrypt: bool,
    ) -> list[Comparison]:
        """Measure each plan; one that fails is told, and the others still run. Cancelled, it takes its workers down."""
        results = []
        for index, plan in enumerate(plans, start=1):
            plan = plan.with_epoch(fleet.last_epoch + index)
            self._report(f"running {label_of(plan)} ({index} of {len(plans)})")
            try:
                seconds = await self._measure(fleet, links, model, plan, rounds, cache_dir, encrypt)
                results.append(Comparison(plan, seconds))
            except HearthError as error:
                self._report(f"{label_of(plan)} failed: {error}")
                results.append(Comparison(plan, (), error.explanation()))
        return results

    async def _measure(
        self,
        fleet: Fleet,
        links: Mapping[tuple[str, str], Link],
        model: Model,
        plan: TransformerPlan,
        rounds: int,
        cache_dir: Path,
        encrypt: bool,
    ) -> tuple[float, ...]:
        deployment = self._deployment = Deployment(fleet, plan)
        try:
            chunks = await deployment.push(model.directory, cache_dir, self._progress)
            await deployment.load(chunks, links, encrypt)
            seconds = [await _seconds(deployment, seed) for seed in range(_SEED, _SEED + rounds + 1)]
            return tuple(seconds[1:])  # the first one warms up
        finally:
            self._deployment = None
            await deployment.close()


def timed_work(plan: TransformerPlan) -> str:
    """What is timed, for people."""
    length, new_tokens = _timed_tokens(plan)
    if not new_tokens:
        return f"a step of {length} rows"
    return f"a request of {length} prompt tokens and {new_tokens} generated tokens"


def _timed_tokens(plan: TransformerPlan) -> tuple[int, int]:
    """Rows of the prompt or step, and tokens to generate: 0 for an encoder."""
    limits, seq_len = plan.body.generation, plan.body.seq_len
    if limits is None:
        return seq_len, 0
    length = limits.prompt_tokens or seq_len
    return length, max(min(limits.new_tokens, context_tokens(plan) - length), 1)


async def _seconds(deployment: Deployment, seed: int) -> float:
    """Run one step or request on random tokens."""
    import numpy as np

    plan, random = deployment.plan, np.random.default_rng(seed)
    length, new_tokens = _timed_tokens(plan)
    ids = random.integers(0, plan.model.vocab_size, length, dtype=np.int32)
    if not new_tokens:
        return (await deployment.run_step(*pack([ids.tolist()]), "mean")).step_seconds
    async with aclosing(deployment.generate(ids, Sampling(), new_tokens, (), 0, _ANSWER_SECONDS)) as answers:
        async for answer in answers:
            if isinstance(answer, GenerationEnded):
                return answer.prefill_seconds + answer.decode_seconds
    raise StepFailed(device=plan.devices[0].name, reason="its answer had no end")


def describe(results: Sequence[Comparison]) -> str:
    """Whether the plan that was chosen (the first) was right."""
    chosen, others = results[0], [result for result in results[1:] if result.median_seconds is not None]
    if chosen.median_seconds is None:
        return "The chosen plan failed, so that nothing can be said of it."
    if not others:
        return "There was no other plan to compare with."
    best = min(others, key=lambda result: result.median_seconds or 0.0)
    measured = format_seconds(best.median_seconds or 0.0)
    if (best.median_seconds or 0.0) >= chosen.median_seconds:
        return f"The chosen plan was the fastest; the next one, {label_of(best.plan)}, took {measured}."
    return f"{label_of(best.plan)} was faster than the chosen plan: {measured}."
