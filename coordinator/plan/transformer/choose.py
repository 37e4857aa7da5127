"""Choose a plan: with the strategy or planner that the user named, or the fastest of all candidates, and then refine it. Pure.

1. Candidates: each strategy on some devices (`_trials`), with word embeddings replicated where that pays.
2. Of the most promising ones, `replicate` and `split_into_micro_batches` make further candidates.
3. The candidate with the least predicted time is chosen; among about equal ones, that with the fewest devices.
4. `PASSES` refine the chosen plan, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator.plan.methods import LOCAL, TRANSFORMER_METHODS
from coordinator.plan.solution import IDLE_SHARE, Candidate, PlanningResult, choose_candidate, with_reasons
from coordinator.plan.stores import StorePlanning, plan_within_stores
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.planners.exact import plan_exact
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.planners.pipeline import plan_stages
from coordinator.plan.transformer.refine import (
    add_draft,
    add_exact_links,
    add_kv_copies,
    keep_in_place,
    requests_with_room_for_draft,
    split_into_micro_batches,
)
from coordinator.plan.transformer.replicate import estimate_replicated_seconds, replicate, replicate_embedding
from coordinator.plan.transformer.request import PlanRequest, on_subset, restricted, stored_chunks, with_ring_order
from coordinator.plan.transformer.shares import device_capacity, devices_by_capacity, plan_rows
from coordinator.plan.transformer.strategies import STRATEGIES, strategy_of_body
from coordinator.plan.transformer.strategies.base import TransformerStrategy
from hearth.errors import BadSetting, HearthError, ModelDoesNotFit
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy

TransformerCandidate = Candidate[TransformerPlan]
Pass = Callable[[PlanRequest, TransformerPlan], TransformerPlan]

# What is done to the chosen plan. Each pass returns a priced plan, or the plan that it was given.
PASSES: Sequence[Pass] = (keep_in_place, add_exact_links, add_draft, add_kv_copies)

TIE_TOLERANCE = 1.04  # within 4 %, less than the prediction error, fewer devices win: each is one more that can fail
_MAX_LEAVE_ONE_OUT = 6  # devices; with more, leaving each one out in turn would add too many plans
_DEVICE_COUNT_RATIO = 1.35  # between the numbers of devices that are tried: similar numbers give similar plans
_NUM_MICRO_BATCH_TRIALS = 2  # plans tried with micro-batches; each costs a simulation of many layers
_NUM_REPLICATION_TRIALS = 2  # plans tried with replication; each costs about twenty simulations


def plan_transformer(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """The chosen plan and all candidates.

    A named strategy is used even if another one is faster; the alternatives say so. Devices get no more weights than their
    stores have room for. Raises ModelDoesNotFit, StoresTooSmall and BadSetting.
    """
    planning = StorePlanning(_plan, restricted, stored_chunks)
    return plan_within_stores(planning, request, request.cluster.devices, stored_chunks(request.held))


def _plan(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """As `plan_transformer`, whatever the stores have room for."""
    planned = _choose(request)
    plan = _refined(request, planned.plan)
    if request.draft is not None and not _has_draft(plan):
        for tighter in requests_with_room_for_draft(request):
            with suppress(HearthError):
                again = _choose(tighter)
                if _has_draft(with_draft := _refined(request, again.plan)):
                    planned, plan = again, with_draft
                    break
    return replace(planned, chosen=replace(planned.chosen, plan=plan, seconds=request_seconds(plan)))


def _refined(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    for change in PASSES:
        plan = change(request, plan)
    return plan


def _has_draft(plan: TransformerPlan) -> bool:
    return plan.body.generation is not None and plan.body.generation.draft is not None


def _choose(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """The plan of the named method, or the best of all, before `PASSES`."""
    if request.strategy == "auto":
        return plan_auto(request)
    plan = _without_idle_devices(request, _named_plan(request))
    chosen = replace(_candidate(_on_devices(plan), plan), strategy=request.strategy)
    try:
        auto = plan_auto(replace(request, strategy="auto"))
    except ModelDoesNotFit:
        return PlanningResult(chosen)
    others = [each for each in auto.others if each.seconds != chosen.seconds]
    if auto.chosen.seconds < chosen.seconds:
        others.insert(0, replace(auto.chosen, label=_on_devices(auto.plan)))
    return with_reasons(chosen, others, request.strategy)


def _on_devices(plan: TransformerPlan) -> str:
    return f"{plan.body.strategy} on {', '.join(device.name for device in plan.devices)}"


def _without_idle_devices(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan of the same method without the devices that do under 1 % of the work, unless it is slower."""
    profiles = {device.device_id: device for device in request.cluster.devices}
    work = {  # in layers
        each.device_id: each.compute_seconds * device_capacity(request, profiles[each.device_id].blocks)
        for each in plan.devices
    }
    busy = tuple(device for device, share in work.items() if share >= IDLE_SHARE * sum(work.values()))
    if len(busy) == plan.num_ranks:
        return plan
    method = plan.body.strategy if request.strategy == "auto" else request.strategy
    try:
        fewer = _named_plan(on_subset(replace(request, strategy=method), busy))
    except ModelDoesNotFit:
        return plan
    return fewer if request_seconds(fewer) <= request_seconds(plan) else plan


