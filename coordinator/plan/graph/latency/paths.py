"""The shortest path over (cut vertex, device): its arcs are segments, solved only where they could matter. Pure.

The shortest path under the arcs' lower bounds is looked for, its open arcs are tightened, and this repeats until the
path has only proven arcs. Blocks that repeat are bounded once, by their pattern (patterns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from coordinator.plan.graph.latency.bounds import relaxed_makespan
from coordinator.plan.graph.latency.cpsat import Effort, solve_model
from coordinator.plan.graph.latency.decomposition import Segment
from coordinator.plan.graph.latency.heft import heft
from coordinator.plan.graph.latency.patterns import patterns_of
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule

_FIRST_EFFORT = 0.05  # deterministic seconds for an arc; doubled after each two tries
_LARGE = 30  # operators of a segment that is bounded first and searched then
_ANY = -1  # in place of a device: the side of a segment that has no cut vertex
_UNKNOWN = 1 << 62  # ticks
_STEP = 0.01  # a path that is shorter by this part is worth to be told


class Arc:
    """What a segment takes between two devices: between `lower` and `upper`, the makespan of `schedule`.

    With a `pattern`, that one's bound holds here, and its schedules are tried here: it is tightened first. `upper` is
    not known before `look`.
    """

    def __init__(self, problem: PlacementProblem, pins: Mapping[int, int], pattern: Arc | None = None) -> None:
        self._problem, self._pins, self._pattern = problem, pins, pattern
        self._effort, self._tries = _FIRST_EFFORT, 0
        self._lower = relaxed_makespan(problem, pins) if pattern is None else 0
        self._schedule: Schedule | None = None
        self._seen: Schedule | None = None  # the last of the pattern's that was tried here

    @property
    def lower(self) -> int:
        return self._lower if self._pattern is None else max(self._lower, self._pattern.lower)

    @property
    def upper(self) -> int:
        return _UNKNOWN if self._schedule is None else round(self.schedule.makespan)

    @property
    def schedule(self) -> Schedule:
        assert self._schedule is not None
        pattern = self._pattern._schedule if self._pattern is not None else None
        if pattern is not None and pattern is not self._seen:
            self._seen = pattern
            self._offer(best_schedule(self._problem, pattern.assignment, pattern.order))
        return self._schedule

    @property
    def open(self) -> bool:
        return self.lower < self.upper

    @property
    def patience(self) -> float:
        """Deterministic seconds for the next try."""
        return self._pattern.patience if self._pattern is not None and self._pattern.open else self._effort

    def look(self) -> bool:
        """Find a first schedule, so that `upper` is known; whether there was none yet."""
        if self._schedule is not None:
            return False
        if self._pattern is None:
            self._schedule = self._first_guess()
        else:
            self._pattern.look()
            self._seen = self._pattern.schedule
            self._schedule = best_schedule(self._problem, self._seen.assignment, self._seen.order)
            self._lower = relaxed_makespan(self._problem, self._pins)
        if self._problem.num_operators == len(self._pins):
            self._lower = self.upper
        return True

    def tighten(self, below: int, seconds: float, num_workers: int) -> None:
        """Look for a schedule that ends before `below`, or for the proof that there is none."""
        if self._pattern is not None and self._pattern.open:
            self._pattern.tighten(below, seconds, num_workers)
            return
        below = min(below, self.upper)
        # Searching without a linear relaxation proves small arcs fastest; the relaxation bounds large ones well, and its
        # full form better where there is time for it.
        large = self._problem.num_operators > _LARGE
        linearization = 0 if (self._tries + large) % 2 == 0 else 2 if large and self._tries > 1 else 1
        effort = Effort(seconds, self._effort, num_workers, linearization)
        answer = solve_model(self._problem, effort, below, self._pins, self.schedule)
        self._tries += 1
        if not self._tries % 2:
            self._effort *= 2
        if answer.schedule is not None:
            self._offer(answer.schedule)
        self._lower = max(self._lower, answer.bound)

    def _offer(self, found: Schedule) -> None:
        if self._schedule is None or found.makespan < self._schedule.makespan:
            self._schedule = found

    def _first_guess(self) -> Schedule:
        problem, order = self._problem, range(self._problem.num_operators)
        guesses = [
            best_schedule(problem, [self._pins.get(i, k) for i in order], order) for k in range(problem.num_devices)
        ]
        if problem.num_operators > len(self._pins):
            guesses.append(heft(problem, self._pins))
        return min(guesses, key=lambda each: each.makespan)


_Layers = list[dict[tuple[int, int], Arc]]  # by segment: devices at its entry and its exit -> arc


class Path(NamedTuple):
    """The best found way through all segments. `schedules` are the segments' own."""

    schedules: tuple[Schedule, ...]
    upper: int
    lower: int


def shortest_paths(
    problem: PlacementProblem,
    segments: Sequence[Segment],
    clock: Callable[[], float],
    until: float,
    num_workers: int = 1,
) -> Iterator[Path]:
    """Better and better paths, the best one last: as many arcs are solved as it takes, or as there is time for
    (`clock()` is less than `until`). On the way, only what is shorter by a step is told."""
    arcs = _arcs(problem, segments)
    told = _UNKNOWN
    while True:
        path, lower = _shortest([{pair: arc.lower for pair, arc in layer.items()} for layer in arcs])
        looked = [layer[pair].look() for layer, pair in zip(arcs, path, strict=True)]
        if any(looked):
            continue  # their bounds may have risen
        best, upper = _shortest([{pair: arc.upper for pair, arc in layer.items()} for layer in arcs])
        still_open = [index for index, pair in enumerate(path) if arcs[index][pair].open]
        if lower >= upper or not still_open or clock() >= until:
            if not still_open and lower < upper:
                best, upper = path, lower
            yield _path(arcs, best, upper, lower)
            return
        if upper <= (1 - _STEP) * told:
            told = upper
            yield _path(arcs, best, upper, lower)
        index = min(still_open, key=lambda i: arcs[i][path[i]].patience)
        arc = arcs[index][path[index]]
        # Where the rest of the way takes so long at least, this arc matters only below what is left.
        rest = lower - arc.lower
        arc.tighten(upper - rest, until - clock(), num_workers)


def _path(arcs: _Layers, pairs: Sequence[tuple[int, int]], upper: int, lower: int) -> Path:
    return Path(tuple(layer[pair].schedule for layer, pair in zip(arcs, pairs, strict=True)), upper, lower)


def _arcs(problem: PlacementProblem, segments: Sequence[Segment]) -> _Layers:
    """By segment, its arc for each device at its entry and its exit; equal ones are one."""
    known: dict[tuple[PlacementProblem, tuple[tuple[int, int], ...]], Arc] = {}

    def arc(of: PlacementProblem, pins: dict[int, int], pattern: Arc | None = None) -> Arc:
        key = of, tuple(pins.items())
        if key not in known:
            known[key] = Arc(of, pins, pattern)
        return known[key]

    arcs: _Layers = []
    ranks = range(problem.num_devices)
    for segment, pattern in zip(segments, patterns_of([segment.problem for segment in segments]), strict=True):
        entries = ranks if segment.has_entry else (_ANY,)
        exits = ranks if segment.has_exit else (_ANY,)
        arcs.append({})
        for a, b in product(entries, exits):
            pins = segment.pins(a, b)
            arcs[-1][a, b] = arc(segment.problem, pins, None if pattern is None else arc(pattern, pins))
    return arcs


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
