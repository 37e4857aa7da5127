"""The planner's process: one JSON object on standard input, one on standard output (see `planner_process`).

The name of each strategy goes to standard error, a line each, when the search begins with it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from coordinator.serve import planner_process
from hearth.errors import HearthError


def _progress(strategy: str) -> None:
    print(f"{planner_process.MARK}{strategy}", file=sys.stderr, flush=True)


def _plan(kind: planner_process.Kind, request: Any) -> Any:
    """The planners are imported late, so that only those of one kind are."""
    if kind == "transformer":
        from coordinator.plan.transformer.make import plan_transformer

        return plan_transformer(request)
    from coordinator.plan.graph.auto import plan_graph, plan_instance

    if kind == "graph":
        return plan_graph(request, time.monotonic, _progress)
    from coordinator.devices.cluster_file import read_instance

    problem = read_instance(Path(request.model_file), request.congestion)
    return plan_instance(problem, request.strategy, request.time_limit_seconds, time.monotonic, _progress)


def main() -> None:
    asked = json.load(sys.stdin)
    takes, gives = planner_process.TYPES[asked["kind"]]
    try:
        planned = _plan(asked["kind"], takes.validate_python(asked["request"]))
        result = gives.dump_python(planned, mode="json")
    except HearthError as error:
        result = {"error": error.code, "details": error.details()}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
