"""Planning in a child process, so that a long search does not delay requests and ends with its caller.

The child runs this module; an idle one that is ready (`spare_planners`) is used instead of a fresh one. It reads one JSON
object with one or several requests from standard input, and writes a list with the answer to each to standard output. It
writes the name of each strategy to standard error, one per line, when it starts that strategy.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter

from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import PlanningResult
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.planning.spare_planners import PlannerKind, SparePlanners, start_planner
from coordinator.serve.state import GraphGoal
from hearth.errors import DeadlineExceeded, HearthError, InternalError, error_from_wire
from hearth.plan.plan import GraphPlan, Plan, TransformerPlan
from hearth.platform.child import ChildResult, run_module

# Timeout of the child: the factor times the time limits of search and learning, plus the seconds. The limits cover these
# alone, not starting the interpreter, building the problem and the heuristics. Generous: it only ends a child that hangs.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0
_BACKGROUND_NICENESS = 10  # of 19: plans made ahead get about a tenth of a processor that others want, too
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
    planned: PlanningResult[TransformerPlan] = _one(await _plan_in_child("transformer", [request], spares=spares))
    return planned


async def solve_graph(
    request: GraphRequest, report_strategy: ReportStrategy = lambda line: None, spares: SparePlanners | None = None
) -> PlanningResult[GraphPlan]:
    """`plan_graph` in a child process. `report_strategy` is called with each strategy. Also raises DeadlineExceeded."""
    planned: PlanningResult[GraphPlan] = _one(await _plan_in_child("graph", [request], report_strategy, spares))
    return planned


async def result_or_none(request: GraphRequest) -> PlanningResult[GraphPlan] | None:
    """`plan_graph` in a child with low priority; None if there is no plan.

    The child is killed if this call is cancelled. Raises DeadlineExceeded, InternalError.
    """
    (result,) = await _plan_in_child("graph", [request], in_background=True)
    return None if isinstance(result, HearthError) else result


async def solve_instance(goal: GraphGoal, report_strategy: ReportStrategy) -> PlanningResult[GraphPlan]:
    """`plan_instance` in a child process, for the placement problem in a file. Also raises DeadlineExceeded, BadGraph."""
    planned: PlanningResult[GraphPlan] = _one(await _plan_in_child("instance", [goal], report_strategy))
    return planned


async def plans_or_errors(
    kind: PlannerKind, requests: Sequence[PlanRequest | GraphRequest]
) -> list[Plan | HearthError]:
    """The plan for each request, or the error that it raised: all in one child with low priority.

    The child is killed if this call is cancelled. Raises DeadlineExceeded, InternalError.
    """
    if not requests:
        return []
    results = await _plan_in_child(kind, requests, in_background=True)
    return [result if isinstance(result, HearthError) else result.plan for result in results]


def _one(results: list[Any]) -> Any:
    """The only result. Raises it if it is an error."""
    (result,) = results
    if isinstance(result, HearthError):
        raise result
    return result


async def _plan_in_child(
    kind: _Kind,
    requests: Sequence[Any],
    report_strategy: ReportStrategy = lambda line: None,
    spares: SparePlanners | None = None,
    in_background: bool = False,
) -> list[Any]:
    """For each request the `PlanningResult`, or the HearthError that it raised."""
    request_type, result_type = _TYPES[kind]
    limits = ("time_limit_seconds", "learn_seconds")
    search_seconds = sum(getattr(request, limit, 0.0) for request in requests for limit in limits)
    seconds = _GRACE_FACTOR * search_seconds + _GRACE_SECONDS
    dumped = [request_type.dump_python(request, mode="json") for request in requests]
    task = json.dumps({"kind": kind, "in_background": in_background, "requests": dumped}).encode()
    try:
        if in_background and kind != "instance":
            child = await (await start_planner(kind)).run(task, seconds, lambda line: None)
        else:
            child = await _run_child(kind, task, seconds, report_strategy, spares)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning", seconds=seconds) from None
    try:
        replies = json.loads(child.output)
    except ValueError:  # the child died, most likely out of memory
        reason = f"the planner process {child.cause}: {' '.join(child.stderr_tail)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    return [
        error_from_wire(reply["error"], reply["details"]) if "error" in reply else result_type.validate_python(reply)
        for reply in replies
    ]


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
    """Entry point of the child: plan what the bytes of its stdin ask for, write the results or errors."""
    task = json.loads(stdin_bytes)
    if task["in_background"]:
        os.nice(_BACKGROUND_NICENESS)
    json.dump([_answer(task["kind"], request) for request in task["requests"]], sys.stdout)


def _answer(kind: _Kind, request: Any) -> Any:
    request_type, result_type = _TYPES[kind]
    try:
        return result_type.dump_python(_plan(kind, request_type.validate_python(request)), mode="json")
    except HearthError as error:
        return {"error": error.code, "details": error.details()}


def _plan(kind: _Kind, request: Any) -> Any:
    """Imports the planners late: the coordinator needs none of them, and the child only those of one kind."""

    def progress(strategy: str) -> None:
        print(f"{_STRATEGY_PREFIX}{strategy}", file=sys.stderr, flush=True)

    if kind == "transformer":
        from coordinator.plan.transformer.make import plan_transformer

        return plan_transformer(request)
    if kind == "graph":
        from coordinator.serve.planning.learnt_policies import plan_with_policy

        return plan_with_policy(request, time.monotonic, progress)
    from coordinator.devices.cluster_file import read_instance
    from coordinator.plan.graph.auto import plan_instance

    problem = read_instance(request.model_file, request.congestion)
    return plan_instance(problem, request.strategy, request.time_limit_seconds, time.monotonic, progress)


if __name__ == "__main__":
    main(sys.stdin.buffer.read())
