"""The steps of a search for the placement with the shortest makespan: the best schedule so far, and a lower bound. Pure.

Each step offers schedules or raises the bound; the search is done when both meet. It works in whole ticks; the simulator
prices the results with the exact times. `clock` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.bounds import relaxed_makespan
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
from coordinator.plan.solution import Solution
from hearth.errors import NoPlacement

# The model has a variable for each edge and pair of devices: small enough for proofs, large enough for a network's blocks.
_MAX_SEGMENT_OPERATORS = 60  # larger segments are cut at near cuts
_MAX_WHOLE_OPERATORS = 60  # larger graphs are not solved as one model


class PlacementSearch:
    """The state of a search by the strategy of this name, which ends at `deadline`.

    CP-SAT is imported by the first step that uses it, which takes half a second.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        strategy: str,
        time_limit_seconds: float,
        clock: Callable[[], float],
        num_workers: int = 1,
    ) -> None:
        self.problem = problem
        self.ticked, self._ticks_per_unit = in_ticks(problem)
        self.deadline = clock() + time_limit_seconds
        self._best: Schedule | None = None  # with exact times
        self._best_ticked: Schedule | None = None
        self._strategy = strategy
        self._clock, self._began = clock, clock()
        self._num_workers = num_workers
        self._bound_ticks = relaxed_makespan(self.ticked)

    @property
    def incumbent(self) -> Schedule:
        """The best schedule with exact times. There is one after the first offer."""
        assert self._best is not None
        return self._best

    @property
    def incumbent_in_ticks(self) -> Schedule:
        """The best schedule in ticks. There is one after the first offer."""
        assert self._best_ticked is not None
        return self._best_ticked

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - self._clock())

    @property
    def is_proven(self) -> bool:
        return round(self.incumbent_in_ticks.makespan) <= self._bound_ticks

    @property
    def is_over(self) -> bool:
        return self.is_proven or self._clock() >= self.deadline

    def solution(self) -> Solution[Schedule]:
        best = self.incumbent
        return Solution(
            best,
            best.makespan,
            bound=min(self._bound_ticks / self._ticks_per_unit, best.makespan),
            proven=self.is_proven,
            seconds=self._clock() - self._began,
        )

    # ---- steps --------------------------------------------------------------------------------------------------------

    def run_lists(self) -> None:
        """Offer the schedules of all list schedulers. Raises as `list_schedules`."""
        for each in list_schedules(self.problem, self.seconds_left, self._strategy):
            self.offer(each.assignment, each.order)

    def run_contended_heft(self) -> None:
        """Offer the schedules of HEFT in ticks, where rounding may break ties in a better way."""
        self._complete_and_offer(JoinedSchedule({}, {}, [], 0.0))

    def solve_paths(self, near_cut_fraction: float, max_near_cut_share: float = 1.0) -> None:
        """Find the shortest path over the segments between cut vertices: the optimum, if memory does not bind.

        Where segments stay large, near cuts give a bound and an initial placement, in `near_cut_fraction` of the time left;
        not if one segment still has more than `max_near_cut_share` of all operators.
        """
        from coordinator.plan.graph.latency.paths import shortest_paths

        segments, is_exact = self._segments()
        largest = max(len(segment.operators) for segment in segments)
        if not is_exact and largest > max_near_cut_share * self.problem.num_operators:
            return
        deadline = self._clock() + (1.0 if is_exact else near_cut_fraction) * self.seconds_left
        for path in shortest_paths(self.ticked, segments, self._clock, deadline, self._num_workers):
            self._bound_ticks = max(self._bound_ticks, path.lower)
            self._complete_and_offer(join_schedules(segments, path.schedules))

    def solve_whole(self) -> None:
        """Solve a small graph as one model."""
        if self.problem.num_operators > _MAX_WHOLE_OPERATORS or self.is_over:
            return
        from coordinator.plan.graph.latency.cpsat import SolverLimits, solve_placement_model

        known = self.incumbent_in_ticks
        limits = SolverLimits(self.seconds_left, num_workers=self._num_workers)
        result = solve_placement_model(self.ticked, limits, round(known.makespan), hint=known)
        if result.schedule is not None:
            self.offer(result.schedule.assignment, result.schedule.order)
        self._bound_ticks = max(self._bound_ticks, result.bound)

    def offer(self, assignment: Sequence[int], order: Iterable[Item]) -> None:
        """Keep the schedule if it is the best so far; none that exceeds the memory."""
        if self.problem.overflow_bytes(assignment) > 0:
            return
        items = list(order)
        for problem, name in ((self.problem, "_best"), (self.ticked, "_best_ticked")):
            found, known = best_schedule(problem, assignment, items), getattr(self, name)
            if known is None or found.makespan < known.makespan:
                setattr(self, name, found)

    # -------------------------------------------------------------------------------------------------------------------

    def _segments(self) -> tuple[list[CutSegment], bool]:
        """The segments between cut vertices, and whether their shortest path is exact; if not, near cuts are among them."""
        reachability = Reachability(self.ticked)
        cuts = exact_cuts(self.ticked, reachability)
        segments = cut_segments(self.ticked, cuts, reachability)
        if max(len(segment.operators) for segment in segments) <= _MAX_SEGMENT_OPERATORS:
            return segments, True
        cuts = near_cuts(self.ticked, reachability, cuts, _MAX_SEGMENT_OPERATORS)
        return cut_segments(self.ticked, cuts, reachability), False

    def _complete_and_offer(self, part: JoinedSchedule) -> None:
        """Extend a partial schedule: list scheduling places the other operators. Offer the results."""
        n, problem = self.problem.num_operators, self.ticked
        if len(part.assignment) == n:
            self.offer([part.assignment[i] for i in range(n)], part.order)
            return
        ranks = ranks_from_schedule(problem, part.starts, part.makespan)
        for scheduler in (heft, contended_heft, partial(contended_heft, ranks=ranks)):
            try:
                found = scheduler(problem, part.assignment)
            except NoPlacement:
                continue
            self.offer(found.assignment, found.order)
