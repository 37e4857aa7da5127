"""Planning in a process of its own: a solver that computes for a minute holds up nobody, and ends when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import Planned
from hearth.errors import DeadlineExceeded, InternalError, error_from_wire
from hearth.plan.plan import GraphPlan
from hearth.platform.child import run_module

# Beside the time limit, which is for the search alone: the interpreter, the model of the problem, heuristics.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0
MARK = "planning: "  # before a strategy's name, on the child's standard error
REQUEST: TypeAdapter[GraphRequest] = TypeAdapter(GraphRequest)
PLANNED: TypeAdapter[Planned[GraphPlan]] = TypeAdapter(Planned[GraphPlan])


async def solve(request: GraphRequest, progress: Callable[[str], None] = lambda line: None) -> Planned[GraphPlan]:
    """As `plan_graph`, in a child process that is gone when this ends. Raises also DeadlineExceeded."""
    return await _child(REQUEST.dump_python(request, mode="json"), request.time_limit_seconds, progress)


async def solve_instance(
    path: str,
    strategy: str,
    congestion: bool,
    time_limit_seconds: float,
    progress: Callable[[str], None] = lambda line: None,
) -> Planned[GraphPlan]:
    """As `plan_instance`, for a placement instance in a file. Raises also BadGraph, DeadlineExceeded."""
    fields = {"path": path, "strategy": strategy, "congestion": congestion, "time_limit_seconds": time_limit_seconds}
    return await _child(fields, time_limit_seconds, progress)


async def _child(
    fields: dict[str, Any], time_limit_seconds: float, progress: Callable[[str], None]
) -> Planned[GraphPlan]:
    def listen(line: str) -> None:
        if line.startswith(MARK):
            progress(line.removeprefix(MARK))

    seconds = _GRACE_FACTOR * time_limit_seconds + _GRACE_SECONDS
    try:
        ended = await run_module("coordinator.serve.solver", json.dumps(fields).encode(), seconds, listen)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning the graph", seconds=seconds) from None
    try:
        values = json.loads(ended.output)
    except ValueError:  # it died: out of memory, most likely
        reason = f"the planner's process {ended.cause}: {' '.join(ended.last_lines)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    if "error" in values:
        raise error_from_wire(values["error"], values["details"])
    return PLANNED.validate_python(values)
