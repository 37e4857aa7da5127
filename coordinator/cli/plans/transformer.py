"""Planning of transformers for `hearth plan`: profiles, plans, output, timing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.cli.output import out
from coordinator.cli.plans.live import LiveDevices
from coordinator.cli.render import tables
from coordinator.deploy.deployment import Weights
from coordinator.deploy.transformer import TransformerDeployment, shard_weights
from coordinator.devices.block_profiling import block_cluster, block_workload, chosen_kernels
from coordinator.devices.fleet import Fleet
from coordinator.devices.profile_file import SavedTransformerProfile, read_transformer_profile
from coordinator.plan.redundancy import Loss
from coordinator.plan.solution import PlanningResult
from coordinator.plan.stores import lacking
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import predicted_step_timeline
from coordinator.plan.transformer.explain import (
    best_of_each_strategy,
    candidate_as_json,
    rates_by_format,
    seconds_unit,
    why_won,
)
from coordinator.plan.transformer.request import PlanRequest, on_subset, stored_chunks, with_stored
from coordinator.serve.goal import open_transformer, plan_request
from coordinator.serve.kinds.generation import max_context_tokens
from coordinator.serve.opening import check_model
from coordinator.serve.state import TransformerGoal
from coordinator.serve.text.sentences import pack_sequences
from hearth.errors import HearthError, StepFailed
from hearth.plan.common import PlannedDevice
from hearth.plan.kernels import KernelChoice
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_seconds
from hearth.wire.messages import DeviceTrace, GenerateTokens, GenerationEnded

_NUM_ALTERNATIVES = 3  # candidates shown without --explain, so that plan and alternatives fit on one screen
_SEED = 20240525  # arbitrary; fixed, so that all plans are timed on the same tokens
_TOKEN_TIMEOUT_SECONDS = 600.0  # wait for one token; the first comes after the prefill of a long prompt on slow devices


@dataclass(frozen=True)
class PlannedTransformer:
    """A plan with all candidates, and the request that it answers."""

    result: PlanningResult[TransformerPlan]
    request: PlanRequest

    @property
    def plan(self) -> TransformerPlan:
        return self.result.plan

    def timeline(self) -> Sequence[DeviceTrace]:
        plan = self.plan
        used = self.request.cluster.subset(tuple(device.device_id for device in plan.devices))
        return predicted_step_timeline(PlanLayout(plan.model, plan.body, used, plan.wire))

    def as_json(self, explain: bool) -> dict[str, Any]:
        plan_json = self.plan.model_dump(mode="json")
        if explain:
            plan_json["priced"] = [candidate_as_json(each, self.request.cluster) for each in self.result.candidates]
        return plan_json

    def show(self, explain: bool) -> None:
        plan, cluster = self.plan, self.request.cluster
        predicted = plan.predicted
        out.print(*tables.plan_tables(plan), sep="\n")
        out.print(
            f"predicted: {format_seconds(predicted.latency_seconds)} per step "
            f"(busiest device {format_seconds(predicted.compute_seconds)}, "
            f"busiest link {format_seconds(predicted.transfer_seconds)})"
        )
        for line in tables.generation_lines(plan):
            out.print(line)
        if self.request.generation is not None and self.request.generation.draft and not tables.draft_line(plan):
            out.print(
                f"draft model: no device has room for {self.request.generation.draft.name}; "
                "tokens are guessed from the text so far only"
            )
        if plan.body.exact_links:
            out.print(tables.formats_line(plan))
        if explain:
            out.print(f"\n{why_won(self.result, cluster, self.request.strategy)}")
            if rates := rates_by_format(plan, cluster, self.request.num_cached_tokens):
                out.print(rates)
            out.print(tables.candidates_list(self.result, cluster))
        elif plan.alternatives:
            title = f"Not chosen ({seconds_unit(plan)})" if plan.body.generation else "Not chosen"
            out.print(tables.alternatives_table(self.result, _NUM_ALTERNATIVES, "predicted", title))

    async def losses(self) -> list[Loss]:
        """What the loss of each device of the plan would cost."""
        plan, devices, stored = self.plan, self.request.cluster.devices, stored_chunks(self.plan)
        deployed = replace(self.request, cluster=with_stored(self.request.cluster, stored), held=plan)

        def loss(lost: PlannedDevice) -> Loss:
            others = tuple(device.device_id for device in devices if device.device_id != lost.device_id)
            if not others:
                return Loss(lost.name, "there is no other device")
            try:
                after = plan_transformer(on_subset(deployed, others)).plan
            except HearthError as error:
                return Loss(lost.name, error.explanation())
            return Loss(lost.name, lacking=lacking(stored_chunks(after), stored))

        return [loss(device) for device in plan.devices]

    async def best_of_each_strategy(self) -> list[TransformerPlan]:
        """This plan, then the best one of each other strategy."""
        return best_of_each_strategy(self.result)


class TransformerPlanning:
    """Profiles, plans and times one transformer. Raises BadCheckpoint, UnsupportedArchitecture, BadSetting."""

    def __init__(self, goal: TransformerGoal) -> None:
        self.goal = goal
        check_model(goal)
        self.model = open_transformer(goal)
        self._workload = block_workload(self.model.spec, self.model.seq_len, goal.deterministic)
        self._kernels: dict[str, tuple[KernelChoice, ...]] = {}  # by device id; of devices that were profiled

    def cluster_from_files(self, profile: Path | None = None, devices: Path | None = None) -> ClusterProfile | None:
        """The cluster of a saved profile; None: measure live devices. Raises BadSetting."""
        if profile is None:
            return None
        return read_transformer_profile(profile, self.model.spec, self.goal.deterministic)

    async def profile(self, live: LiveDevices) -> ClusterProfile:
        """The cluster of live devices. Raises NoDevices, ..."""
        cluster = await block_cluster(live.profiler, live.devices, self._workload)
        self._kernels |= chosen_kernels(cluster, self._workload)
        return cluster

    def saved_profile(self, cluster: ClusterProfile) -> SavedTransformerProfile:
        return SavedTransformerProfile(
            devices=cluster.devices,
            links=cluster.links,
            media=cluster.media,
            model=self.model.spec,
            deterministic=self.goal.deterministic,
        )

    async def plan(self, cluster: ClusterProfile) -> PlannedTransformer:
        """The best plan under the user's limits. Raises ModelDoesNotFit, ..."""
        request = plan_request(self.goal, self.model, cluster)
        return PlannedTransformer(plan_transformer(request), request)

    # ---- with --compare -------------------------------------------------------------------------------------------

    def deployment(self, fleet: Fleet, plan: TransformerPlan) -> TransformerDeployment:
        return TransformerDeployment(fleet, plan)

    async def weights(self, plan: TransformerPlan, cache_dir: Path) -> Weights:
        draft = self.model.draft
        return await shard_weights(
            self.model.directory, plan, cache_dir, self._kernels, draft_dir=draft.directory if draft else None
        )

    async def measure_seconds(self, deployment: TransformerDeployment, rounds: int) -> tuple[float, ...]:
        """Seconds of each step (decoder: request) on random tokens, after one warm-up run."""
        seconds = [await _run_seconds(deployment, seed) for seed in range(_SEED, _SEED + rounds + 1)]
        return tuple(seconds[1:])


def timed_tokens(plan: TransformerPlan) -> tuple[int, int]:
    """Rows of the prompt (encoder: of the step), and tokens to generate (encoder: 0)."""
    limits, seq_len = plan.body.generation, plan.body.seq_len
    if limits is None:
        return seq_len, 0
    length = limits.prompt_tokens or seq_len
    return length, max(min(limits.new_tokens, max_context_tokens(plan) - length), 1)


async def _run_seconds(deployment: TransformerDeployment, seed: int) -> float:
    plan, random = deployment.plan, np.random.default_rng(seed)
    length, new_tokens = timed_tokens(plan)
    ids = random.integers(0, plan.model.vocab_size, length, dtype=np.int32)
    if not new_tokens:
        return (await deployment.run_step(*pack_sequences([ids.tolist()]), "mean")).step_seconds
    request = GenerateTokens(**deployment.command_fields, max_tokens=new_tokens)
    async with aclosing(deployment.generate(ids, request, _TOKEN_TIMEOUT_SECONDS)) as answers:
        async for answer in answers:
            if isinstance(answer, GenerationEnded):
                return answer.prefill_seconds + answer.decode_seconds
    raise StepFailed(device=plan.devices[0].name, reason="the answer ended without GenerationEnded")
