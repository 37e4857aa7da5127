"""Cut a graph at operators that every path passes through, so that the makespan is a shortest path (paths.py). Pure.

Such a cut vertex separates the schedule in time: when it ends, everything before it is done, and nothing after it has
begun. A segment therefore depends on the rest only by the device of its first operator; the makespan is the shortest
path over (cut vertex, device), where an arc costs the makespan of its segment between two devices. This also holds with
congestion control, since no transfer is in flight at that moment. Where memory binds, it is only a lower bound.

Near cuts may serve too: vertices to which few operators are parallel and which some flows bypass. Those operators and
flows are left out, and the path is a lower bound only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from coordinator.plan.graph.bits import reachable_sets, set_bits
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send
from coordinator.plan.solution import Stop

# Limits of a near cut. Dropped operators weaken the bound and must be placed by list scheduling, so most of a segment has to
# remain; without any near cut, a large segment could not be solved.
_MAX_PARALLEL_FRACTION = 0.3  # of a segment's operators, that may be parallel to a near cut
_MAX_DROPPED_FRACTION = 0.2  # of the segment's work, that may be dropped for a near cut
# Of a bypassing flow, as a fraction of the segment's work: decides between cuts that drop similar work.
_TRANSFER_COST = 0.01


@dataclass(frozen=True)
class Cuts:
    """Cut vertices, in the order in which they run; `dropped` are operators parallel to near cuts, left out."""

    operators: tuple[int, ...]
    dropped: frozenset[int] = frozenset()


class Reachability:
    """The ancestors and descendants of each operator, as bit sets."""

    def __init__(self, problem: PlacementProblem) -> None:
        n = problem.num_operators
        self.ancestors = reachable_sets(problem.predecessors, range(n))
        self.descendants = reachable_sets(problem.successors, reversed(range(n)))
        self._all = (1 << n) - 1

    def parallel_to(self, operator: int) -> int:
        """The operators parallel to this one: neither its ancestors nor its descendants."""
        return self._all & ~(self.ancestors[operator] | self.descendants[operator] | 1 << operator)


def exact_cuts(problem: PlacementProblem, reachability: Reachability) -> Cuts:
    """All operators to which no other is parallel, and which no transfer bypasses."""
    candidates = [i for i in range(problem.num_operators) if not reachability.parallel_to(i)]
    late = any(map(any, problem.latency))
    # Numbers are in topological order: the ancestors of such an operator have lower numbers, its descendants higher ones.
    changes = [0] * (problem.num_operators + 1)  # at each operator, in the number of flows that bypass it
    for flow in problem.flows:
        if late or any(map(any, flow.seconds)):
            changes[flow.source + 1] += 1
            changes[max(flow.targets)] -= 1
    bypassing = list(accumulate(changes))
    return Cuts(tuple(cut for cut in candidates if not bypassing[cut]))


def near_cuts(
    problem: PlacementProblem, reachability: Reachability, cuts: Cuts, max_operators: int, stop: Stop
) -> Cuts:
    """Add near cuts until no segment has more than `max_operators`, no further cut is cheap enough, or `stop()` is true.

    Each step takes the vertex of a large segment that has the least parallel work, and drops that work. A transfer that
    bypasses the vertex adds a small cost.
    """
    work = [min(row) for row in problem.seconds]
    bypassing = _bypassing_flows(problem, reachability)
    chosen, dropped, dropped_flows = set(cuts.operators), 0, 0
    todo = _operators_between(reachability, cuts.operators)
    while todo and not stop():
        segment = todo.pop() & ~dropped
        if segment.bit_count() <= max_operators:
            continue
        inside = list(set_bits(segment))
        total = sum(work[i] for i in inside) or 1.0
        max_parallel = _MAX_PARALLEL_FRACTION * len(inside)
        best = (_MAX_DROPPED_FRACTION, -1)
        for i in inside:
            if stop():
                break
            parallel = reachability.parallel_to(i) & segment
            if parallel.bit_count() <= max_parallel:
                transfers = (bypassing[i] & ~dropped_flows).bit_count() * _TRANSFER_COST
                best = min(best, (sum(work[j] for j in set_bits(parallel)) / total + transfers, i))
        if best[1] < 0:
            continue
        dropped |= reachability.parallel_to(best[1])
        dropped_flows |= bypassing[best[1]]
        # Vertices that have become exact cuts by this are free.
        new = [
            i
            for i in inside
            if not reachability.parallel_to(i) & segment & ~dropped and not bypassing[i] & ~dropped_flows
        ]
        chosen.update(new)
        in_order = sorted(new, key=lambda i: reachability.ancestors[i].bit_count())
        todo += [part & segment for part in _operators_between(reachability, in_order)]
    order = sorted(chosen, key=lambda i: reachability.ancestors[i].bit_count())
    return Cuts(tuple(order), frozenset(set_bits(dropped)))


def _operators_between(reachability: Reachability, cuts: Sequence[int]) -> list[int]:
    """The operators before the first cut, between consecutive cuts, and after the last, as bit sets."""
    everything = (1 << len(reachability.ancestors)) - 1
    after = [everything, *(reachability.descendants[cut] for cut in cuts)]
    before = [*(reachability.ancestors[cut] for cut in cuts), everything]
    return [a & b for a, b in zip(after, before, strict=True)]


def _bypassing_flows(problem: PlacementProblem, reachability: Reachability) -> list[int]:
    """By operator, the flows that bypass it (from an ancestor to a descendant) and take time, as bit sets."""
    bypassing = [0] * problem.num_operators
    late = any(map(any, problem.latency))
    for index, flow in enumerate(problem.flows):
        if late or any(map(any, flow.seconds)):
            until = 0
            for target in flow.targets:
                until |= reachability.ancestors[target]
            for operator in set_bits(reachability.descendants[flow.source] & until):
                bypassing[operator] |= 1 << index
    return bypassing


@dataclass(frozen=True)
class CutSegment:
    """A separate problem: the operators after one cut vertex, up to and including the next.

    If `has_entry`, its first operator is the earlier cut vertex, which has already run and takes no time here. If
    `has_exit`, its last operator is the later cut vertex.
    """

    problem: PlacementProblem
    operators: tuple[int, ...]  # of the whole problem
    flows: tuple[int, ...]
    has_entry: bool
    has_exit: bool

    def pins(self, entry: int, exit_: int) -> dict[int, int]:
        pinned = {0: entry} if self.has_entry else {}
        if self.has_exit:
            pinned[len(self.operators) - 1] = exit_
        return pinned


def cut_segments(problem: PlacementProblem, cuts: Cuts, reachability: Reachability) -> list[CutSegment]:
    """The segments in the order of the cuts, without memory. Identical blocks give equal problems."""
    parts: list[list[int]] = [[] for _ in range(len(cuts.operators) + 1)]
    cut_bits = sum(1 << cut for cut in cuts.operators)
    for i in range(problem.num_operators):
        if i not in cuts.dropped:
            parts[(reachability.ancestors[i] & cut_bits).bit_count()].append(i)
    segments = []
    for index, part in enumerate(parts):
        has_entry, has_exit = index > 0, index < len(cuts.operators)
        operators = ([cuts.operators[index - 1]] if has_entry else []) + part
        if not part:
            continue
        local = {operator: position for position, operator in enumerate(operators)}
        last = cuts.operators[index] if has_exit else None
        flows, flow_numbers = [], []
        for operator in operators:
            for number in problem.outgoing[operator] if operator != last else ():
                flow = problem.flows[number]
                targets = tuple(local[target] for target in flow.targets if target in local)
                if targets:
                    flows.append(Flow(local[operator], targets, flow.seconds))
                    flow_numbers.append(number)
        zero_seconds = (0.0,) * problem.num_devices
        subproblem = replace(
            problem,
            operators=tuple(map(str, range(len(operators)))),
            seconds=tuple(
                zero_seconds if has_entry and position == 0 else problem.seconds[operator]
                for position, operator in enumerate(operators)
            ),
            memory_bytes=(0,) * len(operators),
            flows=tuple(flows),
            shared=(),
            groups=(),
            fitting=(),
        )
        segments.append(CutSegment(subproblem, tuple(operators), tuple(flow_numbers), has_entry, has_exit))
    return segments


class JoinedSchedule(NamedTuple):
    """The schedules of consecutive segments as one. Devices and starts by operator; dropped operators are missing."""

    assignment: dict[int, int]
    starts: dict[int, float]
    order: list[Item]
    makespan: float


def join_schedules(segments: Sequence[CutSegment], schedules: Sequence[Schedule]) -> JoinedSchedule:
    """The segments' schedules as one."""
    joined = JoinedSchedule({}, {}, [], sum(part.makespan for part in schedules))
    began = 0.0
    for segment, part in zip(segments, schedules, strict=True):
        for item in part.order:
            if isinstance(item, Send):
                joined.order.append(Send(segment.flows[item.flow], item.device))
            elif item > 0 or not segment.has_entry:
                joined.order.append(segment.operators[item])
                joined.starts[segment.operators[item]] = began + part.starts[item]
        joined.assignment.update(zip(segment.operators, part.assignment, strict=True))
        began += part.makespan
    return joined
