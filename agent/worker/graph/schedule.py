"""Which segment of which request a rank runs next: a state machine over names, without values, clocks or sockets. Pure.

Work-conserving: a segment of a request can run as soon as its inputs are there, and of those that can, the oldest
request's first one in the plan's order does. What is held is bounded: so many requests, each with what its segments take.
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

MAX_TRAVELLING = 1 << 16  # tensors between ranks: the wire numbers them in 16 bits
# Steps that ended lately are remembered, so that their late tensors are not taken for those of a step to come.
_REMEMBERED = 1024


class OwnSegment(NamedTuple):
    number: int  # its place in the plan
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Routes:
    """Where the tensors of a plan go, as one rank sees it."""

    plan: GraphPlan
    rank: int
    segments: tuple[OwnSegment, ...]
    fed: frozenset[str]  # inputs of the graph that come from the coordinator
    awaited: Mapping[str, int]  # the rank that each other tensor from outside comes from
    targets: Mapping[str, tuple[int, ...]]  # the other ranks that take a tensor of ours
    results: tuple[str, ...]  # outputs of the graph that we make
    travelling: tuple[str, ...]  # every tensor between ranks; its place here is its number on the wire
    uses: Mapping[str, int]  # how many of our segments take a tensor


def routes_of(plan: GraphPlan, rank: int) -> Routes:
    """Raises BadPlan when two segments make one tensor, or more tensors travel than the wire has numbers for."""
    source: dict[str, int] = {}
    takers: dict[str, set[int]] = {}
    for segment in plan.body.segments:
        for name in segment.outputs:
            if name in source or name in plan.model.inputs:
                raise BadPlan(reason=f"two segments make the tensor {name}")
            source[name] = segment.rank
        for name in segment.inputs:
            takers.setdefault(name, set()).add(segment.rank)
    others = {name: tuple(sorted(takers.get(name, set()) - {made_by})) for name, made_by in source.items()}
    travelling = tuple(name for name, ranks in others.items() if ranks)
    if len(travelling) > MAX_TRAVELLING:
        raise BadPlan(reason=f"{len(travelling)} tensors travel between devices, at most {MAX_TRAVELLING} can")
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
    step: int
    segment: int  # of `Routes.segments`


class Late(NamedTuple):
    """A step whose time is up. `awaited` and `source`: what did not come, and the rank that owes it."""

    step: int
    awaited: str | None
    source: int | None


@dataclass
class _Step:
    deadline: float
    missing: list[int]  # by own segment: inputs that are not there yet
    uses: dict[str, int]  # what is here: how many of our segments will still take it
    is_open: bool = False
    seen: set[str] = field(default_factory=set)
    ready: list[int] = field(default_factory=list)  # a heap
    left: int = 0


class GraphSchedule:
    """Holds at most `max_in_flight` open steps, and as many whose tensors came before their `open`.

    A step goes: `open`, `arrive` for each tensor from outside (which may come first), `start` and `finish` for each of
    our segments, `end`. Times are of any one clock.
    """

    def __init__(self, routes: Routes, max_in_flight: int) -> None:
        self._routes = routes
        self._max_in_flight = max_in_flight
        self._steps: dict[int, _Step] = {}
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._oldest_known = 0  # steps before it have ended, as far as anyone remembers
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
        """Raises QueueFull when too many are open, BadRequest for a step that was open before."""
        step = self._steps.get(number)
        if self._is_over(number) or (step is not None and step.is_open):
            raise BadRequest(reason=f"step {number} was started already, or is over")
        if self.num_open >= self._max_in_flight:
            raise QueueFull(limit=self._max_in_flight)
        step = step or self._new(number, deadline)
        step.is_open = True
        step.deadline = deadline

    def wants(self, number: int, name: str) -> bool:
        """Whether a tensor may still come: not one that nobody here takes, nor twice, nor for a step that is over."""
        step = self._steps.get(number)
        if name not in self._takers or self._is_over(number):
            return False
        if step is None:
            return len(self._steps) - self.num_open < self._max_in_flight
        return name not in step.seen

    def arrive(self, number: int, name: str, deadline: float) -> bool:
        """Take note of a tensor; False when `wants` says no. Until `deadline` its step must open, if it is not."""
        if not self.wants(number, name):
            return False
        step = self._steps.get(number) or self._new(number, deadline)
        self._add(step, name)
        return True

    def start(self) -> Task | None:
        """The segment to run next; it counts as running."""
        for number in sorted(self._steps):
            step = self._steps[number]
            if step.is_open and step.ready:
                return Task(number, heapq.heappop(step.ready))
        return None

    def finish(self, task: Task) -> tuple[tuple[str, ...], bool]:
        """A segment has run: its inputs are used once more, its outputs are there.

        Returns the tensors of the step that no segment of ours takes any more, and whether all of them have run.
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
        """Forget a step, whatever its state: it is answered, or was given up."""
        if self._is_over(number):
            return
        self._steps.pop(number, None)
        if len(self._ended) == _REMEMBERED:
            self._oldest_known = max(self._oldest_known, self._ended[0] + 1)
        self._ended.append(number)

    def late(self, now: float) -> list[Late]:
        """The steps whose time is up. They stay until `end`."""
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
        """Steps count up, so what is older than all that is remembered is over, unless it is still held."""
        return number not in self._steps and (number < self._oldest_known or number in self._ended)


def _unique(segment: Segment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(segment.inputs))
