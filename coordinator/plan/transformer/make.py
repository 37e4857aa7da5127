"""Planners: one file each, one protocol (`base.Planner`)."""

from __future__ import annotations

from dataclasses import replace

from coordinator.plan.transformer.auto import AutoPlanner, plan_strategy
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.planners.exact import ExactPlanner
from coordinator.plan.transformer.planners.galaxy import GalaxyPlanner
from coordinator.plan.transformer.planners.pipeline import PipelinePlanner
from coordinator.plan.transformer.refine.exact_links import exact_where_free
from coordinator.plan.transformer.request import GenerationRequest, Planner, PlanRequest, on_subset
from coordinator.plan.transformer.shares import capacity
from hearth.errors import ModelDoesNotFit
from hearth.plan.parts import Alternative
from hearth.plan.plan import TransformerPlan

__all__ = [
    "AutoPlanner",
    "ExactPlanner",
    "GalaxyPlanner",
    "GenerationRequest",
    "PipelinePlanner",
    "PlanRequest",
    "Planner",
    "make_plan",
    "plan_strategy",
]


def make_plan(request: PlanRequest) -> TransformerPlan:
    """The plan that the user asked for: of one strategy over all devices, or the best of all.

    A named strategy is taken even where another would be faster; the alternatives say so. Raises ModelDoesNotFit.
    """
    plan = _made(request)
    return exact_where_free(request, plan) if request.spare_accuracy else plan


def _made(request: PlanRequest) -> TransformerPlan:
    if request.strategy == "auto":
        return AutoPlanner().plan(request)
    chosen = request
    if request.strategy == "local":
        fastest = max(request.cluster.devices, key=lambda device: capacity(request, device.blocks))
        chosen = on_subset(request, (fastest.device_id,))
    plan = plan_strategy(chosen, request.strategy)
    try:
        best = AutoPlanner().plan(replace(request, strategy="auto"))
    except ModelDoesNotFit:
        return plan
    others = [
        Alternative(
            strategy=f"{best.body.strategy} on {', '.join(device.name for device in best.devices)}",
            predicted_seconds=seconds_of(best),
            reason=f"'{request.strategy}' was asked for",
        ),
        *(other for other in best.alternatives if other.predicted_seconds != seconds_of(plan)),
    ]
    same = seconds_of(best) >= seconds_of(plan)
    return plan.model_copy(update={"alternatives": tuple(others[1:] if same else others)})
