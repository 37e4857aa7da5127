"""Planning in this process: starting the planner process takes a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from coordinator.cli.planning import graph, problem
from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.auto import plan_graph, plan_instance
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import PlanningResult
from coordinator.plan.transformer.make import plan_transformer
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.state import GraphGoal
from hearth.errors import HearthError
from hearth.plan.plan import GraphPlan, Plan, TransformerPlan


def plan_for(request: PlanRequest) -> TransformerPlan:
    return plan_transformer(request).plan


@contextmanager
def in_process_graph_planning() -> Iterator[None]:
    """Let `hearth plan` of a graph plan in this process."""

    async def solve(request: GraphRequest, progress: Callable[[str], None]) -> PlanningResult[GraphPlan]:
        return plan_graph(request, time.monotonic, progress)

    async def solve_instance(goal: GraphGoal, progress: Callable[[str], None]) -> PlanningResult[GraphPlan]:
        problem = read_instance(goal.model_file, goal.congestion)
        return plan_instance(problem, goal.strategy, goal.time_limit_seconds, time.monotonic, progress)

    async def plans_or_errors(kind: str, requests: Sequence[GraphRequest]) -> list[Plan | HearthError]:
        made: list[Plan | HearthError] = []
        for request in requests:
            try:
                made.append(plan_graph(request, time.monotonic).plan)
            except HearthError as error:
                made.append(error)
        return made

    with (
        mock.patch.object(graph, "solve_graph", solve),
        mock.patch.object(graph, "plans_or_errors", plans_or_errors),
        mock.patch.object(problem, "solve_instance", solve_instance),
    ):
        yield
