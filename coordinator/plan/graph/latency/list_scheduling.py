"""List schedulers: HEFT, HEFT with link contention, and Critical Path. Pure.

Operators are placed one by one, after their predecessors, each on the device where it ends or starts first. Plain HEFT and
Critical Path do not see that transfers contend. Where links are slow compared with operators, they send more than the
channels can carry; HEFT with contention (Sinnen and Sousa, IEEE TPDS 2005) books each transfer in the first gap that all of
its resources have (channels.py). The simulator prices every result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from random import Random

from coordinator.models.ordering import topological_order
from coordinator.plan.graph.latency.channels import Channels, Spans
from coordinator.plan.graph.latency.memory import MemoryLedger
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, best_schedule, sorted_by_start
from coordinator.plan.solution import Stop
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
        self._busy = [Spans() for _ in problem.devices]
        self._memory = MemoryLedger(problem, problem.fitting)
        self._waiting_for = [len(predecessors) for predecessors in problem.predecessors]
        self._inputs_ready_at: dict[tuple[int, int], float] = {}  # settled once its predecessors are placed
        self.ready = {i for i in range(n) if self._waiting_for[i] == 0}

    def free_at(self, device: int) -> float:
        """The time at which everything placed on the device is done."""
        return self._busy[device].free_at

    def candidates(self, operator: int, devices: Iterable[int] | None = None) -> list[int]:
        """Devices with room for the operator: among `devices` if any of them has, otherwise among all.

        Raises NoPlacement when there is none.
        """
        found = self._with_room(operator)
        if not found:
            raise NoPlacement(graph=self._problem.name, strategy=self._strategy)
        return [device for device in devices or () if device in found] or found

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
        return self._busy[device].first_gap(ready, self._problem.seconds[operator][device])

    def place(self, operator: int, device: int, start: float) -> list[int]:
        """Place an operator; returns those that are ready by this."""
        end = start + self._problem.seconds[operator][device]
        if self._problem.fitting:
            self._memory.remove(operator, self._problem.fitting[operator])
        self._memory.place(operator, device)
        self.assignment[operator] = device
        self.starts[operator], self.ends[operator] = start, end
        self._busy[device].book(start, end)
        self.ready.discard(operator)
        for successor in self._problem.successors[operator]:
            self._waiting_for[successor] -= 1
        new = [each for each in self._problem.successors[operator] if self._waiting_for[each] == 0]
        self.ready.update(new)
        return new

    @property
    def order(self) -> list[int]:
        """The operators by the start times found here."""
        return sorted(range(self._problem.num_operators), key=lambda i: (self.starts[i], self.ends[i], i))

    def to_schedule(self) -> Schedule:
        """The schedule in this order as the simulator prices it."""
        return best_schedule(self._problem, self.assignment, self.order)

    def _with_room(self, operator: int) -> list[int]:
        """The devices with room for an operator that is not placed yet."""
        problem, memory = self._problem, self._memory
        if not memory.is_binding:
            return list(range(problem.num_devices))
        if problem.fitting:
            memory.remove(operator, problem.fitting[operator])
        left = memory.left_bytes(operator)
        if problem.fitting:
            memory.place(operator, problem.fitting[operator])
        return [device for device, num_bytes in enumerate(left) if num_bytes >= 0]


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


def heft(problem: PlacementProblem, pins: Mapping[int, int] | None = None) -> Schedule:
    """Heterogeneous Earliest Finish Time (Topcuoglu, Hariri, Wu 2002): by decreasing upward rank, first gap that fits.

    Its own estimate ignores contention between transfers; the simulator then prices the schedule with the problem's
    contention. `pins` bind operators to devices. Raises NoPlacement.
    """
    pins = pins or {}
    partial = PartialSchedule(problem, "heft")
    ranks = upward_ranks(problem)
    for operator in rank_order(problem, ranks):
        start, device = min(
            (
                (partial.first_gap_start(operator, device, partial.inputs_ready_at(operator, device)), device)
                for device in partial.candidates(operator, [pins[operator]] if operator in pins else None)
            ),
            key=lambda each: each[0] + problem.seconds[operator][each[1]],
        )
        partial.place(operator, device, start)
    return partial.to_schedule()


def critical_path(problem: PlacementProblem, rng: Random, runs: int = 50, stop: Stop = lambda: False) -> Schedule:
    """Place the ready operator with the longest path to the end on the device where it can start first.

    Doppler's baseline (arXiv 2505.23131, section 6; Kwok and Ahmad 1999). Ties are broken at random; of `runs` runs, return
    the one with the shortest simulated makespan. After the first, none begins once `stop()` is true. Raises NoPlacement.
    """
    ranks, best = upward_ranks(problem), None
    for _ in range(runs):
        if best is not None and stop():
            break
        partial = PartialSchedule(problem, "critical-path")
        ready = [(-ranks[operator], rng.random(), operator) for operator in sorted(partial.ready)]
        heapify(ready)
        while ready:
            operator = heappop(ready)[2]
            start, _, device = min(
                (partial.earliest_start(operator, device), rng.random(), device)
                for device in partial.candidates(operator)
            )
            for each in partial.place(operator, device, start):
                heappush(ready, (-ranks[each], rng.random(), each))
        found = partial.to_schedule()
        best = found if best is None or found.makespan < best.makespan else best
    assert best is not None
    return best


def rank_order(problem: PlacementProblem, ranks: Sequence[float]) -> list[int]:
    """Operators by decreasing rank, in topological order: ranks alone do not order operators that take no time."""
    return topological_order(problem.predecessors, lambda operator: -ranks[operator])


def contended_heft(
    problem: PlacementProblem,
    pins: Mapping[int, int] | None = None,
    ranks: Sequence[float] | None = None,
    devices: Sequence[int] | None = None,
) -> Schedule:
    """Place operators by decreasing rank, each on the device where it ends first with the transfers that it needs.

    `pins` bind operators to devices; `ranks` default to HEFT's upward ranks. Of `devices` (default: all), others take what
    these have no room for. Raises NoPlacement.
    """
    pins = pins or {}
    partial = PartialSchedule(problem, "contended-heft")
    channels = Channels(problem)
    if ranks is None:
        ranks = upward_ranks(problem)
    items: list[tuple[float, float, int, Item]] = []
    for operator in rank_order(problem, ranks):
        options = []
        for device in partial.candidates(operator, [pins[operator]] if operator in pins else devices):
            transfers, ready = channels.plan_transfers(operator, device, partial.assignment, partial.ends)
            start = partial.first_gap_start(operator, device, ready)
            options.append((start + problem.seconds[operator][device], device, start, transfers))
        end, device, start, transfers = min(options, key=lambda option: option[:2])
        partial.place(operator, device, start)
        channels.book(transfers)
        items.append((start, end, operator, operator))
        items += [(each.start, each.end, problem.flows[each.send.flow].source, each.send) for each in transfers]
    return best_schedule(problem, partial.assignment, sorted_by_start(items))
