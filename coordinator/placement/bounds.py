"""What no schedule can be below. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from coordinator.placement.problem import PlacementProblem


def relaxed_makespan(problem: PlacementProblem, pins: Mapping[int, int] | None = None) -> int:
    """In ticks: the longest way when every operator may run anew, and at once, for each one that takes its result.

    Or the work of all devices together, if that is more.
    """
    pins = pins or {}
    devices = range(problem.num_devices)
    ends: list[dict[int, float]] = []  # by operator and device
    for i in range(problem.num_operators):
        ends.append({})
        for k in [pins[i]] if i in pins else devices:
            start = 0.0
            for index in problem.incoming[i]:
                flow = problem.flows[index]
                start = max(
                    start,
                    min(
                        end + (flow.seconds[a][k] + problem.latency[a][k] if a != k else 0.0)
                        for a, end in ends[flow.source].items()
                    ),
                )
            ends[i][k] = start + problem.seconds[i][k]
    longest = max((min(ends[i].values()) for i in range(problem.num_operators)), default=0.0)
    work = sum(row[pins[i]] if i in pins else min(row) for i, row in enumerate(problem.seconds))
    return max(round(longest), ceil(work / problem.num_devices))
