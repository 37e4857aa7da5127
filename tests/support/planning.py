"""Planning in this process: starting the planner process takes a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.auto import plan_instance
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.planners import process
from coordinator.serve.planners.policies import plan_with_policy
from hearth.errors import HearthError
from hearth.plan.plan import TransformerPlan
from hearth.platform.child import Child


def plan_for(request: PlanRequest) -> TransformerPlan:
    return plan_transformer(request).plan


@contextmanager
def in_process_planning(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Let `hearth plan` and controllers plan in this process; searches for graphs take the time from `clock`.

    That the planner process gives the same plans is tested with the planners and with the idle planner processes.
    """

    def plan(kind: str, request: Any, report_strategy: Callable[[str], None]) -> Any:
        if kind == "transformer":
            return plan_transformer(request)
        if kind == "graph":
            return plan_with_policy(request, clock, report_strategy)
        problem = read_instance(request.model_file, request.congestion)
        return plan_instance(problem, request.strategy, request.time_limit_seconds, clock, report_strategy)

    async def plan_all(
        kind: str,
        requests: Sequence[Any],
        report_strategy: Callable[[str], None] = lambda line: None,
        *_: Any,
        **__: Any,
    ) -> list[Any]:
        await asyncio.sleep(0)  # other tasks run meanwhile
        results: list[Any] = []
        for request in requests:
            try:
                results.append(plan(kind, request, report_strategy))
            except HearthError as error:
                results.append(error)
        return results

    async def start_none(kind: str) -> Child:
        raise OSError("plans are made in this process")

    with (
        mock.patch.object(process, "_plan_in_child", plan_all),
        mock.patch.object(process, "start_planner", start_none),
    ):
        yield