# ---- by name ---------------------------------------------------------------------------------------------------------


def _named_plan(request: PlanRequest) -> TransformerPlan:
    """The plan by the strategy or planner that the request names. Raises ModelDoesNotFit and BadSetting."""
    TRANSFORMER_METHODS.check(request.strategy, "latency")
    planner = _PLANNERS_OF_HMP.get(request.strategy)
    if planner is not None:
        return replicate_embedding(request, planner(with_ring_order(request), "hmp"))
    return replicate_embedding(request, plan_strategy(request, request.strategy))


_PLANNERS_OF_HMP: Mapping[str, Callable[[PlanRequest, ShareStrategy], TransformerPlan]] = {
    "galaxy": plan_galaxy,
    "exact": plan_exact,
}


def plan_strategy(request: PlanRequest, name: str) -> TransformerPlan:
    """The best plan of one strategy over all devices of the request, or over the fastest if it is for one device.

    `hmp` here is Galaxy's, with every weight group of the layers sharded. Raises ModelDoesNotFit, and BadSetting for a
    strategy that is impossible for the request.
    """
    strategy = STRATEGIES[name]
    if reason := _why_ruled_out(request, strategy):
        raise BadSetting(setting="--strategy", reason=f"{name} {reason}")
    if strategy.max_devices(request.spec) == 1:  # whatever its name, it is the whole model on one device
        request, strategy = on_subset(request, (devices_by_capacity(request)[0].device_id,)), STRATEGIES[LOCAL]
    return _plan_on_all(request, strategy)


