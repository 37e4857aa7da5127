"""The proven shares of a tensor-parallel strategy, or Galaxy's where the simulator finds those faster. Pure."""

from __future__ import annotations

from contextlib import suppress

from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.planners.exact import plan_exact
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.request import PlanRequest, in_ring
from hearth.errors import ModelDoesNotFit
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy


def plan_shares(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """Raises ModelDoesNotFit."""
    request = in_ring(request)
    plans = [plan_exact(request, strategy)]
    with suppress(ModelDoesNotFit):  # Galaxy's balancing can miss what the integer program finds
        plans.append(plan_galaxy(request, strategy))
    return min(plans, key=seconds_of)
