"""Strategy `doppler`: the best starts, improved in turns by simulated annealing and by CP-SAT, until the time is over. Pure.

1. Start from the list schedules, and from others that the caller knows.
2. Anneal from the best of them for a short time (search.py); without time for more, from the best one until the end.
3. With time for CP-SAT, find the shortest path over cut vertices where the graph has them, and solve a small graph as one
   model, as Moirai does: this proves optima. With more time, and where annealing gained little on the best start, solve
   windows (windows.py) of that start.
4. Anneal, from the starts again and from the best schedule, and solve windows in turns. The one that gains more gets more of
   the next turn.

Doppler (arXiv 2505.23131) learns a policy that places and orders operators. Its schedules are among the starts of a caller
who has one, and its probabilities are those of the moves that annealing proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING

from coordinator.plan.graph.latency.annealing import improve
from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler.starts import Start, best_starts
from coordinator.plan.graph.latency.placement_search import PlacementSearch
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.solution import SearchOptions, Solution

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.windows import WindowSearch

_NUM_STARTS = 4
_FIRST_MOVES = 2000  # of each run in the first turn
# Operators for each window of the first turn: in large graphs a move takes longer, and windows gain more.
_OPERATORS_PER_WINDOW = 128
_MAX_TURNS = 12  # up to 4 million moves from each start in the last one
# At the first move of a run, as fractions of the makespan of its start. From 0.01, 230,000 moves on the Llama block (gigabit)
# end 3 % higher. A run from a schedule that is good already loses it when it is hot.
_EXPLORING_TEMPERATURE, _REFINING_TEMPERATURE = 0.003, 0.001
# A search without time for CP-SAT has time for one run to cool down, and not for several. In 0.5 s, over all losses of a
# device of 12 tiled graphs, it ends 2.2 to 2.9 % behind a search of 10 s on average (five runs on a busy machine), with four
# starts and short runs 3.0 %.
_SHORT_NUM_STARTS, _SHORT_MOVES, _SHORT_TEMPERATURE = 1, 32_000, 0.006
_MAX_BEHIND = 1.05  # times the best makespan: starts that end later, or whose runs do, are dropped
# Windows gain more on the best start than on what annealing makes of it: 30 s on the Llama block (gigabit) end 1.5 % lower
# with them (mean of two seeds). In 5 s they cost up to 2.5 % with unequal devices or tight memory.
_MIN_START_WINDOWS_SECONDS = 30.0
# Of the remaining time: while they have the best schedule, as much as Moirai gives them after its near cuts; and while not.
_LEADING_FRACTION, _BEHIND_FRACTION = 0.5, 0.25
# Importing CP-SAT and building its first models take most of a shorter limit.
_MIN_SOLVER_SECONDS = 2.0
# Near cuts give a bound, and a start for graphs of thousands of operators; without small segments they give neither.
_NEAR_CUT_FRACTION, _MAX_NEAR_CUT_SHARE = 0.25, 0.25


def solve_doppler(
    problem: PlacementProblem,
    options: SearchOptions,
    starts: Sequence[Start] = (),
    sample: Callable[[Schedule], Sequence[Start]] | None = None,
) -> Solution[Schedule]:
    """The best schedule found within the time limit, with a lower bound; never worse than a list schedule or a start.

    `sample` returns further starts, given the best one. It is called once, within the time limit.
    A run repeats for equal seeds unless the clock ends it. Raises ModelDoesNotFit with the missing bytes, or NoPlacement
    if the search could not decide in time whether the graph fits.
    """
    search = PlacementSearch(problem, "doppler", options.time_limit_seconds, options.clock)
    is_short = is_short_search(options)
    lists = list_schedules(problem, options.time_limit_seconds, "doppler", is_short)
    known = best_starts([*starts, *map(Start, lists)])
    if sample is not None:
        known = best_starts([*known, *sample(known[0].schedule)])
    search.offer(known[0].schedule.assignment, known[0].schedule.order)
    num_starts, moves, temperature = _NUM_STARTS, _FIRST_MOVES, _EXPLORING_TEMPERATURE
    if is_short:
        num_starts, moves, temperature = _SHORT_NUM_STARTS, _SHORT_MOVES, _SHORT_TEMPERATURE
    annealing = Annealing(
        problem, known[:num_starts], Random(options.seed), options.clock, search.deadline, temperature
    )
    windows = None
    if not search.is_over:
        _anneal(search, annealing, moves)
    if not search.is_over and not is_short:
        from coordinator.plan.graph.latency.windows import WindowSearch  # imports CP-SAT

        search.solve_paths(_NEAR_CUT_FRACTION, _MAX_NEAR_CUT_SHARE)
        search.solve_whole()
        windows = WindowSearch(search.ticked)
        has_time = options.time_limit_seconds >= _MIN_START_WINDOWS_SECONDS
        if has_time and known[0].makespan <= _MAX_BEHIND * search.incumbent.makespan:
            _solve_windows_of_start(search, windows, known[0].schedule)
    _take_turns(search, annealing, windows, moves)
    return search.solution()


def is_short_search(options: SearchOptions) -> bool:
    """Whether the time is too short for CP-SAT and several runs: requests wait for such a plan."""
    return options.time_limit_seconds < _MIN_SOLVER_SECONDS


class Annealing:
    """Runs of simulated annealing from several starts, and from the best schedule known."""

    def __init__(
        self,
        problem: PlacementProblem,
        starts: Sequence[Start],
        rng: Random,
        clock: Callable[[], float],
        deadline: float,
        exploring_temperature: float = _EXPLORING_TEMPERATURE,
    ) -> None:
        self._problem, self._rng, self._clock, self._deadline = problem, rng, clock, deadline
        self._exploring_temperature = exploring_temperature
        self._starts = list(starts)

    def explore(self, moves: int, best: float) -> Iterator[Schedule]:
        """Yield the result of a run of `moves` moves from each start, until the deadline. Drop starts far behind `best`.

        Every run begins at its start, not at an earlier result: what cooled down fast is a trap for a longer run.
        """
        found: list[Schedule] = []
        for index, start in enumerate(self._starts):
            if self._clock() >= self._deadline:
                return
            num_left = len(self._starts) - index + 1  # with one that refines
            found.append(self._run(start, moves, self._exploring_temperature, 1.0 / num_left))
            yield found[-1]
        limit = _MAX_BEHIND * min([best, *(each.makespan for each in found)])
        self._starts = [start for start, each in zip(self._starts, found, strict=True) if each.makespan <= limit]

    def refine(self, schedule: Schedule, moves: int) -> Schedule:
        """The result of a run of `moves` moves from this schedule."""
        return self._run(Start(schedule), moves, _REFINING_TEMPERATURE, 1.0)

    def _run(self, start: Start, moves: int, temperature: float, time_share: float) -> Schedule:
        now = self._clock()
        deadline = now + time_share * (self._deadline - now)
        return improve(
            self._problem, start.schedule, self._rng, moves, self._clock, deadline, start.probabilities, temperature
        )


def _anneal(search: PlacementSearch, annealing: Annealing, moves: int) -> None:
    """One run from each start, and one from the best schedule, unless one of them proves to be optimal."""
    for found in annealing.explore(moves, search.incumbent.makespan):
        search.offer(found.assignment, found.order)
        if search.is_proven:
            return
    refined = annealing.refine(search.incumbent, moves)
    search.offer(refined.assignment, refined.order)


def _solve_windows_of_start(search: PlacementSearch, windows: WindowSearch, start: Schedule) -> None:
    """Solve windows of this schedule; for longer if its makespan gets below that of the best one."""
    seconds = search.seconds_left
    known = best_schedule(search.ticked, start.assignment, start.order)
    while not windows.is_over and not search.is_over:
        is_leading = known.makespan <= search.incumbent_in_ticks.makespan
        seconds_after = (1.0 - (_LEADING_FRACTION if is_leading else _BEHIND_FRACTION)) * seconds
        if search.seconds_left <= seconds_after:
            return
        better = windows.step(known, search.seconds_left - seconds_after)
        if better is not None:
            known = better
            search.offer(known.assignment, known.order)
    windows.restart()


def _solve_windows(search: PlacementSearch, windows: WindowSearch, count: int) -> None:
    for _ in range(count):
        if windows.is_over or search.is_over:
            return
        better = windows.step(search.incumbent_in_ticks, search.seconds_left)
        if better is not None:
            search.offer(better.assignment, better.order)


def _take_turns(search: PlacementSearch, annealing: Annealing, windows: WindowSearch | None, moves: int) -> None:
    """Anneal and solve windows in turns. In the next turn, runs that gained most get longer, and windows get more or fewer."""
    num_windows = max(1, search.problem.num_operators // _OPERATORS_PER_WINDOW)
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
        annealing_gain, windows_gain = before - between, between - search.incumbent.makespan
        if annealing_gain >= windows_gain:
            moves *= 2
        num_windows = 2 * num_windows if windows_gain >= annealing_gain else max(1, num_windows // 2)
