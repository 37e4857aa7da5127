"""Search for the placement with the shortest makespan: strategies `moirai` and `doppler`. Pure.

1. Start from the list schedules, HEFT's first, and from others that the caller knows.
2. Find the shortest path over the segments between cut vertices, which is optimal where memory does not bind
   (decomposition.py, paths.py). Where segments stay large, near cuts give a bound and an initial placement; list
   scheduling adds the operators that they leave out.
3. Solve small graphs as one model (cpsat.py).
4. In turns: anneal from the best starts and from the best schedule (annealing.py), and solve windows of the best schedule
   (windows.py). In the next turn, runs have twice as many moves, and starts that led to much longer schedules are left out.

`moirai` (arXiv 2312.04025) is the search without annealing, `doppler` (arXiv 2505.23131) with. Doppler learns a policy that
places and orders operators; its schedules are among the starts of a caller who has one, and its probabilities are those of the
moves that annealing proposes. The search ends at its time limit, or when its bound proves the best schedule to be optimal. It
works in whole ticks; the simulator prices results with the exact times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from coordinator.plan.graph.latency.annealing import improve
from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.bounds import fractional_load, relaxed_makespan
from coordinator.plan.graph.latency.decomposition import (
    CutSegment,
    JoinedSchedule,
    Reachability,
    cut_segments,
    exact_cuts,
    join_schedules,
    near_cuts,
)
from coordinator.plan.graph.latency.list_scheduling import contended_heft, heft, ranks_from_schedule
from coordinator.plan.graph.latency.problem import PlacementProblem, in_ticks
from coordinator.plan.graph.latency.schedule import Item, Schedule, best_schedule
from coordinator.plan.solution import IDLE_SHARE, SearchOptions, Solution
from hearth.errors import NoPlacement

if TYPE_CHECKING:
    from coordinator.plan.graph.latency.windows import WindowSearch

# Of the time of `doppler`. On tiled graphs with slow links annealing gains several times as much as windows; these get enough
# to sweep a graph of 200 operators once in 10 seconds.
_ANNEALING_SHARE = 0.85
_FIRST_MOVES = 2000  # of each run in the first turn: all runs of that turn take a second with 200 operators
_MAX_BEHIND = 1.05  # times the best makespan of a turn: starts that led to longer ones take part in no further turn
# Operators of a graph that is solved as one model, and of a segment that is not cut at near cuts. A model has a variable for
# each edge and pair of devices; up to this size, a proof takes minutes at most.
_MAX_MODEL_OPERATORS = 60

# After this share of the time no further list is tried: a list of 3,000 operators takes a second, and what follows improves the
# best one by more.
_LISTS_SHARE = 0.25
_NUM_STARTS = 4  # in the first turn
_UNLIMITED = 1 << 62  # moves of a run, which ends by the clock
_PRICES_OF_A_STEP = 3.0  # in those of an offer: its result is priced, and so is the plan that is made of it in the end
_MIN_SOLVER_SECONDS = 2.0  # importing CP-SAT and building its first models take most of a shorter limit


class Start(NamedTuple):
    """A schedule within memory, and the probability [n][K] with which moves propose each device (default: uniform)."""

    schedule: Schedule
    probabilities: Sequence[Sequence[float]] | None = None

    @property
    def makespan(self) -> float:
        return self.schedule.makespan


def best_starts(starts: Iterable[Start]) -> list[Start]:
    """Those with different assignments, by increasing makespan; the first of equal ones."""
    found: dict[tuple[int, ...], Start] = {}
    for each in sorted(starts, key=lambda each: each.makespan):
        found.setdefault(each.schedule.assignment, each)
    return list(found.values())


def repaired(problem: PlacementProblem, devices: Mapping[int, int]) -> list[Start]:
    """A plan of which some devices are gone: operators without a device go where HEFT with contention ends them first."""
    try:
        return [Start(contended_heft(problem, devices))]
    except NoPlacement:
        return []


def without_idle_devices(problem: PlacementProblem, schedule: Schedule) -> Schedule:
    """The schedule without devices that have less than 1 % of the work, where that makes it no longer."""
    work = [min(row) for row in problem.seconds]
    for device in range(problem.num_devices):
        used = set(schedule.assignment)
        share = sum(work[operator] for operator, each in enumerate(schedule.assignment) if each == device)
        if device not in used or share >= IDLE_SHARE * sum(work):
            continue
        moved = [tuple(other if each == device else each for each in schedule.assignment) for other in used - {device}]
        found = [best_schedule(problem, each, schedule.order) for each in moved if not problem.overflow_bytes(each)]
        best = min(found, key=lambda each: each.makespan, default=schedule)
        schedule = best if best.makespan <= schedule.makespan else schedule
    return schedule


def is_short_search(options: SearchOptions) -> bool:
    """Whether the time is too short for CP-SAT, linear programs and several runs: requests wait for such a plan."""
    return options.time_limit_seconds < _MIN_SOLVER_SECONDS


def solve_moirai(problem: PlacementProblem, options: SearchOptions) -> Solution[Schedule]:
    """The best placement found within the time limit, with a lower bound; never worse than a list schedule.

    Proofs hold to the precision of a tick (`in_ticks`). Raises ModelDoesNotFit with the missing bytes, or NoPlacement if the
    search could not decide in time whether the graph fits.
    """
    search = _Search(problem, "moirai", options)
    search.use_solver(1.0)
    if not search.is_over:
        search.take_turns(0.0)
    return search.solution()


def solve_doppler(
    problem: PlacementProblem,
    options: SearchOptions,
    starts: Sequence[Start] = (),
    sample: Callable[[Schedule], Sequence[Start]] | None = None,
) -> Solution[Schedule]:
    """As `solve_moirai`, with annealing; never worse than a list schedule or one of `starts`.

    `sample` returns further starts, given the best one. It is called once, within the time limit. With less than two seconds,
    CP-SAT is left out, and the time is spent on the best start.
    """
    search = _Search(problem, "doppler", options, starts, sample)
    if is_short_search(options):
        search.anneal(search.starts[:1], _UNLIMITED)
    else:
        search.use_solver(1.0 - _ANNEALING_SHARE)
    if not search.is_over:
        search.take_turns(_ANNEALING_SHARE)
    return search.solution()


class _Search:
    """The best schedule so far, and a lower bound. Each step offers schedules or raises the bound, until `deadline`.

    The first best one is that of `starts`, of all list schedules and of the samples. Raises as `list_schedules`. CP-SAT is
    imported by the first step that uses it, which takes half a second.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        strategy: str,
        options: SearchOptions,
        starts: Iterable[Start] = (),
        sample: Callable[[Schedule], Sequence[Start]] | None = None,
    ) -> None:
        self._clock, self._began = options.clock, options.clock()
        self.deadline = self._began + options.time_limit_seconds
        self._problem = problem
        self._ticked, self._ticks_per_unit = in_ticks(problem)
        self._bound_ticks = relaxed_makespan(self._ticked)
        self._random = Random(options.seed)
        until = self._began + _LISTS_SHARE * options.time_limit_seconds
        lists = list_schedules(problem, options.time_limit_seconds / 2, strategy, lambda: self._clock() >= until)
        self.starts = best_starts([*starts, *map(Start, lists)])  # by increasing makespan
        if sample is not None:
            self.starts = best_starts([*self.starts, *sample(self.starts[0].schedule)])
        first = self.starts[0].schedule
        self._best, self._best_ticked, self._pricing_seconds = self._price(first.assignment, first.order)

    @property
    def _seconds_left(self) -> float:
        """Seconds for the next step; the price of its result takes the rest."""
        return max(0.0, self.deadline - self._pricing_seconds - self._clock())

    @property
    def _is_proven(self) -> bool:
        return round(self._best_ticked.makespan) <= self._bound_ticks

    @property
    def is_over(self) -> bool:
        return self._is_proven or self._seconds_left <= 0.0

    def solution(self) -> Solution[Schedule]:
        self._leave_out_idle_devices()
        best = self._best
        bound = min(self._bound_ticks / self._ticks_per_unit, best.makespan)
        return Solution(best, best.makespan, bound, self._is_proven, self._clock() - self._began)

    # ---- steps --------------------------------------------------------------------------------------------------------

    def use_solver(self, share: float) -> None:
        """Raise the bound, and offer optima of parts: a quarter of a `share` of the time goes to parts that prove nothing."""
        if not self.is_over:
            self._bound_ticks = max(self._bound_ticks, fractional_load(self._ticked))
        if not self.is_over:  # rounding to ticks may break ties in a better way
            self._complete_and_offer(JoinedSchedule({}, {}, [], 0.0))
        if not self.is_over:
            self._solve_paths(share / 4)
        if not self.is_over and self._problem.num_operators <= _MAX_MODEL_OPERATORS:
            self._solve_whole()

    def take_turns(self, annealing_share: float) -> None:
        """Solve windows and anneal until the time is over, or the best schedule is proven to be optimal."""
        from coordinator.plan.graph.latency.windows import WindowSearch  # imports CP-SAT

        windows = WindowSearch(self._ticked, self._clock)
        starts, moves = self.starts[:_NUM_STARTS], _FIRST_MOVES
        began, windows_seconds = self._clock(), 0.0
        while not self.is_over:
            if annealing_share:
                starts, moves = self.anneal(starts, moves), 2 * moves
            while not self.is_over and windows_seconds <= (1.0 - annealing_share) * (self._clock() - began):
                windows_seconds += self._solve_window(windows)

    def anneal(self, starts: Sequence[Start], moves: int) -> list[Start]:
        """One run from each start and one from the best schedule. Returns the starts of the next turn.

        Every run begins at its start, not at an earlier result: what cooled down fast is a trap for a longer run.
        """
        makespans: list[float] = []
        for index in range(len(starts) + 1):
            left = self._seconds_left
            if self._is_proven or left <= 0.0:
                break
            end = self._clock() + left / (len(starts) + 1 - index)
            schedule, probabilities = starts[index] if index < len(starts) else Start(self._best)
            found = improve(self._problem, schedule, self._random, moves, self._clock, end, probabilities)
            self._offer(found.assignment, found.order)
            makespans.append(found.makespan)
        self._leave_out_idle_devices()
        limit = _MAX_BEHIND * self._best.makespan
        return [start for start, makespan in zip(starts, makespans, strict=False) if makespan <= limit]

    # -------------------------------------------------------------------------------------------------------------------

    def _price(self, assignment: Sequence[int], order: Sequence[Item]) -> tuple[Schedule, Schedule, float]:
        """The schedule with exact times and in ticks, and the seconds to price the result of a step.

        These are a second and more for thousands of operators.
        """
        began = self._clock()
        exact, ticked = (best_schedule(each, assignment, order) for each in (self._problem, self._ticked))
        return exact, ticked, _PRICES_OF_A_STEP * (self._clock() - began)

    def _offer(self, assignment: Sequence[int], order: Sequence[Item]) -> None:
        """Keep the schedule if it is the best so far; none that exceeds the memory."""
        if self._problem.overflow_bytes(assignment) > 0:
            return
        exact, ticked, seconds = self._price(assignment, order)
        self._best = min(self._best, exact, key=lambda each: each.makespan)
        self._best_ticked = min(self._best_ticked, ticked, key=lambda each: each.makespan)
        self._pricing_seconds = max(self._pricing_seconds, seconds)

    def _solve_paths(self, near_cut_share: float) -> None:
        """Find the shortest path over the segments between cut vertices: the optimum, if memory does not bind.

        Where segments stay large, near cuts give a bound and an initial placement, in `near_cut_share` of the time left.
        """
        from coordinator.plan.graph.latency.paths import shortest_paths

        deadline = self._clock() + near_cut_share * self._seconds_left
        segments, is_exact = self._segments(deadline)
        if not segments:
            return
        deadline = self.deadline if is_exact else deadline
        for path in shortest_paths(self._ticked, segments, self._clock, deadline):
            self._bound_ticks = max(self._bound_ticks, path.lower)
            self._complete_and_offer(join_schedules(segments, path.schedules))

    def _segments(self, deadline: float) -> tuple[list[CutSegment], bool]:
        """The segments between cut vertices, and whether their shortest path is exact; if not, near cuts are among them.

        None if one is still too large for a model.
        """
        reachability = Reachability(self._ticked)
        cuts = exact_cuts(self._ticked, reachability)
        segments = cut_segments(self._ticked, cuts, reachability)
        if max(len(segment.operators) for segment in segments) <= _MAX_MODEL_OPERATORS:
            return segments, True
        cuts = near_cuts(self._ticked, reachability, cuts, _MAX_MODEL_OPERATORS, lambda: self._clock() >= deadline)
        segments = cut_segments(self._ticked, cuts, reachability)
        largest = max(len(segment.operators) for segment in segments)
        return (segments if largest <= 4 * _MAX_MODEL_OPERATORS else []), False

    def _complete_and_offer(self, part: JoinedSchedule) -> None:
        """Extend a partial schedule: list scheduling places the other operators. Offer the results."""
        n = self._problem.num_operators
        if len(part.assignment) == n:
            self._offer([part.assignment[i] for i in range(n)], part.order)
            return
        ranks = ranks_from_schedule(self._ticked, part.starts, part.makespan)
        for scheduler in (contended_heft, partial(contended_heft, ranks=ranks), heft):
            if self._seconds_left <= 0.0:
                return
            try:
                found = scheduler(self._ticked, part.assignment)
            except NoPlacement:
                continue
            self._offer(found.assignment, found.order)

    def _solve_whole(self) -> None:
        """Solve the graph as one model."""
        from coordinator.plan.graph.latency.cpsat import SolverLimits, solve_placement_model

        known, limits = self._best_ticked, SolverLimits(self._seconds_left)
        result = solve_placement_model(self._ticked, limits, round(known.makespan), hint=known)
        if result.schedule is not None:
            self._offer(result.schedule.assignment, result.schedule.order)
        self._bound_ticks = max(self._bound_ticks, result.bound)

    def _solve_window(self, windows: WindowSearch) -> float:
        """Solve the next window of the best schedule; returns the seconds that it took."""
        began = self._clock()
        better = windows.step(self._best_ticked, self._seconds_left)
        self._bound_ticks = max(self._bound_ticks, windows.bound)
        if better is not None:
            self._offer(better.assignment, better.order)
            self._leave_out_idle_devices()
        return self._clock() - began

    def _leave_out_idle_devices(self) -> None:
        found = without_idle_devices(self._problem, self._best)
        if found is not self._best:
            self._best = found
            self._offer(found.assignment, found.order)  # in ticks, too
