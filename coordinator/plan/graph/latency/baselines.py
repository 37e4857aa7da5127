"""The strategies that Moirai is compared with, by name. The same simulator prices all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random

from coordinator.plan.graph.latency.enumerative import enumerative
from coordinator.plan.graph.latency.list_scheduling import contended_heft, critical_path, heft
from coordinator.plan.graph.latency.memory import with_fitting
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.solution import SearchOptions, Solution, Stop
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
    """Solve with one of `BASELINES`, which give no bound. Raises NoPlacement, and ModelDoesNotFit with the missing bytes."""
    began = options.clock()

    def stop() -> bool:
        return options.clock() - began >= options.time_limit_seconds

    baseline = _lists(stop)[name]
    try:
        schedule = baseline(problem)
    except NoPlacement:
        if name == "local":
            raise
        schedule = baseline(_with_fitting(problem, options.time_limit_seconds / 2, name))
    return Solution(schedule, schedule.makespan, seconds=options.clock() - began)


def list_schedules(
    problem: PlacementProblem, seconds: float, strategy: str, stop: Stop = lambda: False
) -> Iterator[Schedule]:
    """The schedules of the list schedulers, HEFT's first: the starts of a search, which is called `strategy`.

    Those that run out of memory run again, and keep room for an assignment that fits, for which `seconds` are left. After the
    first schedule, no list begins once `stop()` is true. Raises ModelDoesNotFit with the missing bytes, or NoPlacement if it
    is not decided in time whether the graph fits.
    """
    failed, found = list[Baseline](), False
    for baseline in _lists(stop).values():
        if found and stop():
            return
        try:
            yield baseline(problem)
            found = True
        except NoPlacement:
            failed.append(baseline)
    failed = [baseline for baseline in failed if baseline is not local]
    if failed and not (found and stop()):
        tight = _with_fitting(problem, seconds, strategy)
        for baseline in failed:
            if not (found and stop()):
                yield baseline(tight)
                found = True


def _with_fitting(problem: PlacementProblem, seconds: float, strategy: str) -> PlacementProblem:
    """The problem with an assignment that fits: HEFT's, or one that CP-SAT finds. Raises as `with_fitting`."""
    for scheduler in (contended_heft, heft):
        try:
            return replace(problem, fitting=scheduler(problem).assignment)
        except NoPlacement:
            continue
    return with_fitting(problem, seconds, strategy)


def _lists(stop: Stop) -> dict[str, Baseline]:
    """The list schedulers by name, HEFT first, and last the one that takes most time."""
    return {
        "heft": heft,
        "contended-heft": contended_heft,
        "fewer-devices": partial(_on_fewer_devices, stop=stop),
        "local": local,
        "enumerative": enumerative,
        "critical-path": lambda problem: critical_path(problem, Random(_TIE_BREAK_SEED), stop=stop),
    }


def _on_fewer_devices(problem: PlacementProblem, stop: Stop) -> Schedule:
    """HEFT with contention on the fastest 2 to K - 1 devices, the best of them: a slow device may cost more than it gives."""
    order = sorted(range(problem.num_devices), key=lambda device: sum(row[device] for row in problem.seconds))
    best: Schedule | None = None
    for count in range(problem.num_devices - 1, 1, -1):
        if best is not None and stop():
            break
        found = contended_heft(problem, devices=order[:count])
        best = found if best is None or found.makespan < best.makespan else best
    return best or contended_heft(problem)


BASELINES: Mapping[str, Baseline] = {
    name: _lists(lambda: False)[name] for name in ("local", "heft", "critical-path", "enumerative")
}
