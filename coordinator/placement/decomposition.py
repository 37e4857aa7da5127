"""Cut a graph where every way goes through one operator, and the makespan becomes a shortest path. Pure but for a clock.

Such a cut vertex separates the schedule in time: everything before it is done before it ends, and nothing after it has
begun. So all that a segment needs to know of the rest is on which device its first operator ran; the makespan is the
shortest path over (cut vertex, device), and an arc costs what its segment takes between two devices. This holds with
congestion control too, since at that moment no transfer is under way; not where memory binds, then it is a bound.

Arcs are solved only where they could matter: the shortest path under their lower bounds is looked for, its open arcs
are tightened, and this repeats until the path has only proven arcs.

Vertices that are nearly cuts (few operators run beside them, some flows pass them by) may serve too: what is beside or
passes by is left out, and the path is a lower bound only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from coordinator.placement.bounds import relaxed_makespan
from coordinator.placement.cpsat import Effort, solve_model
from coordinator.placement.heft import heft
from coordinator.placement.problem import Flow, PlacementProblem
from coordinator.placement.schedule import Item, Schedule, Send, best_schedule

_FIRST_EFFORT = 0.5  # deterministic seconds for an arc; doubled after each two tries
_MOST_BESIDE = 0.3  # of a segment's operators may run beside a near cut in it
_MOST_COST = 0.2  # of the segment's work may be dropped for it
_COST_OF_A_TRANSFER = 0.01  # of the segment's work
_LARGE = 30  # operators of a segment that is bounded first and searched then
_ANY = -1  # in place of a device: the side of a segment that has no cut vertex


@dataclass(frozen=True)
class Cuts:
    """Operators that follow each other, all of which run one after another; `dropped` run beside them."""

    operators: tuple[int, ...]
    dropped: frozenset[int] = frozenset()


class Reach:
    """Which operators come before and after each: bit sets."""

    def __init__(self, problem: PlacementProblem) -> None:
        n = problem.num_operators
        self.before, self.after = [0] * n, [0] * n
        for i in range(n):
            for other in problem.predecessors[i]:
                self.before[i] |= self.before[other] | 1 << other
        for i in reversed(range(n)):
            for other in problem.successors[i]:
                self.after[i] |= self.after[other] | 1 << other
        self._all = (1 << n) - 1

    def beside(self, operator: int) -> int:
        return self._all & ~(self.before[operator] | self.after[operator] | 1 << operator)


def members(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


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
        inside = members(segment)
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
        found.append(
            Segment(
                PlacementProblem(
                    name="",
                    operators=tuple(map(str, range(len(operators)))),
                    devices=problem.devices,
                    seconds=tuple(
                        nothing if has_entry and position == 0 else problem.seconds[operator]
                        for position, operator in enumerate(operators)
                    ),
                    memory_bytes=(0,) * len(operators),
                    budget_bytes=problem.budget_bytes,
                    flows=tuple(flows),
                    latency=problem.latency,
                    congestion=problem.congestion,
                ),
                tuple(operators),
                tuple(kept),
                has_entry,
                has_exit,
            )
        )
    return found


class Arc:
    """What a segment takes between two devices: between `lower` and `upper`, the makespan of `schedule`."""

    def __init__(self, problem: PlacementProblem, pins: Mapping[int, int]) -> None:
        self._problem, self._pins = problem, pins
        self._effort, self._tries = _FIRST_EFFORT, 0
        self.lower = relaxed_makespan(problem, pins)
        self.schedule = self._first_guess()
        if problem.num_operators == len(pins):
            self.lower = self.upper

    @property
    def upper(self) -> int:
        return round(self.schedule.makespan)

    @property
    def open(self) -> bool:
        return self.lower < self.upper

    @property
    def patience(self) -> float:
        """Deterministic seconds for the next try."""
        return self._effort

    def tighten(self, below: int, seconds: float, num_workers: int) -> None:
        """Look for a schedule that ends before `below`, or for the proof that there is none."""
        below = min(below, self.upper)
        # Searching without a linear relaxation proves small arcs fastest; the relaxation bounds large ones well.
        large = self._problem.num_operators > _LARGE
        linearization = (self._tries + large) % 2
        effort = Effort(seconds, self._effort, num_workers, linearization)
        answer = solve_model(self._problem, effort, self._pins, self.schedule, below)
        self._tries += 1
        if not self._tries % 2:
            self._effort *= 2
        if answer.schedule is not None and answer.schedule.makespan < self.upper:
            self.schedule = answer.schedule
        self.lower = max(self.lower, answer.bound)

    def _first_guess(self) -> Schedule:
        problem, order = self._problem, range(self._problem.num_operators)
        guesses = [
            best_schedule(problem, [self._pins.get(i, k) for i in order], order) for k in range(problem.num_devices)
        ]
        if problem.num_operators > len(self._pins):
            guesses.append(heft(problem, self._pins))
        return min(guesses, key=lambda each: each.makespan)


class Path(NamedTuple):
    """The best found way through all segments. `schedules` are the segments' own."""

    schedules: tuple[Schedule, ...]
    upper: int
    lower: int


