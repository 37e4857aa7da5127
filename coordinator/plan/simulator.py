"""A work-conserving discrete-event simulation: any task whose inputs are there starts as soon as its resources are free.

Pure. Resources are serial: a device's compute, and the sending and the receiving side of its network interface.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """Occupies all of `resources` for `seconds`, once the tasks `after` have ended.

    Its successors may start `latency` seconds after that: a link's delay, which keeps nobody busy.
    """

    name: str
    resources: tuple[str, ...]
    seconds: float
    after: tuple[int, ...] = ()
    latency: float = 0.0
    num_bytes: int = 0  # of a transfer; for the timeline only


class Timeline(NamedTuple):
    """When each task ran, in seconds; `busy` per resource."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    makespan: float
    busy: dict[str, float]


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run all tasks. Among those that could start at one moment, the first in order does.

    Raises ValueError when a task depends on itself or on one that does not exist.
    """
    waiting_for = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            if not 0 <= before < len(tasks):
                raise ValueError(f"task {task.name} comes after task {before}, which does not exist")
            followers[before].append(index)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    busy: dict[str, float] = defaultdict(float)
    held: set[str] = set()
    queues: dict[str, list[int]] = defaultdict(list)  # ready tasks that wait for a resource
    events: list[tuple[float, int, int]] = []  # time, kind (0 release, 1 arrive), task
    ready = [index for index, count in enumerate(waiting_for) if count == 0]
    heapq.heapify(ready)
    now, done = 0.0, 0
    while ready or events:
        while ready:
            index = heapq.heappop(ready)
            task = tasks[index]
            for resource in task.resources:
                if resource in held:
                    heapq.heappush(queues[resource], index)
                    break
            else:
                held.update(task.resources)
                starts[index] = now
                heapq.heappush(events, (now + task.seconds, 0, index))
        now = events[0][0]
        while events and events[0][0] <= now:
            _, kind, index = heapq.heappop(events)
            task = tasks[index]
            if kind == 0:
                for resource in task.resources:
                    held.discard(resource)
                    busy[resource] += task.seconds
                    for waiting in queues.pop(resource, ()):
                        heapq.heappush(ready, waiting)
                ends[index] = now + task.latency
                if task.latency > 0:
                    heapq.heappush(events, (now + task.latency, 1, index))
                    continue
            done += 1
            for follower in followers[index]:
                waiting_for[follower] -= 1
                if waiting_for[follower] == 0:
                    heapq.heappush(ready, follower)
    if done != len(tasks):
        raise ValueError("some tasks wait for each other")
    return Timeline(tuple(starts), tuple(ends), max(ends, default=0.0), dict(busy))
