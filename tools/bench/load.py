"""Background load of the machine during measurements: steal time, and CPU time of foreign processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import psutil

from tools.bench.stats import rotated

_KTHREADD = 2  # pid of the parent of kernel threads, which do not count as foreign: they work for us too
_TRUSTED_SHARE = 0.05  # of all cores: measurements with more steal or foreign load are not trusted
_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


class Process(NamedTuple):
    """CPU seconds of a process, and of its children that have been waited for."""

    parent: int
    seconds: float
    children_seconds: float


@dataclass(frozen=True)
class Snapshot:
    """Counters of this machine at one time: CPU and steal time, runnable tasks, and processes."""

    cpu_seconds: float  # sum over all cores, idle time included
    steal_seconds: float
    processes: Mapping[int, Process]


@dataclass(frozen=True)
class BackgroundLoad:
    """Background load over some time, in shares of all cores."""

    steal_share: float
    foreign_share: float
    disturbed_rounds: int = 0  # number of additional rounds that were discarded

    @property
    def distrust(self) -> str:
        """Why times measured meanwhile cannot be trusted; empty if they can."""
        found = []
        if self.steal_share > _TRUSTED_SHARE:
            found.append(f"the host took {self.steal_share:.0%} of the cores away (steal)")
        if self.foreign_share > _TRUSTED_SHARE:
            found.append(f"other processes took {self.foreign_share:.0%} of the cores")
        return " and ".join(found)


def snapshot() -> Snapshot:
    """A snapshot of the current load. A process that ends meanwhile is left out."""
    times = psutil.cpu_times()
    processes = {}
    for process in psutil.process_iter(["ppid", "cpu_times"]):
        if (used := process.info["cpu_times"]) is not None:
            children = used.children_user + used.children_system
            processes[process.pid] = Process(process.info["ppid"], used.user + used.system, children)
    # Only the first eight fields, because guest time is part of user time.
    return Snapshot(sum(times[:8]), times.steal, processes)


def load_between(pairs: Sequence[tuple[Snapshot, Snapshot]]) -> BackgroundLoad:
    """The load over all these spans together, apart from this process and its descendants."""
    total = sum(after.cpu_seconds - before.cpu_seconds for before, after in pairs) or 1.0  # no time has passed
    steal = sum(after.steal_seconds - before.steal_seconds for before, after in pairs)
    foreign = sum(foreign_seconds(before.processes, after.processes, os.getpid()) for before, after in pairs)
    return BackgroundLoad(steal_share=steal / total, foreign_share=min(foreign / total, 1.0))


def calmest(loads: Sequence[BackgroundLoad], count: int) -> list[int]:
    """Indices of the `count` loads with the least steal and foreign time, in ascending order."""
    by_load = sorted(range(len(loads)), key=lambda index: loads[index].steal_share + loads[index].foreign_share)
    return sorted(by_load[:count])


def calmest_of(measure: Callable[[], _Result], most_times: int) -> _Result:
    """Repeat `measure` until it is undisturbed, at most `most_times`; returns the least disturbed result."""
    loads: list[BackgroundLoad] = []
    results: list[_Result] = []
    while len(results) < most_times and (not loads or loads[-1].distrust):
        before = snapshot()
        results.append(measure())
        loads.append(load_between([(before, snapshot())]))
    return results[calmest(loads, 1)[0]]


def interleaved(
    runs: Mapping[_Name, Callable[[], _Result]], rounds: int, report: Callable[[str], None], most_rounds: int = 0
) -> tuple[dict[_Name, list[_Result]], BackgroundLoad]:
    """Run all of `runs` in every round, in rotated order, after a warm-up round that does not count.

    A round disturbed by the host or other programs is repeated, up to `most_rounds` in all. The rounds with the least
    background load count, regardless of their times. Returns the results of each by round, and the load.
    """
    for run in runs.values():
        run()
    spans: list[tuple[Snapshot, Snapshot]] = []
    results: list[dict[_Name, _Result]] = []
    loads: list[BackgroundLoad] = []
    while (calm := sum(not load.distrust for load in loads)) < rounds and len(loads) < max(rounds, most_rounds):
        report(f"round {len(loads) + 1}, {calm} of {rounds} undisturbed")
        before = snapshot()
        results.append({name: runs[name]() for name in rotated(list(runs), len(loads))})
        spans.append((before, snapshot()))
        loads.append(load_between(spans[-1:]))
    kept = calmest(loads, rounds)
    load = load_between([spans[index] for index in kept])
    found = {name: [results[index][name] for index in kept] for name in runs}
    return found, replace(load, disturbed_rounds=len(loads) - len(kept))


def foreign_seconds(before: Mapping[int, Process], after: Mapping[int, Process], our_pid: int) -> float:
    """CPU seconds that processes not descending from `our_pid` used between two snapshots.

    Processes that ended in between are counted through their parents' children seconds, less the time that they had used
    before the first snapshot. Our processes whose parents end have another parent then, and are ours nevertheless.
    """
    ours = {_KTHREADD, our_pid}
    ours |= {pid for pid in before if not _is_foreign(pid, before, ours)}
    own, children, gone = 0.0, 0.0, 0.0
    for pid, process in after.items():
        if _is_foreign(pid, after, ours):
            earlier = before.get(pid)
            if earlier is None or earlier.seconds > process.seconds:  # it is new, or its pid was reused
                own += process.seconds
            else:
                own += process.seconds - earlier.seconds
                children += process.children_seconds - earlier.children_seconds
    for pid, process in before.items():
        if pid not in after and (pid not in ours or not _waited(process, before, after)):
            gone += process.seconds + process.children_seconds
    return own + max(children - gone, 0)


def _waited(process: Process, before: Mapping[int, Process], after: Mapping[int, Process]) -> bool:
    """Whether its parent, rather than init, counts the time of a process that has ended. A killed parent may be a zombie."""
    earlier, parent = before.get(process.parent), after.get(process.parent)
    if earlier is None or parent is None:
        return False
    return parent.children_seconds - earlier.children_seconds >= process.seconds


def _is_foreign(pid: int, processes: Mapping[int, Process], ours: Collection[int]) -> bool:
    seen = set()
    while pid in processes and pid not in seen and pid not in ours:
        seen.add(pid)
        pid = processes[pid].parent
    return pid not in ours
