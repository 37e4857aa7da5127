"""Scheduling of segments on one rank: a state machine over tensor names, without values, clocks or sockets. Pure.

Work-conserving: a segment of a request can run as soon as all its inputs are there; the oldest request's first ready segment,
in the plan's order, runs next. Memory is bounded: the number of requests is limited, and each holds only inputs of its
segments.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hearth.errors import BadPlan, BadRequest, QueueFull
from hearth.plan.plan import GraphPlan

MAX_SENT_TENSORS = 1 << 16  # tensors sent between ranks, which have 16-bit numbers on the wire
# Number of ended steps that are remembered, so that their late tensors are not mistaken for those of a new step. Far more than
# are usually in flight.
_MAX_ENDED_STEPS = 1024


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
    graph_inputs: frozenset[str]  # inputs of the graph that come from the coordinator
    sources: Mapping[str, int]  # the source rank of each tensor that comes from another rank
    targets: Mapping[str, tuple[int, ...]]  # the other ranks that consume a tensor of this rank
    graph_outputs: tuple[str, ...]  # outputs of the graph that this rank produces
    sent_tensors: tuple[str, ...]  # all tensors sent between ranks; the index is the number on the wire
    num_consumers: Mapping[str, int]  # number of segments of this rank that consume a tensor


def routes_for(plan: GraphPlan, rank: int) -> Routes:
    """Build the routes of a rank.

    Raises BadPlan if two segments produce the same tensor, or too many tensors are sent between ranks.
    """
    source: dict[str, int] = {}
    consumers: dict[str, set[int]] = {}
    for segment in plan.body.segments:
        for name in segment.outputs:
            if name in source or name in plan.model.inputs:
                raise BadPlan(reason=f"two segments produce the tensor {name}")
            source[name] = segment.rank
        for name in segment.inputs:
            consumers.setdefault(name, set()).add(segment.rank)
    others = {name: tuple(sorted(consumers.get(name, set()) - {producer})) for name, producer in source.items()}
    sent_tensors = tuple(name for name, ranks in others.items() if ranks)
    if len(sent_tensors) > MAX_SENT_TENSORS:
        reason = f"{len(sent_tensors)} tensors are sent between devices; at most {MAX_SENT_TENSORS} are supported"
        raise BadPlan(reason=reason)
    own = tuple(
        OwnSegment(index, tuple(dict.fromkeys(segment.inputs)), segment.outputs)
        for index, segment in enumerate(plan.body.segments)
        if segment.rank == rank
    )
    consumed = [name for segment in own for name in segment.inputs]
    return Routes(
        plan=plan,
        rank=rank,
        segments=own,
        graph_inputs=frozenset(name for name in consumed if name in plan.model.inputs),
        sources={name: source[name] for name in consumed if name not in plan.model.inputs and source[name] != rank},
        targets={name: ranks for name, ranks in others.items() if ranks and source[name] == rank},
        graph_outputs=tuple(name for name in plan.model.outputs if source.get(name) == rank),
        sent_tensors=sent_tensors,
        num_consumers={name: consumed.count(name) for name in consumed},
    )


class ReadySegment(NamedTuple):
    """One segment of one step."""

    step: int
    segment: int  # index into `Routes.segments`


class OverdueStep(NamedTuple):
    """A step past its deadline. `tensor` is one that has not arrived (None: all have), `source` its rank."""

    step: int
    tensor: str | None
    source: int | None


@dataclass
class _Step:
    deadline: float
    late_at: float
    num_missing: list[int]  # by segment of this rank: number of inputs that have not arrived
    num_consumers: dict[str, int]  # by arrived tensor: number of segments of this rank that will still consume it
    is_open: bool = False
    arrived: set[str] = field(default_factory=set)
    ready: list[int] = field(default_factory=list)  # a heap
    num_remaining: int = 0  # segments of this rank that have not finished


class GraphSchedule:
    """Holds at most `max_in_flight` open steps, and the same number of steps whose tensors arrived before `open`.

    The calls for a step are: `open`; `add_tensor` for each tensor from outside (possibly before `open`); `start_next` and
    `finish` for each segment of this rank; `end`. All times are of one clock.
    """

    def __init__(self, routes: Routes, max_in_flight: int) -> None:
        self._routes = routes
        self._max_in_flight = max_in_flight
        self._steps: dict[int, _Step] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED_STEPS)
        self._oldest_known = 0  # steps below this number have ended, and are no longer remembered
        self._consumers: dict[str, list[int]] = {}
        for index, segment in enumerate(routes.segments):
            for name in segment.inputs:
                self._consumers.setdefault(name, []).append(index)

    @property
    def num_open(self) -> int:
        return sum(step.is_open for step in self._steps.values())

    @property
    def next_deadline(self) -> float | None:
        return min((step.deadline for step in self._steps.values()), default=None)

    def open(self, number: int, deadline: float, late_at: float = math.inf) -> None:
        """Open a step. Raises QueueFull if too many are open, BadRequest for a step that was opened before.

        From `late_at` on, the rank of a tensor that has not arrived counts as late.
        """
        step = self._steps.get(number)
        if self._has_ended(number) or (step is not None and step.is_open):
            raise BadRequest(reason=f"step {number} was already started, or has ended")
        if self.num_open >= self._max_in_flight:
            raise QueueFull(limit=self._max_in_flight)
        step = step or self._new_step(number, deadline)
        step.is_open = True
        step.deadline, step.late_at = deadline, late_at

    def accepts(self, number: int, name: str) -> bool:
        """Whether to accept a tensor: this rank must consume it, for the first time, in a step that has not ended."""
        step = self._steps.get(number)
        if name not in self._consumers or self._has_ended(number):
            return False
        if step is None:
            return len(self._steps) - self.num_open < self._max_in_flight
        return name not in step.arrived

    def add_tensor(self, number: int, name: str, deadline: float) -> bool:
        """Register an arrived tensor; False if not accepted. A step that is not open yet must be opened by `deadline`."""
        if not self.accepts(number, name):
            return False
        step = self._steps.get(number) or self._new_step(number, deadline)
        self._add_tensor(step, name)
        return True

    def start_next(self) -> ReadySegment | None:
        """Return the next segment to run, and mark it as running; None if none is ready."""
        for number in sorted(self._steps):
            step = self._steps[number]
            if step.is_open and step.ready:
                return ReadySegment(number, heapq.heappop(step.ready))
        return None

    def finish(self, ready: ReadySegment) -> tuple[tuple[str, ...], bool]:
        """Register that a segment has run: its inputs are used, its outputs have arrived.

        Returns the step's tensors that no segment of this rank needs any more, and whether all its segments have run.
        """
        step, segment = self._steps[ready.step], self._routes.segments[ready.segment]
        for name in segment.inputs:
            step.num_consumers[name] -= 1
        for name in segment.outputs:
            self._add_tensor(step, name)
        released = [name for name in (*segment.inputs, *segment.outputs) if not step.num_consumers[name]]
        for name in released:
            del step.num_consumers[name]
        step.num_remaining -= 1
        return tuple(released), step.num_remaining == 0

    def end(self, number: int) -> None:
        """Forget a step, whatever its state, because it was answered or aborted."""
        if self._has_ended(number):
            return
        self._steps.pop(number, None)
        if len(self._ended) == _MAX_ENDED_STEPS:
            self._oldest_known = max(self._oldest_known, self._ended[0] + 1)
        self._ended.append(number)

    def overdue(self, now: float) -> list[OverdueStep]:
        """The steps past their deadlines. They are kept until `end`."""
        return [self._overdue_step(number, step) for number, step in self._steps.items() if step.deadline <= now]

    def late_source(self, now: float) -> int | None:
        """The rank of a tensor that a step lacks unusually long; None if there is none."""
        late = (self._overdue_step(number, step) for number, step in self._steps.items() if step.late_at <= now)
        return next((each.source for each in late if each.source is not None), None)

    def _overdue_step(self, number: int, step: _Step) -> OverdueStep:
        for name, source in self._routes.sources.items():
            if name not in step.arrived:
                return OverdueStep(number, name, source)
        return OverdueStep(number, None, None)

    def _new_step(self, number: int, deadline: float) -> _Step:
        step = _Step(
            deadline=deadline, late_at=math.inf, num_missing=[len(each.inputs) for each in self._routes.segments],
            num_consumers={},
            num_remaining=len(self._routes.segments),
        )  # fmt: skip
        step.ready = [index for index, num_missing in enumerate(step.num_missing) if not num_missing]
        self._steps[number] = step
        return step

    def _add_tensor(self, step: _Step, name: str) -> None:
        consumers = self._consumers.get(name, [])
        step.arrived.add(name)
        step.num_consumers[name] = len(consumers)
        for index in consumers:
            step.num_missing[index] -= 1
            if not step.num_missing[index]:
                heapq.heappush(step.ready, index)

    def _has_ended(self, number: int) -> bool:
        """Whether a step has ended. Numbers increase, so a step older than all remembered ones has ended unless it is held."""
        return number not in self._steps and (number < self._oldest_known or number in self._ended)
