"""The shortest path over (cut vertex, device), whose arcs are segments; arcs are solved only if they could matter. Pure.

The search takes the shortest path under the arcs' lower bounds, tightens its open arcs, and repeats until the path has
only proven arcs. The blocks of a network repeat, but profiled times differ a little from block to block. Similar segments
are therefore bounded once, by their pattern: it has the minimum of their times, operator by operator and flow by flow, so
its lower bound holds for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from coordinator.plan.graph.latency.bounds import relaxed_makespan
from coordinator.plan.graph.latency.cpsat import SolverLimits, solve_placement_model
from coordinator.plan.graph.latency.decomposition import CutSegment
from coordinator.plan.graph.latency.list_scheduling import heft
from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.solution import Stop

# Of each segment's work, and of its transfers, that its pattern must keep: a pattern with less would give a weak bound.
_MIN_KEPT_FRACTION = 0.95
# CP-SAT's deterministic seconds for an arc, doubled after every two tries: short, so that no arc takes the time of the others.
_FIRST_TRY_SECONDS = 0.05
# A segment with more is bounded first and then searched: proofs take too long without a good bound.
_LARGE_ARC_OPERATORS = 30
_NO_CUT = -1  # in place of a device: this side of the segment has no cut vertex
_UNKNOWN_TICKS = 1 << 62  # above every makespan
_MIN_REPORTED_GAIN = 0.01  # intermediate paths are reported only if shorter by this fraction: each costs simulations


@dataclass
class _Group:
    pattern: PlacementProblem
    max_work: float
    max_transfers: float
    members: list[int]


def segment_patterns(problems: Sequence[PlacementProblem]) -> list[PlacementProblem | None]:
    """The pattern of each problem; None for a problem that resembles no other, or only identical ones."""
    groups: dict[Any, list[_Group]] = {}
    for index, problem in enumerate(problems):
        shape = (
            problem.num_operators,
            problem.latency,
            problem.congestion,
            tuple((flow.source, flow.targets) for flow in problem.flows),
        )
        same_shape = groups.setdefault(shape, [])
        if not any(_try_to_join(group, problem, index) for group in same_shape):
            same_shape.append(_Group(problem, _work_ticks(problem), _transfer_ticks(problem), [index]))
    patterns: list[PlacementProblem | None] = [None] * len(problems)
    for group in (group for same_shape in groups.values() for group in same_shape):
        if any(problems[index] != group.pattern for index in group.members):
            for index in group.members:
                patterns[index] = group.pattern
    return patterns


def _try_to_join(group: _Group, problem: PlacementProblem, index: int) -> bool:
    pattern = replace(
        group.pattern,
        seconds=_elementwise_min(group.pattern.seconds, problem.seconds),
        flows=tuple(
            ours._replace(seconds=_elementwise_min(ours.seconds, theirs.seconds))
            for ours, theirs in zip(group.pattern.flows, problem.flows, strict=True)
        ),
    )
    max_work = max(group.max_work, _work_ticks(problem))
    max_transfers = max(group.max_transfers, _transfer_ticks(problem))
    work, transfers = _work_ticks(pattern), _transfer_ticks(pattern)
    if work < _MIN_KEPT_FRACTION * max_work or transfers < _MIN_KEPT_FRACTION * max_transfers:
        return False
    group.pattern, group.max_work, group.max_transfers = pattern, max_work, max_transfers
    group.members.append(index)
    return True


def _elementwise_min(ours: FloatTable, theirs: FloatTable) -> FloatTable:
    return tuple(tuple(map(min, row, other)) for row, other in zip(ours, theirs, strict=True))


def _work_ticks(problem: PlacementProblem) -> float:
    """Total seconds with each operator on its fastest device: slower devices contribute little to the bound."""
    return sum(map(min, problem.seconds))


def _transfer_ticks(problem: PlacementProblem) -> float:
    return sum(sum(map(sum, flow.seconds)) for flow in problem.flows)


class Arc:
    """The makespan of a segment between two devices, in ticks: at least `lower`, at most `upper` (that of `schedule`).

    With a `pattern`, the pattern's bound holds here too and its schedules are tried here, so it is tightened first.
    `upper` is unknown until `find_first_schedule` is called.
    """

    def __init__(self, problem: PlacementProblem, pins: Mapping[int, int], pattern: Arc | None = None) -> None:
        self._problem, self._pins, self._pattern = problem, pins, pattern
        self._try_seconds, self._tries = _FIRST_TRY_SECONDS, 0
        self._lower = relaxed_makespan(problem, pins) if pattern is None else 0
        self._schedule: Schedule | None = None
        self._tried_pattern_schedule: Schedule | None = None  # the pattern's last schedule that was tried here

    @property
    def lower(self) -> int:
        return self._lower if self._pattern is None else max(self._lower, self._pattern.lower)

    @property
    def upper(self) -> int:
        return _UNKNOWN_TICKS if self._schedule is None else round(self.schedule.makespan)

    @property
    def schedule(self) -> Schedule:
        assert self._schedule is not None
        pattern = self._pattern._schedule if self._pattern is not None else None
        if pattern is not None and pattern is not self._tried_pattern_schedule:
            self._tried_pattern_schedule = pattern
            self._offer(best_schedule(self._problem, pattern.assignment, pattern.order))
        return self._schedule

    @property
    def is_open(self) -> bool:
        return self.lower < self.upper

    @property
    def next_try_seconds(self) -> float:
        """Deterministic seconds for the next try."""
        pattern = self._pattern
        return pattern.next_try_seconds if pattern is not None and pattern.is_open else self._try_seconds

    def find_first_schedule(self) -> bool:
        """Find a first schedule, so that `upper` is known. Returns False if there already was one."""
        if self._schedule is not None:
            return False
        if self._pattern is None:
            self._schedule = self._first_schedule()
        else:
            self._pattern.find_first_schedule()
            self._tried_pattern_schedule = pattern = self._pattern.schedule
            self._schedule = best_schedule(self._problem, pattern.assignment, pattern.order)
            self._lower = relaxed_makespan(self._problem, self._pins)
        if self._problem.num_operators == len(self._pins):
            self._lower = self.upper
        return True

    def tighten(self, below: int, seconds: float) -> None:
        """Look for a schedule that ends before `below`, or for a proof that there is none."""
        if self._pattern is not None and self._pattern.is_open:
            self._pattern.tighten(below, seconds)
            return
        below = min(below, self.upper)
        # Search without a linear relaxation proves small arcs fastest; the relaxation gives good bounds for large arcs,
        # and its full form better ones if there is time for it.
        large = self._problem.num_operators > _LARGE_ARC_OPERATORS
        linearization = 0 if (self._tries + large) % 2 == 0 else 2 if large and self._tries > 1 else 1
        limits = SolverLimits(seconds, self._try_seconds, linearization)
        result = solve_placement_model(self._problem, limits, below, self._pins, self.schedule)
        self._tries += 1
        if not self._tries % 2:
            self._try_seconds *= 2
        if result.schedule is not None:
            self._offer(result.schedule)
        self._lower = max(self._lower, result.bound)

    def _offer(self, found: Schedule) -> None:
        if self._schedule is None or found.makespan < self._schedule.makespan:
            self._schedule = found

    def _first_schedule(self) -> Schedule:
        problem, order = self._problem, range(self._problem.num_operators)
        guesses = [
            best_schedule(problem, [self._pins.get(i, k) for i in order], order) for k in range(problem.num_devices)
        ]
        if problem.num_operators > len(self._pins):
            guesses.append(heft(problem, self._pins))
        return min(guesses, key=lambda each: each.makespan)


_ArcLayers = list[dict[tuple[int, int], Arc]]  # by segment: devices at its entry and its exit -> arc


class Path(NamedTuple):
    """The best path found through all segments, with bounds in ticks. `schedules` has one schedule per segment."""

    schedules: tuple[Schedule, ...]
    upper: int
    lower: int


def shortest_paths(
    problem: PlacementProblem, segments: Sequence[CutSegment], clock: Callable[[], float], deadline: float
) -> Iterator[Path]:
    """Yield shorter and shorter paths, the best one last, until the optimum is proven or `clock()` reaches `deadline`.

    Before the last, only paths that are shorter by `_MIN_REPORTED_GAIN` are yielded.
    """
    arcs = _build_arcs(problem, segments, lambda: clock() >= deadline)
    if len(arcs) < len(segments):
        return
    reported = _UNKNOWN_TICKS
    while True:
        path, lower = _shortest_path([{pair: arc.lower for pair, arc in layer.items()} for layer in arcs])
        first_seen = [layer[pair].find_first_schedule() for layer, pair in zip(arcs, path, strict=True)]
        if any(first_seen):
            continue  # their bounds may have risen
        best, upper = _shortest_path([{pair: arc.upper for pair, arc in layer.items()} for layer in arcs])
        still_open = [index for index, pair in enumerate(path) if arcs[index][pair].is_open]
        if lower >= upper or not still_open or clock() >= deadline:
            if not still_open and lower < upper:
                best, upper = path, lower
            yield _make_path(arcs, best, upper, lower)
            return
        if upper <= (1 - _MIN_REPORTED_GAIN) * reported:
            reported = upper
            yield _make_path(arcs, best, upper, lower)
        index = min(still_open, key=lambda i: arcs[i][path[i]].next_try_seconds)
        arc = arcs[index][path[index]]
        # The rest of the path takes at least this long; the arc matters only if it fits in the remaining time.
        rest = lower - arc.lower
        arc.tighten(upper - rest, deadline - clock())


def _make_path(arcs: _ArcLayers, pairs: Sequence[tuple[int, int]], upper: int, lower: int) -> Path:
    return Path(tuple(layer[pair].schedule for layer, pair in zip(arcs, pairs, strict=True)), upper, lower)


def _build_arcs(problem: PlacementProblem, segments: Sequence[CutSegment], stop: Stop) -> _ArcLayers:
    """By segment, its arc for each pair of devices at its entry and exit; equal arcs are one object.

    Ends early if `stop()` is true.
    """
    known: dict[PlacementProblem, dict[tuple[int, int], Arc]] = {}
    arcs: _ArcLayers = []
    ranks = range(problem.num_devices)
    for segment, pattern in zip(segments, segment_patterns([segment.problem for segment in segments]), strict=True):
        if stop():
            break
        ours = known.setdefault(segment.problem, {})
        theirs = known.setdefault(pattern, {}) if pattern is not None else {}
        entries = ranks if segment.has_entry else (_NO_CUT,)
        exits = ranks if segment.has_exit else (_NO_CUT,)
        arcs.append({})
        for a, b in product(entries, exits):
            pins = segment.pins(a, b)
            if pattern is not None and (a, b) not in theirs:
                theirs[a, b] = Arc(pattern, pins)
            if (a, b) not in ours:
                ours[a, b] = Arc(segment.problem, pins, theirs.get((a, b)))
            arcs[-1][a, b] = ours[a, b]
    return arcs


def _shortest_path(layers: Sequence[Mapping[tuple[int, int], int]]) -> tuple[list[tuple[int, int]], int]:
    """The arcs of the shortest path through all layers, and its length."""
    lengths: dict[int, int] = {}  # of the shortest path to each device at the end of a layer
    arcs_to: list[dict[int, tuple[int, int]]] = []  # by layer and device, the last arc of that path
    for index, layer in enumerate(layers):
        next_lengths: dict[int, int] = {}
        arcs_to.append({})
        for (a, b), cost in layer.items():
            length = lengths[a] + cost if index else cost
            if b not in next_lengths or length < next_lengths[b]:
                next_lengths[b], arcs_to[-1][b] = length, (a, b)
        lengths = next_lengths
    end = min(lengths, key=lambda device: lengths[device])
    path, device = list[tuple[int, int]](), end
    for arcs in reversed(arcs_to):
        path.append(arcs[device])
        device = path[-1][0]
    return path[::-1], lengths[end]
