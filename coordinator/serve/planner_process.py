"""Planning in a process of its own: a search that computes for a minute delays no request, and ends with its caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic import TypeAdapter

from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import Planned
from coordinator.plan.transformer.request import PlanRequest
from hearth.errors import DeadlineExceeded, InternalError, error_from_wire
from hearth.plan.plan import GraphPlan, TransformerPlan
from hearth.platform.child import run_module

# Beside the time limit, which is for the search alone: the interpreter, the model of the problem, heuristics.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0
MARK = "planning: "  # before a strategy's name, on the child's standard error
Kind = Literal["transformer", "graph", "instance"]
Progress = Callable[[str], None]
GRAPH_REQUEST: TypeAdapter[GraphRequest] = TypeAdapter(GraphRequest)
GRAPH_PLANNED: TypeAdapter[Planned[GraphPlan]] = TypeAdapter(Planned[GraphPlan])
TRANSFORMER_REQUEST: TypeAdapter[PlanRequest] = TypeAdapter(PlanRequest)
TRANSFORMER_PLANNED: TypeAdapter[Planned[TransformerPlan]] = TypeAdapter(Planned[TransformerPlan])


async def solve_transformer(request: PlanRequest) -> Planned[TransformerPlan]:
    """As `plan_transformer`, in a child process that is gone when this ends. Raises also DeadlineExceeded."""
    fields = TRANSFORMER_REQUEST.dump_python(request, mode="json")
    return TRANSFORMER_PLANNED.validate_python(await _child("transformer", fields, 0.0))


async def solve(request: GraphRequest, progress: Progress = lambda line: None) -> Planned[GraphPlan]:
    """As `plan_graph`, likewise."""
    fields = GRAPH_REQUEST.dump_python(request, mode="json")
    return GRAPH_PLANNED.validate_python(await _child("graph", fields, request.time_limit_seconds, progress))


async def solve_instance(
    path: str,
    strategy: str,
    congestion: bool,
    time_limit_seconds: float,
    progress: Progress = lambda line: None,
) -> Planned[GraphPlan]:
    """As `plan_instance`, for a placement instance in a file, likewise. Raises also BadGraph."""
    fields = {"path": path, "strategy": strategy, "congestion": congestion, "time_limit_seconds": time_limit_seconds}
    return GRAPH_PLANNED.validate_python(await _child("instance", fields, time_limit_seconds, progress))


async def _child(
    kind: Kind, fields: dict[str, Any], time_limit_seconds: float, progress: Progress = lambda line: None
) -> Any:
    def listen(line: str) -> None:
        if line.startswith(MARK):
            progress(line.removeprefix(MARK))

    seconds = _GRACE_FACTOR * time_limit_seconds + _GRACE_SECONDS
    question = json.dumps({"kind": kind, "request": fields}).encode()
    try:
        ended = await run_module("coordinator.serve.planner_child", question, seconds, listen)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning", seconds=seconds) from None
    try:
        values = json.loads(ended.output)
    except ValueError:  # it died: out of memory, most likely
        reason = f"the planner's process {ended.cause}: {' '.join(ended.last_lines)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    if "error" in values:
        raise error_from_wire(values["error"], values["details"])
    return values
