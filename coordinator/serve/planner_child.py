"""The planner's process: one JSON object on standard input, one on standard output (see `planner_process`).

The name of each strategy goes to standard error, a line each, when the search begins with it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from coordinator.serve import planner_process
from hearth.errors import HearthError


def _progress(strategy: str) -> None:
    print(f"{planner_process.MARK}{strategy}", file=sys.stderr, flush=True)


def _transformer(request: dict[str, Any]) -> Any:
    from coordinator.plan.transformer.make import plan_transformer

    planned = plan_transformer(planner_process.TRANSFORMER_REQUEST.validate_python(request))
    return planner_process.TRANSFORMER_PLANNED.dump_python(planned, mode="json")


def _graph(request: dict[str, Any]) -> Any:
    from coordinator.plan.graph.auto import plan_graph

    planned = plan_graph(planner_process.GRAPH_REQUEST.validate_python(request), time.monotonic, _progress)
    return planner_process.GRAPH_PLANNED.dump_python(planned, mode="json")


def _instance(request: dict[str, Any]) -> Any:
    from coordinator.devices.cluster_file import read_instance
    from coordinator.plan.graph.auto import plan_instance

    problem = read_instance(request["path"], request["congestion"])
    limit = request["time_limit_seconds"]
    planned = plan_instance(problem, request["strategy"], limit, time.monotonic, _progress)
    return planner_process.GRAPH_PLANNED.dump_python(planned, mode="json")


_PLANNERS = {"transformer": _transformer, "graph": _graph, "instance": _instance}


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        result = _PLANNERS[asked["kind"]](asked["request"])
    except HearthError as error:
        result = {"error": error.code, "details": error.details()}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