def plan_shares(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """The shares that are best for compute, or Galaxy's if the simulator finds them faster. Raises ModelDoesNotFit."""
    request = with_ring_order(request)
    plans = [plan_exact(request, strategy)]
    with suppress(ModelDoesNotFit):  # Galaxy's balancing can miss a fit that the integer program finds
        plans.append(plan_galaxy(request, strategy))
    return min(plans, key=request_seconds)


_SHARE_PLANNERS: Mapping[str, Callable[[PlanRequest, Any], TransformerPlan]] = {  # by `TransformerStrategy.search`
    "rows": plan_rows,
    "shares": plan_shares,
}


def _plan_on_all(request: PlanRequest, strategy: TransformerStrategy[Any]) -> TransformerPlan:
    """The plan over all devices of the request; a pipeline uses at most one device per layer. Raises ModelDoesNotFit."""
    if strategy.search == "stages":
        return plan_stages(request, min(len(request.cluster.devices), request.spec.num_layers))
    return _SHARE_PLANNERS[strategy.search](request, strategy.name)


def _plan_on_some(request: PlanRequest, strategy: TransformerStrategy[Any], num_devices: int) -> TransformerPlan:
    """The plan over `num_devices` devices: the fastest ones, or for a pipeline those that its search chooses.

    Raises ModelDoesNotFit.
    """
    if strategy.search == "stages":
        return plan_stages(request, num_devices)
    fastest = {device.device_id for device in devices_by_capacity(request)[:num_devices]}
    ids = tuple(each.device_id for each in request.cluster.devices if each.device_id in fastest)
    return _plan_on_all(on_subset(request, ids), strategy)


def _why_ruled_out(request: PlanRequest, strategy: TransformerStrategy[Any]) -> str:
    """Why a strategy is impossible for this request; empty if it is possible."""
    return request.why_not_by_rows if strategy.whole_prompts and not request.attention_by_rows else ""


# ---- the best of all -------------------------------------------------------------------------------------------------


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
    candidates += list(_candidates_without_idle_devices(request, candidates))
    if len(request.cluster.devices) > 1:
        for strategy in STRATEGIES.values():
            if reason := _why_ruled_out(request, strategy):
                candidates.append(Candidate(strategy.name, strategy.name, reason=reason))
    chosen = choose_candidate(candidates, lambda each: each.plan is not None, TIE_TOLERANCE)
    assert chosen is not None
    assert chosen.plan is not None
    plan = chosen.plan.model_copy(update={"planner": f"auto: {chosen.plan.planner}"})
    return with_reasons(replace(chosen, plan=plan), (each for each in candidates if each is not chosen), "auto")


def _candidate(label: str, plan: TransformerPlan) -> TransformerCandidate:
    """The candidate for a priced plan."""
    names = tuple(device.name for device in plan.devices)
    return Candidate(label, plan.body.strategy, names, request_seconds(plan), plan)


def _try_candidate(
    request: PlanRequest, label: str, strategy: TransformerStrategy[Any], make: Callable[[], TransformerPlan]
) -> TransformerCandidate:
    try:
        return _candidate(label, replicate_embedding(request, make()))
    except ModelDoesNotFit as error:
        return TransformerCandidate.too_large(label, strategy.name, error.missing_bytes)


def _trials(request: PlanRequest) -> Iterator[tuple[str, TransformerStrategy[Any], Callable[[], TransformerPlan]]]:
    """The plans to try: a label, the strategy, and a function that makes the plan."""
    devices, spec = request.cluster.devices, request.spec
    usable = [each for each in STRATEGIES.values() if not _why_ruled_out(request, each)]
    sharing = [each for each in usable if each.max_devices(spec) > 1]
    for strategy in (each for each in usable if each.device_limit == 1):
        for device in devices:
            alone = on_subset(request, (device.device_id,))
            yield f"{strategy.name} on {device.name}", strategy, partial(_plan_on_all, alone, strategy)
    for count in _device_counts(len(devices)):
        where = f"on {count} devices" if count < len(devices) else f"on all {count} devices"
        for strategy in (each for each in sharing if count <= each.max_devices(spec)):
            yield f"{strategy.name} {where}", strategy, partial(_plan_on_some, request, strategy, count)
    wired = _devices_on_wires(request)
    fastest = {each.device_id for each in devices_by_capacity(request)[: len(wired)]}
    if 2 <= len(wired) < len(devices) and (fastest != set(wired) or len(wired) not in _device_counts(len(devices))):
        on_wires = on_subset(request, wired)
        for strategy in (each for each in sharing if len(wired) <= each.max_devices(spec)):
            where = f"on {len(wired)} devices on wires"
            yield f"{strategy.name} {where}", strategy, partial(_plan_on_all, on_wires, strategy)
    if 2 < len(devices) <= _MAX_LEAVE_ONE_OUT:
        slowest = devices_by_capacity(request)[-1]
        for strategy in (each for each in sharing if each.leaves_one_out):
            for left_out in (device for device in devices if device is not slowest):
                rest = on_subset(request, tuple(d.device_id for d in devices if d is not left_out))
                yield f"{strategy.name} without {left_out.name}", strategy, partial(_plan_on_all, rest, strategy)


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
            yield _candidate(f"{plan.body.strategy} replicating on {plan.num_ranks} devices", better)


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
            yield _candidate(f"{label}, {better.body.micro_batches} micro-batches", better)


def _candidates_without_idle_devices(
    request: PlanRequest, candidates: Sequence[TransformerCandidate]
) -> Iterator[TransformerCandidate]:
    fastest = min(candidates, key=lambda each: each.seconds).plan
    assert fastest is not None
    fewer = _without_idle_devices(request, fastest)
    if fewer is not fastest:
        yield _candidate(f"{fewer.body.strategy} without idle devices", fewer)
