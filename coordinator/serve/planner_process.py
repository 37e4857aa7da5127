"""Planning in a child process, so that a long search does not delay requests and ends with its caller.

The child runs this module; an idle one that is ready (`spare_planners`) is used instead of a fresh one. It reads one JSON
object from standard input and writes one to standard output. It writes the name of each strategy to standard error, one per
line, when it starts that strategy.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import TypeAdapter

from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import PlanningResult
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.spare_planners import PlannerKind, SparePlanners
from coordinator.serve.state import GraphGoal
from hearth.errors import DeadlineExceeded, HearthError, InternalError, error_from_wire
from hearth.plan.plan import GraphPlan, TransformerPlan
from hearth.platform.child import ChildResult, run_module

# Timeout of the child: the factor times the time limit of the search, plus the seconds. The limit covers the search
# alone, not starting the interpreter, building the problem and the heuristics. Generous: it only ends a child that hangs.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0
_STRATEGY_PREFIX = "planning: "  # prefix of a strategy's name on the child's standard error
ReportStrategy = Callable[[str], None]
_Kind = PlannerKind | Literal["instance"]
# Types of request and answer. "instance" is a placement problem in the file that the goal names.
_TYPES: dict[_Kind, tuple[TypeAdapter[Any], TypeAdapter[Any]]] = {
    "transformer": (TypeAdapter(PlanRequest), TypeAdapter(PlanningResult[TransformerPlan])),
    "graph": (TypeAdapter(GraphRequest), TypeAdapter(PlanningResult[GraphPlan])),
    "instance": (TypeAdapter(GraphGoal), TypeAdapter(PlanningResult[GraphPlan])),
}


async def solve_transformer(
    request: PlanRequest, spares: SparePlanners | None = None
) -> PlanningResult[TransformerPlan]:
    """`plan_transformer` in a child process, which is killed if this call is cancelled. Also raises DeadlineExceeded."""
    planned: PlanningResult[TransformerPlan] = await _plan_in_child("transformer", request, 0.0, spares=spares)
    return planned


async def solve_graph(
    request: GraphRequest, report_strategy: ReportStrategy = lambda line: None, spares: SparePlanners | None = None
) -> PlanningResult[GraphPlan]:
    """`plan_graph` in a child process. `report_strategy` is called with each strategy. Also raises DeadlineExceeded."""
    planned: PlanningResult[GraphPlan] = await _plan_in_child(
        "graph", request, request.time_limit_seconds, report_strategy, spares
    )
    return planned


async def solve_instance(goal: GraphGoal, report_strategy: ReportStrategy) -> PlanningResult[GraphPlan]:
    """`plan_instance` in a child process, for the placement problem in a file. Also raises DeadlineExceeded, BadGraph."""
    planned: PlanningResult[GraphPlan] = await _plan_in_child(
        "instance", goal, goal.time_limit_seconds, report_strategy
    )
    return planned


async def _plan_in_child(
    kind: _Kind,
    request: Any,
    time_limit_seconds: float,
    report_strategy: ReportStrategy = lambda line: None,
    spares: SparePlanners | None = None,
) -> Any:
    request_type, result_type = _TYPES[kind]
    seconds = _GRACE_FACTOR * time_limit_seconds + _GRACE_SECONDS
    task = json.dumps({"kind": kind, "request": request_type.dump_python(request, mode="json")}).encode()
    try:
        child = await _run_child(kind, task, seconds, report_strategy, spares)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning", seconds=seconds) from None
    try:
        reply = json.loads(child.output)
    except ValueError:  # the child died, most likely out of memory
        reason = f"the planner process {child.cause}: {' '.join(child.stderr_tail)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    if "error" in reply:
        raise error_from_wire(reply["error"], reply["details"])
    return result_type.validate_python(reply)


async def _run_child(
    kind: _Kind, task: bytes, seconds: float, report_strategy: ReportStrategy, spares: SparePlanners | None
) -> ChildResult:
    """Run the task in the idle process of this kind, or in a fresh one. Raises asyncio.TimeoutError."""

    def on_stderr_line(line: str) -> None:
        if line.startswith(_STRATEGY_PREFIX):
            report_strategy(line.removeprefix(_STRATEGY_PREFIX))

    if spares is None or kind == "instance":
        return await run_module(__name__, task, seconds, on_stderr_line)
    try:
        spare = spares.take(kind)
        if spare is not None and (ended := await spare.run(task, seconds, on_stderr_line)).output:
            return ended  # one without an answer had died while it was idle
        return await run_module(__name__, task, seconds, on_stderr_line)
    finally:
        spares.replace(kind)


# ---- the child ------------------------------------------------------------------------------------------------------


def main(stdin_bytes: bytes) -> None:
    """Entry point of the child: plan what the bytes of its stdin ask for, write the result or the error."""
    task = json.loads(stdin_bytes)
    request_type, result_type = _TYPES[task["kind"]]
    try:
        planned = _plan(task["kind"], request_type.validate_python(task["request"]))
        result = result_type.dump_python(planned, mode="json")
    except HearthError as error:
        result = {"error": error.code, "details": error.details()}
    json.dump(result, sys.stdout)


def _plan(kind: _Kind, request: Any) -> Any:
    """Imports the planners late: the coordinator needs none of them, and the child only those of one kind."""

    def progress(strategy: str) -> None:
        print(f"{_STRATEGY_PREFIX}{strategy}", file=sys.stderr, flush=True)

    if kind == "transformer":
        from coordinator.plan.transformer.make import plan_transformer

        return plan_transformer(request)
    from coordinator.plan.graph.auto import plan_graph, plan_instance

    if kind == "graph":
        return plan_graph(request, time.monotonic, progress)
    from coordinator.devices.cluster_file import read_instance

    problem = read_instance(request.model_file, request.congestion)
    return plan_instance(problem, request.strategy, request.time_limit_seconds, time.monotonic, progress)


if __name__ == "__main__":
    main(sys.stdin.buffer.read())
