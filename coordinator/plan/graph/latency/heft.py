"""HEFT and Critical Path: list scheduling by the longest path to the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random

from coordinator.models.ordering import topological_order
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, upward_ranks
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule


def heft(problem: PlacementProblem, pins: Mapping[int, int] | None = None) -> Schedule:
    """Heterogeneous Earliest Finish Time (Topcuoglu, Hariri, Wu 2002): by decreasing upward rank, first gap that fits.

    Its own estimate ignores contention between transfers; the simulator then prices the schedule with the problem's
    contention. `pins` bind operators to devices. Raises NoPlacement.
    """
    pins = pins or {}
    partial = PartialSchedule(problem, "heft")
    ranks = upward_ranks(problem)
    for operator in rank_order(problem, ranks):
        start, device = min(
            (
                (partial.first_gap_start(operator, device, partial.inputs_ready_at(operator, device)), device)
                for device in partial.candidates(operator, [pins[operator]] if operator in pins else None)
            ),
            key=lambda each: each[0] + problem.seconds[operator][each[1]],
        )
        partial.place(operator, device, start)
    return partial.to_schedule()


def critical_path(problem: PlacementProblem, rng: Random, runs: int = 50) -> Schedule:
    """Place the ready operator with the longest path to the end on the device where it can start first.

    Doppler's baseline (arXiv 2505.23131, section 6; Kwok and Ahmad 1999). Ties are broken at random; of `runs` runs, return
    the one with the shortest simulated makespan. Raises NoPlacement.
    """
    ranks, evaluator = upward_ranks(problem), Evaluator(problem)
    best, best_makespan = None, inf
    for _ in range(runs):
        partial = PartialSchedule(problem, "critical-path")
        while partial.ready:
            operator = max(partial.ready, key=lambda i: (ranks[i], rng.random()))
            start, _, device = min(
                (partial.earliest_start(operator, device), rng.random(), device)
                for device in partial.candidates(operator)
            )
            partial.place(operator, device, start)
        makespan = evaluator.makespan(partial.assignment, partial.order)
        if makespan < best_makespan:
            best, best_makespan = partial, makespan
    assert best is not None
    return best.to_schedule()


def rank_order(problem: PlacementProblem, ranks: Sequence[float]) -> list[int]:
    """Operators by decreasing rank, in topological order: ranks alone do not order operators that take no time."""
    return topological_order(problem.predecessors, lambda operator: -ranks[operator])
