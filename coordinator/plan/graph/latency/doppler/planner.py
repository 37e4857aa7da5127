"""Strategy `doppler`: the list schedules, improved by simulated annealing until the time is over. Pure.

Doppler (arXiv 2505.23131) learns a policy that places and orders operators; that policy is not part of this planner yet.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.bounds import relaxed_makespan
from coordinator.plan.graph.latency.cpsat import in_ticks
from coordinator.plan.graph.latency.doppler.search import improve
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.solution import SearchOptions, Solution

_NUM_STARTS = 4
_FIRST_MOVES = 2000  # of each run in the first round
_MORE_MOVES = 2  # times as many in each further round: short runs find most, long ones cool down more slowly
_MAX_ROUNDS = 12  # 16 million moves from each start


def solve_doppler(problem: PlacementProblem, options: SearchOptions) -> Solution[Schedule]:
    """The best schedule found within the time limit, with a lower bound; never worse than any list schedule.

    A run repeats for equal seeds unless the clock ends it. Raises ModelDoesNotFit with the missing bytes, or NoPlacement
    if the search could not decide in time whether the graph fits.
    """
    began = options.clock()
    deadline = began + options.time_limit_seconds
    ticked, ticks_per_unit = in_ticks(problem)
    bound_ticks = relaxed_makespan(ticked)

    def is_proven(found: Schedule) -> bool:
        return round(best_schedule(ticked, found.assignment, found.order).makespan) <= bound_ticks

    schedules = best_starts(problem, options.time_limit_seconds)
    best = search(problem, schedules[:_NUM_STARTS], Random(options.seed), options.clock, deadline, is_proven)
    return Solution(
        best,
        best.makespan,
        bound=min(bound_ticks / ticks_per_unit, best.makespan),
        proven=is_proven(best),
        seconds=options.clock() - began,
    )


def best_starts(problem: PlacementProblem, seconds: float = 0.0) -> list[Schedule]:
    """The list schedules with different assignments, by increasing makespan. Raises as `list_schedules`."""
    found = sorted(list_schedules(problem, seconds, "doppler"), key=lambda each: each.makespan)
    return list({each.assignment: each for each in reversed(found)}.values())[::-1]


def search(
    problem: PlacementProblem,
    schedules: list[Schedule],
    rng: Random,
    clock: Callable[[], float],
    deadline: float,
    is_proven: Callable[[Schedule], bool],
    num_rounds: int = _MAX_ROUNDS,
) -> Schedule:
    """Improve each schedule once in each round, from its last result on; end at the deadline or at a proven optimum."""
    elites = list(schedules)
    best = elites[0]
    if is_proven(best):
        return best
    for number in range(num_rounds):
        for index, start in enumerate(elites):
            if clock() >= deadline:
                return best
            moves = _FIRST_MOVES * _MORE_MOVES**number
            elites[index] = improve(problem, start, rng, moves, clock, deadline)
            if elites[index].makespan < best.makespan:
                best = elites[index]
                if is_proven(best):
                    return best
    return best
