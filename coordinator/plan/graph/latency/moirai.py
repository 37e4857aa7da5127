"""Moirai (arXiv 2312.04025): place an operator graph for the shortest latency, within a time limit.

1. Run every baseline, and HEFT with contention, so that the result is never worse than one of them.
2. Find the shortest path over the segments between cut vertices, which is optimal where memory does not bind
   (decomposition.py, paths.py). Where segments stay large, near cuts give a bound and an initial placement; list
   scheduling (contention.py) adds the operators that they leave out. Repeated blocks are solved once (patterns.py).
3. Solve small graphs as one model (cpsat.py); improve large ones window by window (windows.py).

The search works in whole ticks; the simulator prices the results with the exact times. Pure: `clock` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.bounds import relaxed_makespan
from coordinator.plan.graph.latency.contention import contended_heft
from coordinator.plan.graph.latency.cpsat import SolverLimits, in_ticks, solve_placement_model
from coordinator.plan.graph.latency.decomposition import (
    JoinedSchedule,
    Reachability,
    cut_segments,
    exact_cuts,
    join_schedules,
    near_cuts,
)
from coordinator.plan.graph.latency.heft import heft
from coordinator.plan.graph.latency.list_scheduling import ranks_from_schedule
from coordinator.plan.graph.latency.paths import shortest_paths
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, best_schedule
from coordinator.plan.graph.latency.windows import improve
from coordinator.plan.solution import Solution
from hearth.errors import NoPlacement

# The model has a variable for each edge and pair of devices: small enough for proofs, large enough for a network's blocks.
_MAX_SEGMENT_OPERATORS = 60  # larger segments are cut at near cuts
_MAX_WHOLE_OPERATORS = 60  # larger graphs are not solved as one model
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
    search = _PlacementSearch(problem, time_limit_seconds, clock, num_workers)
    search.run()
    return search.solution()


class _PlacementSearch:
    def __init__(
        self, problem: PlacementProblem, time_limit_seconds: float, clock: Callable[[], float], num_workers: int
    ) -> None:
        self._problem = problem
        self._ticked, self._ticks_per_unit = in_ticks(problem)
        self._clock, self._began = clock, clock()
        self._deadline = self._began + time_limit_seconds
        self._num_workers = num_workers
        self._bound_ticks = relaxed_makespan(self._ticked)
        self._best: Schedule | None = None  # the best schedule with exact times
        self._best_ticked: Schedule | None = None  # the best schedule in ticks

    def run(self) -> None:
        for found in list_schedules(self._problem, self._seconds_left, "moirai"):
            self._offer(found.assignment, found.order)
        self._complete_and_offer(JoinedSchedule({}, {}, [], 0.0))
        if self._is_done():
            return
        reachability = Reachability(self._ticked)
        cuts = exact_cuts(self._ticked, reachability)
        segments, time_fraction = cut_segments(self._ticked, cuts, reachability), 1.0
        if max(len(segment.operators) for segment in segments) > _MAX_SEGMENT_OPERATORS:
            cuts = near_cuts(self._ticked, reachability, cuts, _MAX_SEGMENT_OPERATORS)
            segments, time_fraction = cut_segments(self._ticked, cuts, reachability), _PATH_TIME_FRACTION
        deadline = self._clock() + time_fraction * self._seconds_left
        for path in shortest_paths(self._ticked, segments, self._clock, deadline, self._num_workers):
            self._bound_ticks = max(self._bound_ticks, path.lower)
            self._complete_and_offer(join_schedules(segments, path.schedules))
        if (
            self._best_ticked is not None
            and self._problem.num_operators <= _MAX_WHOLE_OPERATORS
            and not self._is_done()
        ):
            self._solve_whole(self._best_ticked)
        if self._best_ticked is not None and not self._is_done():
            for better in improve(self._ticked, self._best_ticked, self._clock, self._deadline, self._num_workers):
                self._offer(better.assignment, better.order)
                if self._is_done():
                    break

    def solution(self) -> Solution[Schedule]:
        assert self._best is not None  # or `run` has raised
        return Solution(
            self._best,
            self._best.makespan,
            bound=min(self._bound_ticks / self._ticks_per_unit, self._best.makespan),
            proven=self._is_done(),
            seconds=self._clock() - self._began,
        )

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - self._clock())

    def _is_done(self) -> bool:
        return self._best_ticked is not None and round(self._best_ticked.makespan) <= self._bound_ticks

    def _offer(self, assignment: Sequence[int], order: Iterable[Item]) -> None:
        if self._problem.overflow_bytes(assignment) > 0:
            return
        items = list(order)
        for problem, name in ((self._problem, "_best"), (self._ticked, "_best_ticked")):
            found, known = best_schedule(problem, assignment, items), getattr(self, name)
            if known is None or found.makespan < known.makespan:
                setattr(self, name, found)

    def _run_and_offer(self, strategy: Callable[[], Schedule]) -> None:
        try:
            found = strategy()
        except NoPlacement:
            return
        self._offer(found.assignment, found.order)

    def _complete_and_offer(self, part: JoinedSchedule) -> None:
        """Extend a partial schedule: list scheduling places the other operators. Offer the results."""
        n, problem = self._problem.num_operators, self._ticked
        if len(part.assignment) == n:
            self._offer([part.assignment[i] for i in range(n)], part.order)
            return
        ranks = ranks_from_schedule(problem, part.starts, part.makespan)
        self._run_and_offer(partial(heft, problem, part.assignment))
        self._run_and_offer(partial(contended_heft, problem, part.assignment))
        self._run_and_offer(partial(contended_heft, problem, part.assignment, ranks))

    def _solve_whole(self, known: Schedule) -> None:
        limits = SolverLimits(self._seconds_left, num_workers=self._num_workers)
        result = solve_placement_model(self._ticked, limits, round(known.makespan), hint=known)
        if result.schedule is not None:
            self._offer(result.schedule.assignment, result.schedule.order)
        self._bound_ticks = max(self._bound_ticks, result.bound)
