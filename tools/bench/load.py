"""What else the machine did while we measured: steal, and the CPU time of processes that are not ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

_KTHREADD = 2  # parent of the kernel's threads: what they do, they do for us as well
_TRUSTED_SHARE = 0.05
_Result = TypeVar("_Result")


class Process(NamedTuple):
    """CPU seconds of a process itself, and of its children that have ended and been waited for."""

    parent: int
    seconds: float
    children_seconds: float


@dataclass(frozen=True)
class Snapshot:
    seconds: float  # monotonic
    cpu_seconds: float  # of all cores, idle ones too
    steal_seconds: float
    runnable: int  # tasks that want a core now, ourselves included
    processes: Mapping[int, Process]


@dataclass(frozen=True)
class Load:
    """Over some time: shares of all cores."""

    steal_share: float
    foreign_share: float
    run_queue: int  # the most tasks beside us that wanted a core between two steps
    disturbed_rounds: int = 0  # that were run beside these and do not count

    @property
    def distrust(self) -> str:
        """Why times taken meanwhile are not to be trusted; empty where they are."""
        found = []
        if self.steal_share > _TRUSTED_SHARE:
            found.append(f"the host took {self.steal_share:.0%} of the cores away (steal)")
        if self.foreign_share > _TRUSTED_SHARE:
            found.append(f"other processes took {self.foreign_share:.0%} of the cores")
        return " and ".join(found)


def snapshot() -> Snapshot:
    """Now. A process that ends while we look is left out."""
    times = psutil.cpu_times()
    processes = {}
    for process in psutil.process_iter(["ppid", "cpu_times"]):
        if (used := process.info["cpu_times"]) is not None:
            children = used.children_user + used.children_system
            processes[process.pid] = Process(process.info["ppid"], used.user + used.system, children)
    runnable = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    # Of all fields the first eight: guest time is part of user time.
    return Snapshot(time.monotonic(), sum(times[:8]), times.steal, runnable, processes)


def load_between(pairs: Sequence[tuple[Snapshot, Snapshot]], our_pid: int) -> Load:
    """Over all these spans together."""
    total = sum(after.cpu_seconds - before.cpu_seconds for before, after in pairs)
    steal = sum(after.steal_seconds - before.steal_seconds for before, after in pairs)
    foreign = sum(foreign_seconds(before.processes, after.processes, our_pid) for before, after in pairs)
    return Load(
        steal_share=steal / total if total else 0.0,
        foreign_share=min(foreign / total, 1.0) if total else 0.0,
        run_queue=max((max(after.runnable - 1, 0) for _, after in pairs), default=0),
    )


def calmest(loads: Sequence[Load], count: int) -> list[int]:
    """The indices, in order, of those in which the least was taken away."""
    by_load = sorted(range(len(loads)), key=lambda index: loads[index].steal_share + loads[index].foreign_share)
    return sorted(by_load[:count])


def calmest_of(measure: Callable[[], _Result], most_times: int) -> _Result:
    """What `measure` gives, undisturbed; else the calmest of `most_times`, whatever they gave."""
    loads: list[Load] = []
    results: list[_Result] = []
    while len(results) < most_times and (not loads or loads[-1].distrust):
        before = snapshot()
        results.append(measure())
        loads.append(load_between([(before, snapshot())], os.getpid()))
    return results[calmest(loads, 1)[0]]


def foreign_seconds(before: Mapping[int, Process], after: Mapping[int, Process], our_pid: int) -> float:
    """What processes that do not descend from us used between two snapshots.

    Also those that came and went in between: their parents have them among their children's seconds. Of that, what they
    had used before the first snapshot is taken off.
    """
    own, children, gone = 0.0, 0.0, 0.0
    for pid, process in after.items():
        if _is_foreign(pid, after, our_pid):
            earlier = before.get(pid, Process(0, 0, process.children_seconds))
            if earlier.seconds <= process.seconds:
                own += process.seconds - earlier.seconds
                children += process.children_seconds - earlier.children_seconds
            else:  # the pid came again
                own += process.seconds
    for pid, process in before.items():
        if pid not in after and _is_foreign(pid, before, our_pid):
            gone += process.seconds + process.children_seconds
    return own + max(children - gone, 0)


def _is_foreign(pid: int, processes: Mapping[int, Process], our_pid: int) -> bool:
    seen = set()
    while pid in processes and pid not in seen:
        if pid in (our_pid, _KTHREADD):
            return False
        seen.add(pid)
        pid = processes[pid].parent
    return pid not in (our_pid, _KTHREADD)