def shortest_path(
    problem: PlacementProblem,
    segments: Sequence[Segment],
    clock: Callable[[], float],
    until: float,
    num_workers: int = 1,
) -> Path:
    """Solve as many arcs as it takes, or as there is time for: `clock()` is less than `until`."""
    sides = [
        (range(problem.num_devices) if s.has_entry else (_ANY,), range(problem.num_devices) if s.has_exit else (_ANY,))
        for s in segments
    ]
    known: dict[tuple[PlacementProblem, int, int], Arc] = {}
    arcs: list[dict[tuple[int, int], Arc]] = []
    for segment, (entries, exits) in zip(segments, sides, strict=True):
        arcs.append({})
        for a, b in product(entries, exits):
            if (segment.problem, a, b) not in known:
                known[segment.problem, a, b] = Arc(segment.problem, segment.pins(a, b))
            arcs[-1][a, b] = known[segment.problem, a, b]
    while True:
        uppers = [{pair: arc.upper for pair, arc in layer.items()} for layer in arcs]
        lowers = [{pair: arc.lower for pair, arc in layer.items()} for layer in arcs]
        best, upper = _shortest(uppers)
        path, lower = _shortest(lowers)
        still_open = [index for index, pair in enumerate(path) if arcs[index][pair].open]
        if lower >= upper or not still_open or clock() >= until:
            if not still_open and lower < upper:
                best, upper = path, lower
            return Path(tuple(layer[pair].schedule for layer, pair in zip(arcs, best, strict=True)), upper, lower)
        index = min(still_open, key=lambda i: arcs[i][path[i]].patience)
        arc = arcs[index][path[index]]
        # Where the rest of the way takes so long at least, this arc matters only below what is left.
        rest = lower - arc.lower
        arc.tighten(upper - rest, until - clock(), num_workers)


def _shortest(layers: Sequence[Mapping[tuple[int, int], int]]) -> tuple[list[tuple[int, int]], int]:
    """The arcs of the shortest path through all layers, and its length."""
    reached: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for index, layer in enumerate(layers):
        step: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for (a, b), cost in layer.items():
            length, path = reached[a] if index else (0, [])
            if b not in step or length + cost < step[b][0]:
                step[b] = (length + cost, [*path, (a, b)])
        reached = step
    length, path = min(reached.values(), key=lambda each: each[0])
    return path, length


def joined(segments: Sequence[Segment], schedules: Sequence[Schedule]) -> tuple[dict[int, int], list[Item]]:
    """The segments' schedules one after another: devices by operator, and the order; what was dropped is not in it."""
    where: dict[int, int] = {}
    items: list[Item] = []
    for segment, part in zip(segments, schedules, strict=True):
        for item in part.order:
            if isinstance(item, Send):
                items.append(Send(segment.flows[item.flow], item.device))
            elif item > 0 or not segment.has_entry:
                items.append(segment.operators[item])
        where.update(zip(segment.operators, part.assignment, strict=True))
    return where, items
