"""Scheduling of segments on one rank: a state machine over tensor names, without values, clocks or sockets. Pure.

Work-conserving: a segment of a request can run as soon as all its inputs are there; the oldest request's first ready segment,
in the plan's order, runs next. Memory is bounded: the number of requests is limited, and each holds only inputs of its
segments.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hearth.errors import BadPlan, BadRequest, QueueFull
from hearth.plan.graph import Segment
from hearth.plan.plan import GraphPlan

MAX_TRAVELLING = 1 << 16  # tensors sent between ranks, which have 16-bit numbers on the wire
# Number of ended steps that are remembered, so that their late tensors are not mistaken for those of a new step.
_REMEMBERED = 1024


class OwnSegment(NamedTuple):
    """A segment of this rank."""

    number: int  # its index in the plan
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Routes:
    """Sources and destinations of a plan's tensors, from the point of view of one rank."""

    plan: GraphPlan
    rank: int
    segments: tuple[OwnSegment, ...]
    fed: frozenset[str]  # inputs of the graph that come from the coordinator
    awaited: Mapping[str, int]  # the source rank of each tensor that comes from another rank
    targets: Mapping[str, tuple[int, ...]]  # the other ranks that consume a tensor of this rank
    results: tuple[str, ...]  # outputs of the graph that this rank produces
    travelling: tuple[str, ...]  # all tensors sent between ranks; the index is the number on the wire
    uses: Mapping[str, int]  # number of segments of this rank that consume a tensor


def routes_of(plan: GraphPlan, rank: int) -> Routes:
    """Build the routes of a rank.

    Raises BadPlan if two segments produce the same tensor, or too many tensors are sent between ranks.
    """
    source: dict[str, int] = {}
    takers: dict[str, set[int]] = {}
    for segment in plan.body.segments:
        for name in segment.outputs:
            if name in source or name in plan.model.inputs:
                raise BadPlan(reason=f"two segments produce the tensor {name}")
            source[name] = segment.rank
        for name in segment.inputs:
            takers.setdefault(name, set()).add(segment.rank)
    others = {name: tuple(sorted(takers.get(name, set()) - {made_by})) for name, made_by in source.items()}
    travelling = tuple(name for name, ranks in others.items() if ranks)
    if len(travelling) > MAX_TRAVELLING:
        raise BadPlan(
            reason=f"{len(travelling)} tensors are sent between devices; at most {MAX_TRAVELLING} are supported"
        )
    own = tuple(
        OwnSegment(index, _unique(segment), segment.outputs)
        for index, segment in enumerate(plan.body.segments)
        if segment.rank == rank
    )
    taken = [name for segment in own for name in segment.inputs]
    return Routes(
        plan=plan,
        rank=rank,
        segments=own,
        fed=frozenset(name for name in taken if name in plan.model.inputs),
        awaited={name: source[name] for name in taken if name not in plan.model.inputs and source[name] != rank},
        targets={name: ranks for name, ranks in others.items() if ranks and source[name] == rank},
        results=tuple(name for name in plan.model.outputs if source.get(name) == rank),
        travelling=travelling,
        uses={name: taken.count(name) for name in taken},
    )


class Task(NamedTuple):
    """One segment of one step."""

    step: int
    segment: int  # index into `Routes.segments`


class Late(NamedTuple):
    """A step past its deadline. `awaited` is a tensor that has not arrived (None: all have), `source` its rank."""

    step: int
    awaited: str | None
    source: int | None


@dataclass
class _Step:
    deadline: float
    missing: list[int]  # by segment of this rank: number of inputs that have not arrived
    uses: dict[str, int]  # by arrived tensor: number of segments of this rank that will still consume it
    is_open: bool = False
    seen: set[str] = field(default_factory=set)
    ready: list[int] = field(default_factory=list)  # a heap
    left: int = 0  # segments of this rank that have not finished


