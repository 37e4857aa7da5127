"""The strategies that Moirai is compared with, by name. All are priced by the one simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from random import Random

from coordinator.plan.graph.latency.getf import getf
from coordinator.plan.graph.latency.heft import critical_path, heft
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Placement, Schedule, best_schedule
from coordinator.plan.graph.latency.sct import m_sct
from hearth.errors import NoPlacement

_SEED = 0  # a plan repeats
Baseline = Callable[[PlacementProblem], Placement]


def local(problem: PlacementProblem) -> Schedule:
    """Everything on the best single device that holds it. Raises NoPlacement."""
    n = problem.num_operators
    fitting = [[device] * n for device in range(problem.num_devices) if problem.overflow([device] * n) == 0]
    if not fitting:
        raise NoPlacement(graph=problem.name, strategy="local")
    return min((best_schedule(problem, each, range(n)) for each in fitting), key=lambda each: each.makespan)


def _timed(name: str, strategy: Callable[[PlacementProblem], Schedule]) -> Baseline:
    def place(problem: PlacementProblem) -> Placement:
        began = time.monotonic()
        found = strategy(problem)
        return Placement(name, found, planning_seconds=time.monotonic() - began)

    return place


BASELINES: Mapping[str, Baseline] = {
    name: _timed(name, strategy)
    for name, strategy in {
        "local": local,
        "heft": heft,
        "critical-path": lambda problem: critical_path(problem, Random(_SEED)),
        "m-sct": m_sct,
        "getf": getf,
    }.items()
}
