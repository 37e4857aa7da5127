"""The strategy with the least predicted time, one device alone included, and the reason why each other one lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator.plan.solution import Candidate, PlanningResult, choose_candidate, with_reasons
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.planners import plan_on_all, plan_on_some
from coordinator.plan.transformer.refine.micro_batches import split_into_micro_batches
from coordinator.plan.transformer.refine.replicate import estimate_replicated_seconds, replicate, replicate_embedding
from coordinator.plan.transformer.request import PlanRequest, on_subset
from coordinator.plan.transformer.shares import devices_by_capacity
from coordinator.plan.transformer.strategies import STRATEGIES, strategy_of_body
from coordinator.plan.transformer.strategies.base import TransformerStrategy
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.plan import TransformerPlan

TransformerCandidate = Candidate[TransformerPlan]

TIE_TOLERANCE = 1.04  # within 4 %, less than the prediction error, fewer devices win: each is one more that can fail
_MAX_LEAVE_ONE_OUT = 6  # devices; with more, leaving each one out in turn would add too many plans
_DEVICE_COUNT_RATIO = 1.35  # between the numbers of devices that are tried: similar numbers give similar plans
_NUM_MICRO_BATCH_TRIALS = 2  # plans tried with micro-batches; each costs a simulation of many layers
_NUM_REPLICATION_TRIALS = 2  # plans tried with replication; each costs about twenty simulations


def plan_auto(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """Price all candidates and choose one.

    They are `local` on every device, every other strategy on the fastest two, three, ... devices and on those without a
    shared medium, and a pipeline on the devices that its search chooses. Raises ModelDoesNotFit.
    """
    candidates = [_try_candidate(request, *trial) for trial in _trials(request)]
    if all(each.plan is None for each in candidates):
        closest = min(candidates, key=lambda each: each.missing_bytes)
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=closest.missing_bytes)
    candidates += list(_replication_candidates(request, candidates))
    candidates += list(_micro_batch_candidates(request, candidates))
    if len(request.cluster.devices) > 1:
        for strategy in STRATEGIES.values():
            if reason := why_ruled_out(request, strategy):
                candidates.append(Candidate(strategy.name, strategy.name, reason=reason))
    chosen = choose_candidate(candidates, lambda each: each.plan is not None, TIE_TOLERANCE)
    assert chosen is not None
    assert chosen.plan is not None
    plan = chosen.plan.model_copy(update={"planner": f"auto: {chosen.plan.planner}"})
    return with_reasons(replace(chosen, plan=plan), (each for each in candidates if each is not chosen), "auto")


def plan_strategy(request: PlanRequest, name: str) -> TransformerPlan:
    """The best plan of one strategy over all devices of the request, or over the fastest if it is for one device.

    `hmp` here is Galaxy's, with every weight group of the layers sharded. Raises ModelDoesNotFit, and BadSetting for a
    strategy that is impossible for the request.
    """
    strategy = STRATEGIES[name]
    if reason := why_ruled_out(request, strategy):
        raise BadSetting(setting="--strategy", reason=f"{name} {reason}")
    if strategy.max_devices(request.spec) == 1:
        request = on_subset(request, (devices_by_capacity(request)[0].device_id,))
    return plan_on_all(request, strategy)


def why_ruled_out(request: PlanRequest, strategy: TransformerStrategy[Any]) -> str:
    """Why a strategy is impossible for this request; empty if it is possible."""
    return request.why_not_by_rows if strategy.whole_prompts and not request.attention_by_rows else ""


def make_candidate(label: str, plan: TransformerPlan) -> TransformerCandidate:
    """The candidate for a priced plan."""
    names = tuple(device.name for device in plan.devices)
    return Candidate(label, plan.body.strategy, names, request_seconds(plan), plan)


def _try_candidate(
    request: PlanRequest, label: str, strategy: TransformerStrategy[Any], make: Callable[[], TransformerPlan]
) -> TransformerCandidate:
    try:
        return make_candidate(label, replicate_embedding(request, make()))
    except ModelDoesNotFit as error:
        return TransformerCandidate.too_large(label, strategy.name, error.missing_bytes)


def _trials(request: PlanRequest) -> Iterator[tuple[str, TransformerStrategy[Any], Callable[[], TransformerPlan]]]:
    """The plans to try: a label, the strategy, and a function that makes the plan."""
    devices, spec = request.cluster.devices, request.spec
    usable = [each for each in STRATEGIES.values() if not why_ruled_out(request, each)]
    sharing = [each for each in usable if each.max_devices(spec) > 1]
    for strategy in (each for each in usable if each.max_devices(spec) == 1):
        for device in devices:
            alone = on_subset(request, (device.device_id,))
            yield f"{strategy.name} on {device.name}", strategy, partial(plan_on_all, alone, strategy)
    for count in _device_counts(len(devices)):
        where = f"on {count} devices" if count < len(devices) else f"on all {count} devices"
        for strategy in (each for each in sharing if count <= each.max_devices(spec)):
            yield f"{strategy.name} {where}", strategy, partial(plan_on_some, request, strategy, count)
    wired = _devices_on_wires(request)
    fastest = {each.device_id for each in devices_by_capacity(request)[: len(wired)]}
    if 2 <= len(wired) < len(devices) and (fastest != set(wired) or len(wired) not in _device_counts(len(devices))):
        on_wires = on_subset(request, wired)
        for strategy in (each for each in sharing if len(wired) <= each.max_devices(spec)):
            where = f"on {len(wired)} devices on wires"
            yield f"{strategy.name} {where}", strategy, partial(plan_on_all, on_wires, strategy)
    if 2 < len(devices) <= _MAX_LEAVE_ONE_OUT:
        slowest = devices_by_capacity(request)[-1]
        for strategy in (each for each in sharing if each.leaves_one_out):
            for left_out in (device for device in devices if device is not slowest):
                rest = on_subset(request, tuple(d.device_id for d in devices if d is not left_out))
                yield f"{strategy.name} without {left_out.name}", strategy, partial(plan_on_all, rest, strategy)


def _devices_on_wires(request: PlanRequest) -> tuple[str, ...]:
    """The devices on no shared medium: together they may be faster than those with the most capacity."""
    shared = {device_id for medium in request.cluster.media for device_id in medium.device_ids}
    return tuple(each.device_id for each in request.cluster.devices if each.device_id not in shared)


def _device_counts(num_devices: int) -> list[int]:
    """The numbers of fastest devices to try: every small number, then with growing steps, and all devices."""
    counts = {num_devices}
    count = 2
    while count < num_devices:
        counts.add(count)
        count = max(count + 1, round(count * _DEVICE_COUNT_RATIO))
    return sorted(count for count in counts if count >= 2)


def _replication_candidates(
    request: PlanRequest, candidates: Sequence[TransformerCandidate]
) -> Iterator[TransformerCandidate]:
    """The most promising plans, refined to use spare memory for replicated weights and so to reduce traffic.

    With replication more devices pay off: a plan that is slower when sharded may become the fastest.
    """
    subsets = [
        (on_subset(request, tuple(device.device_id for device in each.plan.devices)), each.plan)
        for each in candidates
        if each.plan is not None and "replicate" in strategy_of_body(each.plan.body).refinements
    ]
    for subset, plan in sorted(subsets, key=lambda each: estimate_replicated_seconds(*each))[:_NUM_REPLICATION_TRIALS]:
        better = replicate(subset, plan)
        if better is not plan:
            yield make_candidate(f"{plan.body.strategy} replicating on {plan.num_ranks} devices", better)


def _micro_batch_candidates(
    request: PlanRequest, candidates: Sequence[TransformerCandidate]
) -> Iterator[TransformerCandidate]:
    """The most promising tensor-parallel plans, with a decoder's prompt split into concurrent micro-batches."""
    sharing = [
        (each.label, each.plan)
        for each in sorted(candidates, key=lambda each: each.seconds)
        if each.plan is not None
        and each.plan.num_ranks > 1
        and "micro-batches" in strategy_of_body(each.plan.body).refinements
    ]
    for label, plan in sharing[:_NUM_MICRO_BATCH_TRIALS]:
        better = split_into_micro_batches(request, plan)
        if better is not plan:
            yield make_candidate(f"{label}, {better.body.micro_batches} micro-batches", better)
