"""Lower bounds on the makespan: the critical path without contention. Pure. Times are ticks.

The relaxation lets an operator run on a different device for each successor, and ignores that devices are serial.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem

TicksByDevice = list[dict[int, float]]  # by operator: device -> ticks


def earliest_ends(
    problem: PlacementProblem, pins: Mapping[int, int] | None = None, releases: FloatTable | None = None
) -> TicksByDevice:
    """By operator and device, a lower bound on its end there. It starts no earlier than `releases[i][k]`, if given."""
    pins, ends = pins or {}, list[dict[int, float]]()
    for i in range(problem.num_operators):
        ends.append({})
        for k in [pins[i]] if i in pins else range(problem.num_devices):
            start = releases[i][k] if releases is not None else 0.0
            for index in problem.incoming[i]:
                flow = problem.flows[index]
                arrivals = (
                    end + (flow.seconds[a][k] + problem.latency[a][k] if a != k else 0.0)
                    for a, end in ends[flow.source].items()
                )
                start = max(start, min(arrivals))
            ends[i][k] = start + problem.seconds[i][k]
    return ends


def remaining_times(
    problem: PlacementProblem, pins: Mapping[int, int] | None = None, tails: FloatTable | None = None
) -> TicksByDevice:
    """By operator and device, a lower bound on the time from its end there to the end of the schedule."""
    pins = pins or {}
    rests: TicksByDevice = [{} for _ in problem.operators]
    for i in reversed(range(problem.num_operators)):
        for k in [pins[i]] if i in pins else range(problem.num_devices):
            rest = tails[i][k] if tails is not None else 0.0
            for index in problem.outgoing[i]:
                flow = problem.flows[index]
                for target in flow.targets:
                    remaining = (
                        (flow.seconds[k][b] + problem.latency[k][b] if b != k else 0.0)
                        + problem.seconds[target][b]
                        + after
                        for b, after in rests[target].items()
                    )
                    rest = max(rest, min(remaining))
            rests[i][k] = rest
    return rests


def relaxed_makespan(problem: PlacementProblem, pins: Mapping[int, int] | None = None) -> int:
    """A lower bound on the makespan: the longest path, or the total work divided by the devices if that is more."""
    pins = pins or {}
    longest = max(min(ends.values()) for ends in earliest_ends(problem, pins))
    work = sum(row[pins[i]] if i in pins else min(row) for i, row in enumerate(problem.seconds))
    return max(round(longest), ceil(work / problem.num_devices))
