"""Runs plans for real, one deployment after the other, and holds what was measured against what was predicted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

from coordinator.cli.load import random_inputs
from coordinator.deploy.deployment import Deployment, loss_of
from coordinator.deploy.distribution import Progress
from coordinator.deploy.graph import GraphDeployment, segment_weights
from coordinator.deploy.graph_chunks import SegmentChunks
from coordinator.deploy.transformer import TransformerDeployment, shard_weights
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from coordinator.models.graph_file import Graph
from coordinator.plan.graph.request import seconds_of as graph_seconds_of
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.serve.generation import context_tokens
from coordinator.serve.goal import Model
from coordinator.serve.sentences import pack
from hearth.errors import HearthError, StepFailed
from hearth.plan.plan import GraphPlan, TransformerPlan, is_graph_plan, is_transformer_plan
from hearth.plan.profile import Link
from hearth.platform.asyncio_tools import all_or_first_error
from hearth.platform.units import format_seconds
from hearth.wire.messages import GenerationEnded, Sampling

P = TypeVar("P", TransformerPlan, GraphPlan, contravariant=True)
_SEED = 20240525
_ANSWER_SECONDS = 600.0  # between two tokens


@dataclass(frozen=True)
class Comparison:
    """One plan: the seconds of each timed step as its workers measured them, or why there are none.

    For a decoder and for a graph, each is of a request instead (see `timed_work`).
    """

    plan: TransformerPlan | GraphPlan
    step_seconds: tuple[float, ...]
    failure: str = ""

    @property
    def predicted_seconds(self) -> float:
        """The prediction for what `step_seconds` measures."""
        return graph_seconds_of(self.plan) if is_graph_plan(self.plan) else seconds_of(self.plan)

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
            "strategy": strategy_of(self.plan),
            "devices": [device.name for device in self.plan.devices],
            "predicted_seconds": self.predicted_seconds,
            "median_seconds": self.median_seconds,
            "min_seconds": self.min_seconds,
            "step_seconds": list(self.step_seconds),
            "error_percent": self.error_percent,
            "failure": self.failure or None,
        }


@dataclass(frozen=True)
class Site:
    """Where plans are run: a fleet that holds the leases, the measured links, and how chunks and activations travel."""

    fleet: Fleet
    links: Mapping[tuple[str, str], Link]
    cache_dir: Path  # of manifests
    encrypt: bool
    progress: Progress = lambda name, done, total: None


class Trial(Protocol[P]):
    """One opened model, and how plans of its kind are deployed and measured."""

    def deployment(self, plan: P, site: Site) -> Any:
        """With nothing on the devices yet."""

    async def bring_up(self, deployment: Any, site: Site) -> None:
        """Push and load."""

    async def measure(self, deployment: Any, rounds: int) -> tuple[float, ...]:
        """Seconds of each round, after one that warms up."""


class TransformerTrial:
    def __init__(self, model: Model) -> None:
        self._model = model

    def deployment(self, plan: TransformerPlan, site: Site) -> TransformerDeployment:
        return TransformerDeployment(site.fleet, plan)

    async def bring_up(self, deployment: TransformerDeployment, site: Site) -> None:
        weights = shard_weights(self._model.directory, deployment.plan, site.cache_dir)
        await deployment.push(weights, site.progress)
        await deployment.load(site.links, site.encrypt)

    async def measure(self, deployment: TransformerDeployment, rounds: int) -> tuple[float, ...]:
        """Steps; of a decoder, whole requests."""
        seconds = [await _seconds(deployment, seed) for seed in range(_SEED, _SEED + rounds + 1)]
        return tuple(seconds[1:])


class GraphTrial:
    def __init__(self, graph: Graph) -> None:
        self._chunks = SegmentChunks(graph)
        self._inputs = random_inputs(graph.spec.inputs)

    def deployment(self, plan: GraphPlan, site: Site) -> GraphDeployment:
        return GraphDeployment(site.fleet, plan)

    async def bring_up(self, deployment: GraphDeployment, site: Site) -> None:
        await deployment.push(segment_weights(self._chunks, deployment.plan), site.progress)
        await deployment.load(site.links, site.encrypt)

    async def measure(self, deployment: GraphDeployment, rounds: int) -> tuple[float, ...]:
        """For latency requests one after the other; for throughput a full pipeline's seconds for each request."""
        if deployment.plan.body.objective == "throughput":
            return await self._full_pipeline(deployment, rounds)
        seconds = [(await deployment.infer(self._inputs)).latency_seconds for _ in range(rounds + 1)]
        return tuple(seconds[1:])

    async def _full_pipeline(self, deployment: GraphDeployment, rounds: int) -> tuple[float, ...]:
        """Each round is as many answers as run at once. The first round fills the pipeline, one more lets it drain."""
        clock, size = asyncio.get_running_loop().time, deployment.max_in_flight
        requests, ended = iter(range((rounds + 2) * size)), list[float]()

        async def ask() -> None:
            for _ in requests:
                await deployment.infer(self._inputs)
                ended.append(clock())

        await all_or_first_error(ask() for _ in range(size))
        marks = ended[size - 1 :: size]
        return tuple((after - before) / size for before, after in zip(marks[:-2], marks[1:-1], strict=True))


class Comparer:
    """`device_changed` is the fleet's `on_change`. `report` takes a line for people."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._deployment: Deployment | None = None

    def device_changed(self, device: Device) -> None:
        """Fail what runs on a device that is gone, rather than wait for it."""
        deployment = self._deployment
        if deployment is None or device.device_id not in {planned.device_id for planned in deployment.plan.devices}:
            return
        if (error := loss_of(device, deployment, loaded=False)) is not None:
            deployment.fail(error)

    async def compare(self, trial: Trial[P], plans: Sequence[P], site: Site, rounds: int) -> list[Comparison]:
        """Measure each plan; one that fails is reported, and the others still run. Cancelled, it stops its workers."""
        results = []
        for index, plan in enumerate(plans, start=1):
            numbered: Any = plan.with_epoch(site.fleet.last_epoch + index)
            self._report(f"running {label_of(plan)} ({index} of {len(plans)})")
            try:
                seconds = await self._measure(trial, numbered, site, rounds)
                results.append(Comparison(numbered, seconds))
            except HearthError as error:
                self._report(f"{label_of(plan)} failed: {error}")
                results.append(Comparison(numbered, (), error.explanation()))
        return results

    async def _measure(self, trial: Trial[P], plan: P, site: Site, rounds: int) -> tuple[float, ...]:
        deployment = self._deployment = trial.deployment(plan, site)
        try:
            await trial.bring_up(deployment, site)
            return await trial.measure(deployment, rounds)
        finally:
            self._deployment = None
            await deployment.close()


def strategy_of(plan: TransformerPlan | GraphPlan) -> str:
    return plan.body.strategy if is_transformer_plan(plan) else plan.planner


def label_of(plan: TransformerPlan | GraphPlan) -> str:
    """`hmp on attic, kitchen`."""
    title = plan.body.title if is_transformer_plan(plan) else plan.planner
    return f"{title} on {', '.join(device.name for device in plan.devices)}"


def timed_work(plan: TransformerPlan | GraphPlan) -> str:
    """What is timed, for people."""
    if is_graph_plan(plan):
        return "one request alone" if plan.body.objective == "latency" else "each request of a full pipeline"
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


async def _seconds(deployment: TransformerDeployment, seed: int) -> float:
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
