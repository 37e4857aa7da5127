"""Make the plan that the user asked for: with a named strategy or planner on all devices, or the best of all. Pure."""

from __future__ import annotations

from dataclasses import replace

from coordinator.plan.solution import Planned, explained
from coordinator.plan.transformer.auto import candidate_of, plan_auto, plan_strategy
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.methods import TRANSFORMER_METHODS
from coordinator.plan.transformer.planners.exact import plan_exact
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.refine.exact_links import exact_where_free
from coordinator.plan.transformer.request import PlanRequest, in_ring
from hearth.errors import ModelDoesNotFit
from hearth.plan.plan import TransformerPlan


def plan_transformer(request: PlanRequest) -> Planned[TransformerPlan]:
    """The chosen plan and all candidates.

    A named strategy is used even if another one is faster; the alternatives say so. Raises ModelDoesNotFit and
    BadSetting.
    """
    planned = plan_auto(request) if request.strategy == "auto" else _named(request)
    if not request.spare_accuracy:
        return planned
    plan = exact_where_free(request, planned.plan)
    return replace(planned, chosen=replace(planned.chosen, plan=plan, seconds=seconds_of(plan)))


def _named(request: PlanRequest) -> Planned[TransformerPlan]:
    plan = _by_name(request)
    chosen = replace(candidate_of(f"{plan.body.strategy} on {_names(plan)}", plan), strategy=request.strategy)
    try:
        auto = plan_auto(replace(request, strategy="auto"))
    except ModelDoesNotFit:
        return Planned(chosen)
    others = [each for each in auto.others if each.seconds != chosen.seconds]
    if auto.chosen.seconds < chosen.seconds:
        best = replace(auto.chosen, label=f"{auto.plan.body.strategy} on {_names(auto.plan)}")
        others.insert(0, best)
    return explained(chosen, others, request.strategy)


def _names(plan: TransformerPlan) -> str:
    return ", ".join(device.name for device in plan.devices)


def _by_name(request: PlanRequest) -> TransformerPlan:
    """The plan by the strategy or planner that the request names. Raises ModelDoesNotFit and BadSetting."""
    TRANSFORMER_METHODS.check(request.strategy, "latency")
    if request.strategy == "galaxy":
        return plan_galaxy(in_ring(request), "hmp")
    if request.strategy == "exact":
        return plan_exact(in_ring(request), "hmp")
    return plan_strategy(request, request.strategy)
