"""The planner process: reads one JSON object with requests from stdin, and writes a list with the answer to each to stdout.

It writes the name of each strategy to stderr, one per line, when it starts that strategy. It imports what its requests need
and nothing else, since requests may wait for it: the messages of the protocol, for instance, take a third of the time in
which all of the coordinator's planning is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from hearth.errors import HearthError
from hearth.platform.confine import confine_reader

# "instance" is a placement problem in the file that a `GraphGoal` names.
PlanKind = Literal["transformer", "graph", "instance"]
STRATEGY_PREFIX = "planning: "  # prefix of a strategy's name on stderr
_MIN_MEMORY_BYTES = 1 << 30  # more than its libraries take
_BACKGROUND_NICENESS = 10  # of 19: plans made ahead get about a tenth of a processor that others want, too


@cache
def request_and_result(kind: PlanKind) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """The types of a request of this kind and of the answer to it."""
    from coordinator.plan.solution import PlanningResult
    from hearth.plan.plan import GraphPlan, TransformerPlan

    if kind == "transformer":
        from coordinator.plan.transformer.request import PlanRequest

        return TypeAdapter(PlanRequest), TypeAdapter(PlanningResult[TransformerPlan])
    if kind == "graph":
        from coordinator.plan.graph.request import GraphRequest

        return TypeAdapter(GraphRequest), TypeAdapter(PlanningResult[GraphPlan])
    from coordinator.serve.state import GraphGoal

    return TypeAdapter(GraphGoal), TypeAdapter(PlanningResult[GraphPlan])


def main(stdin_bytes: bytes) -> None:
    """Entry point: plan what the bytes of stdin ask for, write the results or errors."""
    task = json.loads(stdin_bytes)
    if task["in_background"]:
        os.nice(_BACKGROUND_NICENESS)
    _confine(task["requests"])
    json.dump([_answer(task["kind"], request) for request in task["requests"]], sys.stdout)


def _confine(requests: list[dict[str, Any]]) -> None:
    """Leave this process the files that its requests name, and half of this computer's memory."""
    policies = [Path(each["policies_dir"]) for each in requests if each.get("policies_dir")]
    for folder in policies:
        with suppress(OSError):  # the plan notes that nothing can be kept
            folder.mkdir(parents=True, exist_ok=True)
    instances = [Path(each["model_file"]).parent for each in requests if "model_file" in each]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    confine_reader(instances, policies, max(_MIN_MEMORY_BYTES, memory_bytes // 2))


def _answer(kind: PlanKind, request: Any) -> Any:
    request_type, result_type = request_and_result(kind)
    try:
        return result_type.dump_python(_plan(kind, request_type.validate_python(request)), mode="json")
    except HearthError as error:
        return {"error": error.code, "details": error.details()}


def _plan(kind: PlanKind, request: Any) -> Any:
    def progress(strategy: str) -> None:
        print(f"{STRATEGY_PREFIX}{strategy}", file=sys.stderr, flush=True)

    if kind == "transformer":
        from coordinator.plan.transformer.choose import plan_transformer

        return plan_transformer(request)
    if kind == "graph":
        from coordinator.serve.planners.policies import plan_with_policy

        return plan_with_policy(request, time.monotonic, progress)
    from coordinator.devices.cluster_file import read_instance
    from coordinator.plan.graph.auto import plan_instance

    problem = read_instance(request.model_file, request.congestion)
    return plan_instance(problem, request.strategy, request.time_limit_seconds, time.monotonic, progress)


if __name__ == "__main__":
    main(sys.stdin.buffer.read())
