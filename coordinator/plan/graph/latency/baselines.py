"""The strategies that Moirai is compared with, by name. The same simulator prices all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random

from coordinator.plan.graph.latency.enumerative import enumerative
from coordinator.plan.graph.latency.list_scheduling import contended_heft, critical_path, heft
from coordinator.plan.graph.latency.memory import with_fitting
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.solution import SearchOptions, Solution
from hearth.errors import NoPlacement

_TIE_BREAK_SEED = 0  # any fixed value: the same problem gives the same plan
_SHORT_RUNS = 3  # of the critical path, in a search of less than a second
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
    """Solve with one of `BASELINES`, which give no bound. Raises NoPlacement, and ModelDoesNotFit with the missing bytes."""
    began = options.clock()
    try:
        schedule = BASELINES[name](problem)
    except NoPlacement:
        if BASELINES[name] is local:
            raise
        schedule = BASELINES[name](_with_fitting(problem, options.time_limit_seconds, name))
    return Solution(schedule, schedule.makespan, seconds=options.clock() - began)


def list_schedules(
    problem: PlacementProblem, seconds: float, strategy: str, is_short: bool = False
) -> Iterator[Schedule]:
    """The schedules of all baselines, and that of HEFT with contention: the starts of a search, which is called `strategy`.

    `is_short`: the critical path is run a few times only; otherwise it takes most of the time of all baselines. Those that run
    out of memory run again, and keep room for an assignment that fits, for which `seconds` are left. Raises ModelDoesNotFit
    with the missing bytes, or NoPlacement if it is not decided in time whether the graph fits.
    """
    baselines = _SHORT_BASELINES if is_short else tuple(BASELINES.values())
    failed = []
    for baseline in (*baselines, contended_heft):
        try:
            yield baseline(problem)
        except NoPlacement:
            failed.append(baseline)
    failed = [baseline for baseline in failed if baseline is not local]
    if failed:
        tight = _with_fitting(problem, seconds, strategy)
        yield from (baseline(tight) for baseline in failed)


def _with_fitting(problem: PlacementProblem, seconds: float, strategy: str) -> PlacementProblem:
    """The problem with an assignment that fits: HEFT's, or one that CP-SAT finds. Raises as `with_fitting`."""
    for scheduler in (contended_heft, heft):
        try:
            return replace(problem, fitting=scheduler(problem).assignment)
        except NoPlacement:
            continue
    return with_fitting(problem, seconds, strategy)


def _short_critical_path(problem: PlacementProblem) -> Schedule:
    return critical_path(problem, Random(_TIE_BREAK_SEED), _SHORT_RUNS)


BASELINES: Mapping[str, Baseline] = {
    "local": local,
    "heft": heft,
    "critical-path": lambda problem: critical_path(problem, Random(_TIE_BREAK_SEED)),
    "enumerative": enumerative,
}
_SHORT_BASELINES: tuple[Baseline, ...] = (local, heft, _short_critical_path, enumerative)
