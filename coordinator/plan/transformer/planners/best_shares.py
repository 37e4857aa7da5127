"""The proven shares of a tensor-parallel strategy, or Galaxy's where the simulator finds those faster. Pure."""

from __future__ import annotations

from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.planners.exact import ExactPlanner
from coordinator.plan.transformer.planners.galaxy import GalaxyPlanner
from coordinator.plan.transformer.request import PlanRequest, in_ring
from coordinator.plan.transformer.shares import OnFastest
from hearth.errors import ModelDoesNotFit
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy


class BestSharesPlanner(OnFastest):
    name = "shares"

    def __init__(self, strategy: ShareStrategy) -> None:
        self._planners = (ExactPlanner(strategy), GalaxyPlanner(strategy))

    def plan(self, request: PlanRequest) -> TransformerPlan:
        """Raises ModelDoesNotFit."""
        request = in_ring(request)
        exact, galaxy = self._planners
        plans = [exact.plan(request)]
        try:
            plans.append(galaxy.plan(request))
        except ModelDoesNotFit:  # its balancing can miss what the integer program finds
            pass
        return min(plans, key=seconds_of)