class GraphSchedule:
    """Holds at most `max_in_flight` open steps, and the same number of steps whose tensors arrived before `open`.

    The calls for a step are: `open`; `arrive` for each tensor from outside (possibly before `open`); `start` and `finish`
    for each segment of this rank; `end`. All times are of one clock.
    """

    def __init__(self, routes: Routes, max_in_flight: int) -> None:
        self._routes = routes
        self._max_in_flight = max_in_flight
        self._steps: dict[int, _Step] = {}
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._oldest_known = 0  # steps below this number have ended, and are no longer remembered
        self._takers: dict[str, list[int]] = {}
        for index, segment in enumerate(routes.segments):
            for name in segment.inputs:
                self._takers.setdefault(name, []).append(index)

    @property
    def num_open(self) -> int:
        return sum(step.is_open for step in self._steps.values())

    @property
    def next_deadline(self) -> float | None:
        return min((step.deadline for step in self._steps.values()), default=None)

    def open(self, number: int, deadline: float) -> None:
        """Open a step. Raises QueueFull if too many are open, BadRequest for a step that was opened before."""
        step = self._steps.get(number)
        if self._is_over(number) or (step is not None and step.is_open):
            raise BadRequest(reason=f"step {number} was already started, or has ended")
        if self.num_open >= self._max_in_flight:
            raise QueueFull(limit=self._max_in_flight)
        step = step or self._new(number, deadline)
        step.is_open = True
        step.deadline = deadline

    def wants(self, number: int, name: str) -> bool:
        """Whether to accept a tensor: this rank must consume it, for the first time, in a step that has not ended."""
        step = self._steps.get(number)
        if name not in self._takers or self._is_over(number):
            return False
        if step is None:
            return len(self._steps) - self.num_open < self._max_in_flight
        return name not in step.seen

    def arrive(self, number: int, name: str, deadline: float) -> bool:
        """Register an arrived tensor; False if not wanted. A step that is not open yet must be opened by `deadline`."""
        if not self.wants(number, name):
            return False
        step = self._steps.get(number) or self._new(number, deadline)
        self._add(step, name)
        return True

    def start(self) -> Task | None:
        """Return the next segment to run, and mark it as running; None if none is ready."""
        for number in sorted(self._steps):
            step = self._steps[number]
            if step.is_open and step.ready:
                return Task(number, heapq.heappop(step.ready))
        return None

    def finish(self, task: Task) -> tuple[tuple[str, ...], bool]:
        """Register that a segment has run: its inputs are used, its outputs have arrived.

        Returns the step's tensors that no segment of this rank needs any more, and whether all its segments have run.
        """
        step, segment = self._steps[task.step], self._routes.segments[task.segment]
        for name in segment.inputs:
            step.uses[name] -= 1
        for name in segment.outputs:
            self._add(step, name)
        done_with = [name for name in (*segment.inputs, *segment.outputs) if not step.uses[name]]
        for name in done_with:
            del step.uses[name]
        step.left -= 1
        return tuple(done_with), step.left == 0

    def end(self, number: int) -> None:
        """Forget a step, whatever its state, because it was answered or aborted."""
        if self._is_over(number):
            return
        self._steps.pop(number, None)
        if len(self._ended) == _REMEMBERED:
            self._oldest_known = max(self._oldest_known, self._ended[0] + 1)
        self._ended.append(number)

    def late(self, now: float) -> list[Late]:
        """The steps past their deadlines. They are kept until `end`."""
        return [self._late(number, step) for number, step in self._steps.items() if step.deadline <= now]

    def _late(self, number: int, step: _Step) -> Late:
        for name, source in self._routes.awaited.items():
            if name not in step.seen:
                return Late(number, name, source)
        return Late(number, None, None)

    def _new(self, number: int, deadline: float) -> _Step:
        step = _Step(
            deadline=deadline, missing=[len(each.inputs) for each in self._routes.segments], uses={},
            left=len(self._routes.segments),
        )  # fmt: skip
        step.ready = [index for index, missing in enumerate(step.missing) if not missing]
        self._steps[number] = step
        return step

    def _add(self, step: _Step, name: str) -> None:
        takers = self._takers.get(name, [])
        step.seen.add(name)
        step.uses[name] = len(takers)
        for index in takers:
            step.missing[index] -= 1
            if not step.missing[index]:
                heapq.heappush(step.ready, index)

    def _is_over(self, number: int) -> bool:
        """Whether a step has ended. Numbers increase, so a step older than all remembered ones has ended unless it is held."""
        return number not in self._steps and (number < self._oldest_known or number in self._ended)


def _unique(segment: Segment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(segment.inputs))
