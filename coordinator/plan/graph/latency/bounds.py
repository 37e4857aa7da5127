"""What no schedule can be below: ways through the graph where every operator runs on its best device for each successor,
as if it could run anew, and at once, for each of them. Pure. Times are ticks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from coordinator.plan.graph.latency.problem import Matrix, PlacementProblem

ByDevice = list[dict[int, float]]  # by operator: device -> ticks


def earliest_ends(
    problem: PlacementProblem, pins: Mapping[int, int] | None = None, releases: Matrix | None = None
) -> ByDevice:
    """By operator and device: it cannot end there sooner. `releases[i][k]`: nor start before."""
    pins, ends = pins or {}, list[dict[int, float]]()
    for i in range(problem.num_operators):
        ends.append({})
        for k in [pins[i]] if i in pins else range(problem.num_devices):
            start = releases[i][k] if releases is not None else 0.0
            for index in problem.incoming[i]:
                flow = problem.flows[index]
                ways = (
                    end + (flow.seconds[a][k] + problem.latency[a][k] if a != k else 0.0)
                    for a, end in ends[flow.source].items()
                )
                start = max(start, min(ways))
            ends[i][k] = start + problem.seconds[i][k]
    return ends


def least_rests(
    problem: PlacementProblem, pins: Mapping[int, int] | None = None, tails: Matrix | None = None
) -> ByDevice:
    """By operator and device: after its end there, this much passes at least until everything is done."""
    pins = pins or {}
    rests: ByDevice = [{} for _ in problem.operators]
    for i in reversed(range(problem.num_operators)):
        for k in [pins[i]] if i in pins else range(problem.num_devices):
            rest = tails[i][k] if tails is not None else 0.0
            for index in problem.outgoing[i]:
                flow = problem.flows[index]
                for target in flow.targets:
                    ways = (
                        (flow.seconds[k][b] + problem.latency[k][b] if b != k else 0.0)
                        + problem.seconds[target][b]
                        + after
                        for b, after in rests[target].items()
                    )
                    rest = max(rest, min(ways))
            rests[i][k] = rest
    return rests


def relaxed_makespan(problem: PlacementProblem, pins: Mapping[int, int] | None = None) -> int:
    """The longest way, or the work of all devices together if that is more."""
    pins = pins or {}
    longest = max(min(ends.values()) for ends in earliest_ends(problem, pins))
    work = sum(row[pins[i]] if i in pins else min(row) for i, row in enumerate(problem.seconds))
    return max(round(longest), ceil(work / problem.num_devices))
