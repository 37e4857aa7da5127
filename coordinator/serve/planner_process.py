"""Planning in a child process, so that a long search does not delay requests and ends with its caller.

The child runs this module. It reads one JSON object from standard input and writes one to standard output. It writes the
name of each strategy to standard error, one per line, when it starts that strategy.
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
from coordinator.serve.state import GraphGoal
from hearth.errors import DeadlineExceeded, HearthError, InternalError, error_from_wire
from hearth.plan.plan import GraphPlan, TransformerPlan
from hearth.platform.child import run_module

# Timeout of the child: the factor times the time limit of the search, plus the seconds. The limit covers the search
# alone, not starting the interpreter, building the problem and the heuristics.
_GRACE_SECONDS = 300.0
_GRACE_FACTOR = 3.0
_MARK = "planning: "  # prefix of a strategy's name on the child's standard error
Progress = Callable[[str], None]
_Kind = Literal["transformer", "graph", "instance"]
# Types of request and answer. "instance" is a placement problem in the file that the goal names.
_TYPES: dict[_Kind, tuple[TypeAdapter[Any], TypeAdapter[Any]]] = {
    "transformer": (TypeAdapter(PlanRequest), TypeAdapter(PlanningResult[TransformerPlan])),
    "graph": (TypeAdapter(GraphRequest), TypeAdapter(PlanningResult[GraphPlan])),
    "instance": (TypeAdapter(GraphGoal), TypeAdapter(PlanningResult[GraphPlan])),
}


async def solve_transformer(request: PlanRequest) -> PlanningResult[TransformerPlan]:
    """`plan_transformer` in a child process, which is killed if this call is cancelled. Also raises DeadlineExceeded."""
    planned: PlanningResult[TransformerPlan] = await _ask("transformer", request, 0.0)
    return planned


async def solve(request: GraphRequest, progress: Progress = lambda line: None) -> PlanningResult[GraphPlan]:
    """`plan_graph` in a child process. `progress` is called with each strategy. Also raises DeadlineExceeded."""
    planned: PlanningResult[GraphPlan] = await _ask("graph", request, request.time_limit_seconds, progress)
    return planned


async def solve_instance(goal: GraphGoal, progress: Progress) -> PlanningResult[GraphPlan]:
    """`plan_instance` in a child process, for the placement problem in a file. Also raises DeadlineExceeded, BadGraph."""
    planned: PlanningResult[GraphPlan] = await _ask("instance", goal, goal.time_limit_seconds, progress)
    return planned


async def _ask(kind: _Kind, request: Any, time_limit_seconds: float, progress: Progress = lambda line: None) -> Any:
    def on_stderr_line(line: str) -> None:
        if line.startswith(_MARK):
            progress(line.removeprefix(_MARK))

    takes, gives = _TYPES[kind]
    seconds = _GRACE_FACTOR * time_limit_seconds + _GRACE_SECONDS
    question = json.dumps({"kind": kind, "request": takes.dump_python(request, mode="json")}).encode()
    try:
        ended = await run_module(__name__, question, seconds, on_stderr_line)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action="planning", seconds=seconds) from None
    try:
        values = json.loads(ended.output)
    except ValueError:  # the child died, most likely out of memory
        reason = f"the planner process {ended.cause}: {' '.join(ended.stderr_tail)}"
        raise InternalError(where="the coordinator", reason=reason[:1000]) from None
    if "error" in values:
        raise error_from_wire(values["error"], values["details"])
    return gives.validate_python(values)


# ---- the child ------------------------------------------------------------------------------------------------------


def main() -> None:
    asked = json.load(sys.stdin)
    takes, gives = _TYPES[asked["kind"]]
    try:
        planned = _plan(asked["kind"], takes.validate_python(asked["request"]))
        result = gives.dump_python(planned, mode="json")
    except HearthError as error:
        result = {"error": error.code, "details": error.details()}
    json.dump(result, sys.stdout)


def _plan(kind: _Kind, request: Any) -> Any:
    """Imports the planners late: the coordinator needs none of them, and the child only those of one kind."""

    def progress(strategy: str) -> None:
        print(f"{_MARK}{strategy}", file=sys.stderr, flush=True)

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
    main()
