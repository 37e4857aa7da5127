"""Make the plan that the user asked for: with a named strategy or planner on all devices, or the best of all. Pure."""

from __future__ import annotations

from dataclasses import replace

from coordinator.plan.methods import TRANSFORMER_METHODS
from coordinator.plan.solution import PlanningResult, with_reasons
from coordinator.plan.stores import StorePlanning, plan_within_stores
from coordinator.plan.transformer.auto import make_candidate, plan_auto, plan_strategy
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.planners.exact import plan_exact
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.refine.draft import add_draft
from coordinator.plan.transformer.refine.exact_links import add_exact_links
from coordinator.plan.transformer.refine.keep_in_place import keep_in_place
from coordinator.plan.transformer.refine.kv_copies import add_kv_copies
from coordinator.plan.transformer.refine.replicate import replicate_embedding
from coordinator.plan.transformer.request import PlanRequest, with_ring_order
from coordinator.plan.transformer.stored import restricted, stored_chunks
from hearth.errors import ModelDoesNotFit
from hearth.plan.plan import TransformerPlan


def plan_transformer(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """The chosen plan and all candidates.

    A named strategy is used even if another one is faster; the alternatives say so. Devices get no more weights than their
    stores have room for. Raises ModelDoesNotFit, StoresTooSmall and BadSetting.
    """
    planning = StorePlanning(_plan_transformer, restricted, stored_chunks)
    return plan_within_stores(planning, request, request.cluster.devices, stored_chunks(request.held))


def _plan_transformer(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """As `plan_transformer`, whatever the stores have room for."""
    planned = _plan_without_draft(request)
    if request.generation is not None and request.generation.draft is not None:
        planned = add_draft(request, planned, _plan_without_draft)
    plan = add_kv_copies(request, planned.plan)
    return replace(planned, chosen=replace(planned.chosen, plan=plan))


def _plan_without_draft(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    planned = plan_auto(request) if request.strategy == "auto" else _plan_by_name(request)
    plan = planned.plan
    if request.held is not None:
        plan = keep_in_place(request, plan)
    if request.spare_accuracy:
        plan = add_exact_links(request, plan)
    seconds = planned.chosen.seconds if plan is planned.plan else request_seconds(plan)
    return replace(planned, chosen=replace(planned.chosen, plan=plan, seconds=seconds))


def _plan_by_name(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    plan = replicate_embedding(request, _named_plan(request))
    chosen = replace(make_candidate(f"{plan.body.strategy} on {_device_names(plan)}", plan), strategy=request.strategy)
    try:
        auto = plan_auto(replace(request, strategy="auto"))
    except ModelDoesNotFit:
        return PlanningResult(chosen)
    others = [each for each in auto.others if each.seconds != chosen.seconds]
    if auto.chosen.seconds < chosen.seconds:
        best = replace(auto.chosen, label=f"{auto.plan.body.strategy} on {_device_names(auto.plan)}")
        others.insert(0, best)
    return with_reasons(chosen, others, request.strategy)


def _device_names(plan: TransformerPlan) -> str:
    return ", ".join(device.name for device in plan.devices)


def _named_plan(request: PlanRequest) -> TransformerPlan:
    """The plan by the strategy or planner that the request names. Raises ModelDoesNotFit and BadSetting."""
    TRANSFORMER_METHODS.check(request.strategy, "latency")
    if request.strategy == "galaxy":
        return plan_galaxy(with_ring_order(request), "hmp")
    if request.strategy == "exact":
        return plan_exact(with_ring_order(request), "hmp")
    return plan_strategy(request, request.strategy)
