"""Cut a graph where every way goes through one operator, and the makespan becomes a shortest path (paths.py). Pure.

Such a cut vertex separates the schedule in time: everything before it is done before it ends, and nothing after it has
begun. So all that a segment needs to know of the rest is on which device its first operator ran; the makespan is the
shortest path over (cut vertex, device), and an arc costs what its segment takes between two devices. This holds with
congestion control too, since at that moment no transfer is under way; not where memory binds, then it is a bound.

Vertices that are nearly cuts (few operators run beside them, some flows pass them by) may serve too: what is beside or
passes by is left out, and the path is a lower bound only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordinator.plan.graph.bits import members, reached
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send

_MOST_BESIDE = 0.3  # of a segment's operators may run beside a near cut in it
_MOST_COST = 0.2  # of the segment's work may be dropped for it
_COST_OF_A_TRANSFER = 0.01  # of the segment's work


@dataclass(frozen=True)
class Cuts:
    """Operators that follow each other, all of which run one after another; `dropped` run beside them."""

    operators: tuple[int, ...]
    dropped: frozenset[int] = frozenset()


class Reach:
    """Which operators come before and after each: bit sets."""

    def __init__(self, problem: PlacementProblem) -> None:
        n = problem.num_operators
        self.before = reached(problem.predecessors, range(n))
        self.after = reached(problem.successors, reversed(range(n)))
        self._all = (1 << n) - 1

    def beside(self, operator: int) -> int:
        return self._all & ~(self.before[operator] | self.after[operator] | 1 << operator)


def exact_cuts(problem: PlacementProblem, reach: Reach) -> Cuts:
    """All operators that everything else comes before or after, and that no transfer passes by."""
    found = [i for i in range(problem.num_operators) if not reach.beside(i)]
    late = any(map(any, problem.latency))
    spans = [(f.source, max(f.targets)) for f in problem.flows if late or any(map(any, f.seconds))]
    # What comes before such an operator has a lower number, and what comes after it a higher one.
    return Cuts(tuple(cut for cut in found if not any(source < cut < last for source, last in spans)))


def near_cuts(problem: PlacementProblem, reach: Reach, cuts: Cuts, most_operators: int) -> Cuts:
    """More cuts, until no segment has more operators than that or none is cheap enough.

    Each time the vertex of a large segment is taken that the least work runs beside; that work is dropped. A transfer
    that passes it by costs a little.
    """
    work = [min(row) for row in problem.seconds]
    passing = _passing(problem, reach)
    chosen, dropped, lost = set(cuts.operators), 0, 0
    todo = _between(reach, cuts.operators)
    while todo:
        segment = todo.pop() & ~dropped
        if segment.bit_count() <= most_operators:
            continue
        inside = list(members(segment))
        total = sum(work[i] for i in inside) or 1.0
        most_beside = _MOST_BESIDE * len(inside)
        best = (_MOST_COST, -1)
        for i in inside:
            beside = reach.beside(i) & segment
            if beside.bit_count() <= most_beside:
                transfers = (passing[i] & ~lost).bit_count() * _COST_OF_A_TRANSFER
                best = min(best, (sum(work[j] for j in members(beside)) / total + transfers, i))
        if best[1] < 0:
            continue
        dropped |= reach.beside(best[1])
        lost |= passing[best[1]]
        # What else is a cut now comes for nothing.
        new = [i for i in inside if not reach.beside(i) & segment & ~dropped and not passing[i] & ~lost]
        chosen.update(new)
        todo += [part & segment for part in _between(reach, sorted(new, key=lambda i: reach.before[i].bit_count()))]
    order = sorted(chosen, key=lambda i: reach.before[i].bit_count())
    return Cuts(tuple(order), frozenset(members(dropped)))


def _between(reach: Reach, cuts: Sequence[int]) -> list[int]:
    """What lies before the first cut, between two, and after the last: bit sets."""
    everything = (1 << len(reach.before)) - 1
    after = [everything, *(reach.after[cut] for cut in cuts)]
    before = [*(reach.before[cut] for cut in cuts), everything]
    return [a & b for a, b in zip(after, before, strict=True)]


def _passing(problem: PlacementProblem, reach: Reach) -> list[int]:
    """By operator, the flows from before it to after it that take time: bit sets."""
    found = [0] * problem.num_operators
    late = any(map(any, problem.latency))
    for index, flow in enumerate(problem.flows):
        if late or any(map(any, flow.seconds)):
            until = 0
            for target in flow.targets:
                until |= reach.before[target]
            for operator in members(reach.after[flow.source] & until):
                found[operator] |= 1 << index
    return found


@dataclass(frozen=True)
class Segment:
    """A problem of its own: the operators after a cut vertex, up to and with the next one, from the end of the first.

    Its first operator is that cut vertex, already run, if `has_entry`; its last one the next, if `has_exit`.
    """

    problem: PlacementProblem
    operators: tuple[int, ...]  # of the whole problem
    flows: tuple[int, ...]
    has_entry: bool
    has_exit: bool

    def pins(self, entry: int, exit_: int) -> dict[int, int]:
        found = {0: entry} if self.has_entry else {}
        if self.has_exit:
            found[len(self.operators) - 1] = exit_
        return found


def segments_of(problem: PlacementProblem, cuts: Cuts, reach: Reach) -> list[Segment]:
    """In the order of the cuts; equal ones have equal problems. Memory is left out."""
    parts: list[list[int]] = [[] for _ in range(len(cuts.operators) + 1)]
    cut_bits = sum(1 << cut for cut in cuts.operators)
    for i in range(problem.num_operators):
        if i not in cuts.dropped:
            parts[(reach.before[i] & cut_bits).bit_count()].append(i)
    found = []
    for index, part in enumerate(parts):
        has_entry, has_exit = index > 0, index < len(cuts.operators)
        operators = ([cuts.operators[index - 1]] if has_entry else []) + part
        if not part:
            continue
        local = {operator: position for position, operator in enumerate(operators)}
        last = cuts.operators[index] if has_exit else None
        flows, kept = [], []
        for operator in operators:
            for number in problem.outgoing[operator] if operator != last else ():
                flow = problem.flows[number]
                targets = tuple(local[target] for target in flow.targets if target in local)
                if targets:
                    flows.append(Flow(local[operator], targets, flow.seconds))
                    kept.append(number)
        nothing = (0.0,) * problem.num_devices
        alone = replace(
            problem,
            operators=tuple(map(str, range(len(operators)))),
            seconds=tuple(
                nothing if has_entry and position == 0 else problem.seconds[operator]
                for position, operator in enumerate(operators)
            ),
            memory_bytes=(0,) * len(operators),
            flows=tuple(flows),
            shared=(),
        )
        found.append(Segment(alone, tuple(operators), tuple(kept), has_entry, has_exit))
    return found


class Joined(NamedTuple):
    """Segments one after another. Devices and starts by operator; what was dropped is in none of them."""

    assignment: dict[int, int]
    starts: dict[int, float]
    order: list[Item]
    makespan: float


def joined(segments: Sequence[Segment], schedules: Sequence[Schedule]) -> Joined:
    """The segments' schedules as one."""
    found = Joined({}, {}, [], sum(part.makespan for part in schedules))
    began = 0.0
    for segment, part in zip(segments, schedules, strict=True):
        for item in part.order:
            if isinstance(item, Send):
                found.order.append(Send(segment.flows[item.flow], item.device))
            elif item > 0 or not segment.has_entry:
                found.order.append(segment.operators[item])
                found.starts[segment.operators[item]] = began + part.starts[item]
        found.assignment.update(zip(segment.operators, part.assignment, strict=True))
        began += part.makespan
    return found
