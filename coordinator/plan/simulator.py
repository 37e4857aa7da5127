"""A work-conserving discrete-event simulation: a task starts as soon as its inputs are there and its resources are free.

Pure. Resources are serial: a device's compute, its CPU if it computes on a GPU, the sending and the receiving side of its
network interface, and a medium that several devices share. A simulated run can be shown in the form of a measured
trace (`simulated_traces`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from hearth.plan.phases import TaskKind

if TYPE_CHECKING:
    from hearth.wire.messages import DeviceTrace, TraceEvent

_MAX_TENSOR_CHARACTERS = 64  # the last characters of a tensor's name; the limit of a trace event
_COORDINATOR = "coordinator"


class ResourceKind(IntEnum):
    """The kinds of serial resources of a rank."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    CPU = 3  # of a rank that computes on its GPU
    MEDIUM = 4  # shared by the links of several ranks; `rank` is its number


TRANSFERS = (ResourceKind.SEND, ResourceKind.RECEIVE, ResourceKind.MEDIUM)


class Resource(NamedTuple):
    """One serial resource of a rank, or a shared medium."""

    kind: ResourceKind
    rank: int

    def __str__(self) -> str:
        """`compute:0`, as in the output of `hearth plan --json`."""
        return f"{self.kind.name.lower()}:{self.rank}"


@lru_cache(maxsize=1024)
def compute_resources(rank: int) -> tuple[Resource, ...]:
    """The resources of a computation."""
    return (Resource(ResourceKind.COMPUTE, rank),)


@lru_cache(maxsize=1024)
def wire_resources(rank: int, beside_compute: bool) -> tuple[Resource, ...]:
    """The resources of the CPU work of transfers; `beside_compute` as in `WireCost`."""
    return (Resource(ResourceKind.CPU if beside_compute else ResourceKind.COMPUTE, rank),)


@lru_cache(maxsize=1024)
def send_resources(rank: int) -> tuple[Resource, ...]:
    """The resources of a transfer whose receiver is not simulated."""
    return (Resource(ResourceKind.SEND, rank),)


@lru_cache(maxsize=1024)
def receive_resources(rank: int) -> tuple[Resource, ...]:
    """The resources of a transfer whose sender is not simulated."""
    return (Resource(ResourceKind.RECEIVE, rank),)


def transfer_resources(source: int, target: int, media: Sequence[int] = ()) -> tuple[Resource, ...]:
    """The resources of a transfer; `media` are the numbers of the shared media that it crosses."""
    ends = send_resources(source) + receive_resources(target)
    return ends + tuple(Resource(ResourceKind.MEDIUM, each) for each in media) if media else ends


class Task(NamedTuple):
    """A task occupies all of `resources` for `seconds`, once the tasks `after` have ended.

    Its successors may start `latency_seconds` later; this is a link's delay, which occupies no resource.
    For graphs, `layer` is the number of the segment, operator or tensor, and `tile` is the number of the request.
    """

    kind: TaskKind
    layer: int | None  # None: outside the layers
    tile: int | None  # the tile of rows that it computes or moves; None: all rows of the step, or of its rank
    peer: int | None  # computations: the rank whose heads or rows they are for; transfers: the receiver
    resources: tuple[Resource, ...]
    seconds: float
    after: tuple[int, ...] = ()
    latency_seconds: float = 0.0
    num_bytes: int = 0  # of a transfer; for the timeline only
    tensor: str = ""  # name of a graph's tensor that is transferred; for the timeline only


class Timeline(NamedTuple):
    """The start and the end of each task, in seconds, and the busy seconds of each resource."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    makespan: float
    busy_seconds: dict[Resource, float]


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run all tasks. When several tasks compete for a resource, the first in order starts.

    Raises ValueError if tasks depend on each other in a cycle, or on a task that does not exist.
    """
    num_unfinished = [len(task.after) for task in tasks]
    successors: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            if not 0 <= before < len(tasks):
                raise ValueError(f"task {index} comes after task {before}, which does not exist")
            successors[before].append(index)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    busy: dict[Resource, float] = defaultdict(float)
    held: set[Resource] = set()
    queues: dict[Resource, list[int]] = defaultdict(list)  # ready tasks that wait for a resource
    events: list[tuple[float, int, int]] = []  # time, kind (0 release, 1 arrive), task
    ready = [index for index, count in enumerate(num_unfinished) if count == 0]
    heapq.heapify(ready)
    now, done = 0.0, 0
    while ready or events:
        while ready:
            index = heapq.heappop(ready)
            task = tasks[index]
            for resource in task.resources:
                if resource in held:
                    heapq.heappush(queues[resource], index)
                    for free in task.resources:  # that it may have been woken for
                        if free not in held and queues[free]:
                            heapq.heappush(ready, heapq.heappop(queues[free]))
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
                    if queues[resource]:  # the others wait on, as long as this one takes the resource
                        heapq.heappush(ready, heapq.heappop(queues[resource]))
                ends[index] = now + task.latency_seconds
                if task.latency_seconds > 0:
                    heapq.heappush(events, (now + task.latency_seconds, 1, index))
                    continue
            done += 1
            for successor in successors[index]:
                num_unfinished[successor] -= 1
                if num_unfinished[successor] == 0:
                    heapq.heappush(ready, successor)
    if done != len(tasks):
        raise ValueError("some tasks wait for each other")
    return Timeline(tuple(starts), tuple(ends), max(ends, default=0.0), dict(busy))


def simulated_traces(tasks: Sequence[Task], timeline: Timeline, names: Sequence[str]) -> tuple[DeviceTrace, ...]:
    """One trace per device. `names` are the devices by rank.

    An end of a transfer that is not simulated belongs to the coordinator, which is the last rank.
    """
    # Plans do without, and importing all messages takes a third of the time in which a planner process starts.
    from hearth.wire.messages import DeviceTrace, TraceEvent

    coordinator_rank = len(names)
    events: list[list[TraceEvent]] = [[] for _ in (*names, _COORDINATOR)]

    def add(
        rank: int, lane: Literal["compute", "send", "receive"], task: Task, peer: int | None, start: float, end: float
    ) -> None:
        events[rank].append(
            TraceEvent(
                lane=lane, kind=task.kind, layer=task.layer, tile=task.tile, peer=peer,
                tensor=task.tensor[-_MAX_TENSOR_CHARACTERS:], start_seconds=start, end_seconds=end, num_bytes=task.num_bytes,
            )
        )  # fmt: skip

    for task, start, end in zip(tasks, timeline.starts, timeline.ends, strict=True):
        rank_of = {resource.kind: resource.rank for resource in task.resources}
        computes = rank_of.get(ResourceKind.COMPUTE, rank_of.get(ResourceKind.CPU))
        if computes is not None:
            add(computes, "compute", task, task.peer, start, end)
        else:
            sender = rank_of.get(ResourceKind.SEND, coordinator_rank)
            receiver = rank_of.get(ResourceKind.RECEIVE, coordinator_rank)
            add(sender, "send", task, receiver, start, start)
            add(receiver, "receive", task, sender, end, end)
    recorded = zip((*names, _COORDINATOR), events, strict=True)
    traces = (DeviceTrace(device=name, rank=rank, events=tuple(own)) for rank, (name, own) in enumerate(recorded))
    return tuple(trace for trace in traces if trace.rank < coordinator_rank or trace.events)
