"""Teachers: the best known schedules of an instance, which a policy imitates."""

from __future__ import annotations

from random import Random

from coordinator.plan.graph.latency.annealing import improve
from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler.starts import Start, best_starts
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from hearth.errors import ModelDoesNotFit, NoPlacement

_NUM_STARTS = 4
_FITTING_SECONDS = 10.0  # for an assignment that fits, where memory is tight


def taught_schedules(problem: PlacementProblem, seed: int, moves: int) -> list[Schedule]:
    """The best list schedules, each improved by annealing; the shortest first. None where lists find no room."""
    try:
        starts = best_starts(list(map(Start, list_schedules(problem, _FITTING_SECONDS, "doppler"))))
    except (ModelDoesNotFit, NoPlacement):
        return []
    improved = [improve(problem, start.schedule, Random(seed), moves, lambda: 0.0) for start in starts[:_NUM_STARTS]]
    return sorted(improved, key=lambda each: each.makespan)
