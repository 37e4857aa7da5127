"""Searches for the shares of each device: one file each, by the name that strategies know them by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.plan.transformer.planners.best_shares import BestSharesPlanner
from coordinator.plan.transformer.planners.pipeline import PipelinePlanner
from coordinator.plan.transformer.planners.rows import RowsPlanner
from coordinator.plan.transformer.request import Planner
from coordinator.plan.transformer.strategies.base import Strategy

SEARCHES: Mapping[str, Callable[[Any], Planner]] = {
    "rows": RowsPlanner,
    "shares": BestSharesPlanner,
    "stages": lambda name: PipelinePlanner(),
}


def planner_of(strategy: Strategy[Any]) -> Planner:
    return SEARCHES[strategy.search](strategy.name)
