"""Strategy `doppler`: the best starts, improved in turns by simulated annealing and by CP-SAT, until the time is over. Pure.

1. Start from the list schedules, and from others that the caller knows.
2. Anneal the best of them for a short time (search.py).
3. With time for CP-SAT, find the shortest path over cut vertices where the graph has them, and solve a small graph as one
   model, as Moirai does: this proves optima.
4. Anneal and solve windows (windows.py) in turns. The one that gains more gets more of the next turn.

Doppler (arXiv 2505.23131) learns a policy that places and orders operators. Its schedules are among the starts of a caller
who has one, and its probabilities are those of the moves that annealing proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler.search import improve
from coordinator.plan.graph.latency.doppler.starts import Start, best_starts
from coordinator.plan.graph.latency.placement_search import PlacementSearch
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.solution import SearchOptions, Solution

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.windows import WindowSearch

_NUM_STARTS = 4
_FIRST_MOVES = 2000  # of each run in the first turn
_MAX_TURNS = 12  # up to 4 million moves from each start in the last one
_ELITE_RATIO = 1.05  # of makespan to the best: runs from worse schedules end
# Importing CP-SAT and building its first models take most of a shorter limit.
_MIN_SOLVER_SECONDS = 2.0
# Near cuts give a bound, and a start for graphs of thousands of operators; without small segments they give neither.
_NEAR_CUT_FRACTION, _MAX_NEAR_CUT_SHARE = 0.25, 0.25


def solve_doppler(
    problem: PlacementProblem, options: SearchOptions, starts: Sequence[Start] = ()
) -> Solution[Schedule]:
    """The best schedule found within the time limit, with a lower bound; never worse than a list schedule or a start.

    A run repeats for equal seeds unless the clock ends it. Raises ModelDoesNotFit with the missing bytes, or NoPlacement
    if the search could not decide in time whether the graph fits.
    """
    search = PlacementSearch(problem, "doppler", options.time_limit_seconds, options.clock)
    known = best_starts([*starts, *map(Start, list_schedules(problem, options.time_limit_seconds, "doppler"))])
    search.offer(known[0].schedule.assignment, known[0].schedule.order)
    annealing = Annealing(problem, known[:_NUM_STARTS], Random(options.seed), options.clock, search.deadline)
    windows = None
    if not search.is_over:
        _anneal(search, annealing, _FIRST_MOVES)
    if not search.is_over and options.time_limit_seconds >= _MIN_SOLVER_SECONDS:
        from coordinator.plan.graph.latency.windows import WindowSearch  # imports CP-SAT

        search.solve_paths(_NEAR_CUT_FRACTION, _MAX_NEAR_CUT_SHARE)
        search.solve_whole()
        annealing.include(search.incumbent)
        windows = WindowSearch(search.ticked)
    _take_turns(search, annealing, windows)
    return search.solution()


class Annealing:
    """Runs from several starts, each of which goes on from its last result."""

    def __init__(
        self,
        problem: PlacementProblem,
        starts: Sequence[Start],
        rng: Random,
        clock: Callable[[], float],
        deadline: float,
    ) -> None:
        self._problem, self._rng, self._clock, self._deadline = problem, rng, clock, deadline
        self._elites = list(starts)

    def include(self, schedule: Schedule) -> None:
        """Go on from this schedule, instead of the best elite's, if it is better; drop elites that are far behind."""
        best = min(self._elites, key=lambda each: each.makespan)
        if schedule.makespan < best.makespan:
            self._elites[self._elites.index(best)] = best._replace(schedule=schedule)
        limit = _ELITE_RATIO * min(schedule.makespan, best.makespan)
        self._elites = [each for each in self._elites if each.makespan <= limit]

    def run(self, moves: int) -> Iterator[Schedule]:
        """Yield the result of a run of so many moves from each elite, until the deadline."""
        for index, elite in enumerate(self._elites):
            if self._clock() >= self._deadline:
                return
            found = improve(
                self._problem, elite.schedule, self._rng, moves, self._clock, self._deadline, elite.probabilities
            )
            self._elites[index] = elite._replace(schedule=found)
            yield found


def _anneal(search: PlacementSearch, annealing: Annealing, moves: int) -> None:
    """One run from each elite, unless one of them proves to be optimal."""
    for found in annealing.run(moves):
        search.offer(found.assignment, found.order)
        if search.is_proven:
            return
    annealing.include(search.incumbent)


def _solve_windows(search: PlacementSearch, windows: WindowSearch, count: int) -> None:
    for _ in range(count):
        if windows.is_over or search.is_over:
            return
        better = windows.step(search.incumbent_in_ticks, search.seconds_left)
        if better is not None:
            search.offer(better.assignment, better.order)


def _take_turns(search: PlacementSearch, annealing: Annealing, windows: WindowSearch | None) -> None:
    """Anneal and solve windows in turns. In the next turn, runs that gained most get longer, and windows get more or fewer."""
    moves, num_windows = _FIRST_MOVES, 1
    for _ in range(_MAX_TURNS):
        if search.is_over:
            return
        before = search.incumbent.makespan
        _anneal(search, annealing, moves)
        between = search.incumbent.makespan
        if windows is not None:
            if windows.is_over and between < before:
                windows.restart()
            _solve_windows(search, windows, num_windows)
            annealing.include(search.incumbent)
        annealing_gain, windows_gain = before - between, between - search.incumbent.makespan
        if annealing_gain >= windows_gain:
            moves *= 2
        num_windows = 2 * num_windows if windows_gain >= annealing_gain else max(1, num_windows // 2)
