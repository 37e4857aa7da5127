"""The planner's process: one JSON object on standard input, one on standard output (see `solving`).

The strategy that it has come to goes to standard error, a line each.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.auto import plan_graph, plan_instance
from coordinator.serve.solving import MARK, PLANNED, REQUEST
from hearth.errors import HearthError


def main() -> None:
    def progress(strategy: str) -> None:
        print(f"{MARK}{strategy}", file=sys.stderr, flush=True)

    fields = json.load(sys.stdin)
    result: dict[str, Any]
    try:
        if "path" in fields:
            problem = read_instance(fields["path"], fields["congestion"])
            planned = plan_instance(problem, fields["strategy"], fields["time_limit_seconds"], time.monotonic, progress)
        else:
            planned = plan_graph(REQUEST.validate_python(fields), time.monotonic, progress)
        result = PLANNED.dump_python(planned, mode="json")
    except HearthError as error:
        result = {"error": error.code, "details": error.details()}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
