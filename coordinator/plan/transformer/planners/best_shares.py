"""The shares of a tensor-parallel strategy that are best for compute, or Galaxy's if the simulator finds them faster. Pure."""

from __future__ import annotations

from contextlib import suppress

from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.planners.exact import plan_exact
from coordinator.plan.transformer.planners.galaxy import plan_galaxy
from coordinator.plan.transformer.request import PlanRequest, with_ring_order
from hearth.errors import ModelDoesNotFit
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy


def plan_shares(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """The faster of the exact and the Galaxy plan, as simulated. Raises ModelDoesNotFit."""
    request = with_ring_order(request)
    plans = [plan_exact(request, strategy)]
    with suppress(ModelDoesNotFit):  # Galaxy's balancing can miss a fit that the integer program finds
        plans.append(plan_galaxy(request, strategy))
    return min(plans, key=request_seconds)
