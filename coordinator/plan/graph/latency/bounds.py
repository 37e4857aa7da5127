"""Lower bounds on the makespan: the critical path without contention, and the load of the devices. Pure. Times are ticks.

The relaxation of paths lets an operator run on a different device for each successor, and ignores that devices are serial.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem

_ROUNDING = 1e-12  # of sums of floats, as a fraction of a bound
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
                arrivals = (end + flow.seconds[a][k] + problem.latency[a][k] for a, end in ends[flow.source].items())
                start = max(start, min(arrivals))
            ends[i][k] = start + problem.seconds[i][k]
    return ends


def remaining_times(
    problem: PlacementProblem, pins: Mapping[int, int] | None = None, tails: FloatTable | None = None
) -> TicksByDevice:
    """By operator and device, a lower bound on the time from its end there to the end of the schedule."""
    pins, late = pins or {}, problem.latency
    rests: TicksByDevice = [{} for _ in problem.operators]
    for i in reversed(range(problem.num_operators)):
        for k in [pins[i]] if i in pins else range(problem.num_devices):
            rest = tails[i][k] if tails is not None else 0.0
            for index in problem.outgoing[i]:
                transfers = problem.flows[index].seconds[k]
                for target in problem.flows[index].targets:
                    times = problem.seconds[target]
                    remaining = (transfers[b] + late[k][b] + times[b] + after for b, after in rests[target].items())
                    rest = max(rest, min(remaining))
            rests[i][k] = rest
    return rests


def relaxed_makespan(problem: PlacementProblem, pins: Mapping[int, int] | None = None) -> int:
    """A lower bound on the makespan: the longest path, or the total work divided by the devices if that is more."""
    pins = pins or {}
    longest = max(min(ends.values()) for ends in earliest_ends(problem, pins))
    work = sum(row[pins[i]] if i in pins else min(row) for i, row in enumerate(problem.seconds))
    return max(round(longest), ceil(work / problem.num_devices))


def fractional_load(problem: PlacementProblem) -> int:
    """The least M for which fractions x of operators on devices exist with sum_k x_ik = 1 and sum_i p_ik x_ik <= M.

    A lower bound on the makespan that knows how unequal the devices are. Solved in its dual: weights y of the devices that sum
    to 1 give the bound sum_i min_k p_ik y_k. It is computed from the weights alone, so that the solver's tolerance only
    weakens it.
    """
    import numpy as np

    from coordinator.plan.linear import LinearProgram  # imports HiGHS, which plans after a loss do without

    n, num_devices, times = problem.num_operators, problem.num_devices, np.array(problem.seconds)
    scale = times.max() or 1.0
    program = LinearProgram(n + num_devices)  # the least weighted time of each operator, and the weights
    program.add_equal({n + k: 1.0 for k in range(num_devices)}, 1.0)
    for i, row in enumerate(times / scale):
        for k, seconds in enumerate(row):
            program.add_at_most({i: 1.0, n + k: -seconds}, 0.0)
    cost, upper = np.repeat([-1.0, 0.0], [n, num_devices]), np.ones(n + num_devices)
    weights = program.minimise(cost, upper)[n:]
    bound = float((times * weights).min(axis=1).sum() / weights.sum())
    return ceil(bound * (1 - _ROUNDING))
