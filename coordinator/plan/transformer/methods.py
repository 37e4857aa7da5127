"""The strategies of Transformers, and planners of their shares, by name. Pure."""

from __future__ import annotations

from functools import partial

from coordinator.plan.methods import Method, Methods
from coordinator.plan.transformer.auto import plan_strategy
from coordinator.plan.transformer.planners.exact import ExactPlanner
from coordinator.plan.transformer.planners.galaxy import GalaxyPlanner
from coordinator.plan.transformer.request import PlanRequest, in_ring, on_subset
from coordinator.plan.transformer.shares import by_capacity
from coordinator.plan.transformer.strategies import STRATEGIES
from hearth.plan.plan import TransformerPlan


def _strategy(name: str, request: PlanRequest) -> TransformerPlan:
    """Over all devices; over the fastest one where the strategy takes no more."""
    if STRATEGIES[name].max_devices(request.spec) == 1:
        request = on_subset(request, (by_capacity(request)[0].device_id,))
    return plan_strategy(request, name)


def _galaxy(request: PlanRequest) -> TransformerPlan:
    return GalaxyPlanner("hmp").plan(in_ring(request))


def _exact(request: PlanRequest) -> TransformerPlan:
    return ExactPlanner("hmp").plan(in_ring(request))


TRANSFORMER_METHODS = Methods(
    (
        *(Method(each.name, "latency", each.summary, partial(_strategy, each.name)) for each in STRATEGIES.values()),
        Method("galaxy", "latency", "hmp with the shares of Galaxy's Algorithm 1", _galaxy, in_auto=False),
        Method("exact", "latency", "hmp with the proven best shares", _exact, in_auto=False),
    )
)
