"""Common part of the list schedulers: a schedule built operator by operator, without contention of transfers. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

from coordinator.plan.graph.latency.memory_ledger import MemoryLedger
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from hearth.errors import NoPlacement


class PartialSchedule:
    """A schedule under construction. Operators are placed after their predecessors, on devices with enough memory left.

    If an assignment that fits is known (`problem.fitting`), there is always room: operators that are not placed yet count
    where it has them.
    """

    def __init__(self, problem: PlacementProblem, strategy: str) -> None:
        self._problem = problem
        self._strategy = strategy
        n = problem.num_operators
        self.assignment: list[int] = [-1] * n
        self.starts = [0.0] * n
        self.ends = [0.0] * n
        self._busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_devices)]  # spans, sorted
        self._memory = MemoryLedger(problem, problem.fitting)
        self._waiting_for = [len(predecessors) for predecessors in problem.predecessors]
        self._inputs_ready_at: dict[tuple[int, int], float] = {}  # settled once its predecessors are placed
        self.ready = {i for i in range(n) if self._waiting_for[i] == 0}

    def free_at(self, device: int) -> float:
        """The time at which everything placed on the device is done."""
        return self._busy[device][-1][1] if self._busy[device] else 0.0

    def candidates(self, operator: int, devices: Iterable[int] | None = None) -> list[int]:
        """Devices with room for the operator: among `devices` if any of them has, otherwise among all.

        Raises NoPlacement when there is none.
        """
        wanted = range(self._problem.num_devices) if devices is None else devices
        found = [device for device in wanted if self._has_room(operator, device)]
        if not found and devices is not None:
            return self.candidates(operator)
        if not found:
            raise NoPlacement(graph=self._problem.name, strategy=self._strategy)
        return found

    def inputs_ready_at(self, operator: int, device: int) -> float:
        """The time at which all inputs of the operator can be on the device."""
        known = self._inputs_ready_at.get((operator, device))
        if known is not None:
            return known
        problem, latest = self._problem, 0.0
        for index in problem.incoming[operator]:
            flow = problem.flows[index]
            source = self.assignment[flow.source]
            transfer = flow.seconds[source][device] + problem.latency[source][device] if source != device else 0.0
            latest = max(latest, self.ends[flow.source] + transfer)
        self._inputs_ready_at[operator, device] = latest
        return latest

    def earliest_start(self, operator: int, device: int) -> float:
        """The earliest start after everything that was placed on the device."""
        return max(self.inputs_ready_at(operator, device), self.free_at(device))

    def first_gap_start(self, operator: int, device: int, ready: float) -> float:
        """The start of the first gap on the device that is long enough, from `ready` on."""
        return first_gap(self._busy[device], ready, self._problem.seconds[operator][device])

    def place(self, operator: int, device: int, start: float) -> None:
        end = start + self._problem.seconds[operator][device]
        self._reserve(operator, device)
        self.assignment[operator] = device
        self.starts[operator], self.ends[operator] = start, end
        if end > start:
            insort(self._busy[device], (start, end))
        self.ready.discard(operator)
        for successor in self._problem.successors[operator]:
            self._waiting_for[successor] -= 1
            if self._waiting_for[successor] == 0:
                self.ready.add(successor)

    @property
    def order(self) -> list[int]:
        """The operators by the start times found here."""
        return sorted(range(self._problem.num_operators), key=lambda i: (self.starts[i], self.ends[i], i))

    def to_schedule(self) -> Schedule:
        """The schedule in this order as the simulator prices it."""
        return best_schedule(self._problem, self.assignment, self.order)

    def _has_room(self, operator: int, device: int) -> bool:
        if not self._memory.is_binding:
            return True
        self._reserve(operator, device)
        has_room = self._memory.fits
        self._memory.remove(operator, device)
        if self._problem.fitting:
            self._memory.place(operator, self._problem.fitting[operator])
        return has_room

    def _reserve(self, operator: int, device: int) -> None:
        """Count an operator that is not placed yet on this device."""
        if self._problem.fitting:
            self._memory.remove(operator, self._problem.fitting[operator])
        self._memory.place(operator, device)


def first_gap(spans: Sequence[tuple[float, float]], ready: float, seconds: float) -> float:
    """The first time from `ready` on with `seconds` free. `spans` are the busy times, sorted and not overlapping."""
    start = ready
    for index in range(max(0, bisect_left(spans, (ready, ready)) - 1), len(spans)):
        begin, end = spans[index]
        if start + seconds <= begin:
            break
        start = max(start, end)
    return start


def mean_seconds(problem: PlacementProblem) -> list[float]:
    """Seconds of each operator, averaged over all devices."""
    return [sum(row) / len(row) for row in problem.seconds]


def mean_transfer_seconds(problem: PlacementProblem) -> list[float]:
    """Transfer seconds of each flow, latency included, averaged over all pairs of devices; 0 with a single device."""
    pairs = [(a, b) for a in range(problem.num_devices) for b in range(problem.num_devices) if a != b]
    if not pairs:
        return [0.0] * len(problem.flows)
    return [sum(flow.seconds[a][b] + problem.latency[a][b] for a, b in pairs) / len(pairs) for flow in problem.flows]


def upward_ranks(problem: PlacementProblem) -> list[float]:
    """By operator, the longest path from its start to the end of the graph, with mean times (HEFT's rank_u)."""
    seconds, carried = mean_seconds(problem), mean_transfer_seconds(problem)
    ranks = [0.0] * problem.num_operators
    for i in reversed(range(problem.num_operators)):
        after = (carried[f] + max(ranks[t] for t in problem.flows[f].targets) for f in problem.outgoing[i])
        ranks[i] = seconds[i] + max(after, default=0.0)
    return ranks


def ranks_from_schedule(problem: PlacementProblem, starts: Mapping[int, float], makespan: float) -> list[float]:
    """Ranks that keep the order of a partial schedule; the remaining operators are ranked by their latest start."""
    seconds, carried = mean_seconds(problem), mean_transfer_seconds(problem)
    latest = [0.0] * problem.num_operators
    for i in reversed(range(problem.num_operators)):
        needed = (latest[t] - carried[f] for f in problem.outgoing[i] for t in problem.flows[f].targets)
        latest[i] = starts[i] if i in starts else min(needed, default=makespan) - seconds[i]
    return [-time for time in latest]
