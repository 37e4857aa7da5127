"""The strategies that Moirai is compared with, by name. The same simulator prices all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random

from coordinator.plan.graph.latency.contention import contended_heft
from coordinator.plan.graph.latency.enumerative import enumerative
from coordinator.plan.graph.latency.getf import getf
from coordinator.plan.graph.latency.heft import critical_path, heft
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.graph.latency.sct import m_sct
from coordinator.plan.solution import SearchOptions, Solution
from hearth.errors import NoPlacement

_TIE_BREAK_SEED = 0  # any fixed value: the same problem gives the same plan
# Raises NoPlacement.
Baseline = Callable[[PlacementProblem], Schedule]


def local(problem: PlacementProblem) -> Schedule:
    """Everything on the best single device that holds it. Raises NoPlacement."""
    n = problem.num_operators
    fitting = [[device] * n for device in range(problem.num_devices) if problem.overflow_bytes([device] * n) == 0]
    if not fitting:
        raise NoPlacement(graph=problem.name, strategy="local")
    return min((best_schedule(problem, each, range(n)) for each in fitting), key=lambda each: each.makespan)


def solve_baseline(name: str, problem: PlacementProblem, options: SearchOptions) -> Solution[Schedule]:
    """Solve with one of `BASELINES`, which give no bound. Raises NoPlacement."""
    began = options.clock()
    schedule = BASELINES[name](problem)
    return Solution(schedule, schedule.makespan, seconds=options.clock() - began)


def list_schedules(problem: PlacementProblem) -> Iterator[Schedule]:
    """The schedules of all baselines that find one, and that of HEFT with contention: the starts of a search."""
    for baseline in (*BASELINES.values(), contended_heft):
        try:
            yield baseline(problem)
        except NoPlacement:
            continue


BASELINES: Mapping[str, Baseline] = {
    "local": local,
    "heft": heft,
    "critical-path": lambda problem: critical_path(problem, Random(_TIE_BREAK_SEED)),
    "m-sct": m_sct,
    "getf": getf,
    "enumerative": enumerative,
}
