"""Moirai (arXiv 2312.04025): place an operator graph for the shortest latency, within a time limit.

1. Run every baseline, and HEFT with contention, so that the result is never worse than one of them.
2. Find the shortest path over the segments between cut vertices, which is optimal where memory does not bind
   (decomposition.py, paths.py). Where segments stay large, near cuts give a bound and an initial placement; list
   scheduling (contention.py) adds the operators that they leave out. Repeated blocks are solved once (patterns.py).
3. Solve small graphs as one model (cpsat.py); improve large ones window by window (windows.py).

Pure: `clock` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.plan.graph.latency.placement_search import PlacementSearch
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.graph.latency.windows import WindowSearch
from coordinator.plan.solution import Solution

# Of the remaining time, for the shortest path where it is only a bound: the other half is for improving the schedule.
_PATH_TIME_FRACTION = 0.5


def solve_moirai(
    problem: PlacementProblem, time_limit_seconds: float, clock: Callable[[], float], num_workers: int = 1
) -> Solution[Schedule]:
    """The best placement found within the time limit, with a lower bound.

    `num_workers` threads search; with one thread, results repeat exactly unless the clock ends the search. Proofs hold
    to the precision of a tick (`in_ticks`). Raises ModelDoesNotFit with the missing bytes, or NoPlacement if the search
    could not decide in time whether the graph fits.
    """
    search = PlacementSearch(problem, "moirai", time_limit_seconds, clock, num_workers)
    search.run_lists()
    search.run_contended_heft()
    if not search.is_proven:
        search.solve_paths(_PATH_TIME_FRACTION)
    search.solve_whole()
    windows = WindowSearch(search.ticked, num_workers)
    while not windows.is_over and not search.is_over:
        better = windows.step(search.incumbent_in_ticks, search.seconds_left)
        if better is not None:
            search.offer(better.assignment, better.order)
    return search.solution()
