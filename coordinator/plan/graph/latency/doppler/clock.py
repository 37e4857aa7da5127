"""The clock of an episode: where and when operators can run, given those that are placed. Pure.

An operator starts in the first gap of its device that is long enough, after its inputs have arrived; transfers are booked as
by `contended_heft`. Times are whole ticks, held in floats, so that sums and ties are exact.
"""

from __future__ import annotations

from coordinator.plan.graph.latency.channels import BookedTransfer, Channels, Spans
from coordinator.plan.graph.latency.doppler.features import mean_operator_seconds
from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem, with_times

TICKS_PER_MEAN_OPERATOR = float(1 << 20)  # precise to 1e-6 of a mean operator; sums stay far below 2^53


def in_clock_ticks(problem: PlacementProblem) -> tuple[PlacementProblem, float]:
    """The problem in ticks of the clock, and the seconds of one tick."""
    seconds_per_tick = mean_operator_seconds(problem) / TICKS_PER_MEAN_OPERATOR

    def ticks(table: FloatTable) -> FloatTable:
        return tuple(tuple(float(round(seconds / seconds_per_tick)) for seconds in row) for row in table)

    return with_times(problem, ticks), seconds_per_tick


class EpisodeClock:
    """The state of one episode of a problem in ticks. `observe` an operator whose predecessors are placed, then `place` it."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem, n, K = problem, problem.num_operators, problem.num_devices
        self.starts, self.ends = [0.0] * n, [0.0] * n
        self.assignment = [-1] * n
        self._compute, self._channels = [Spans() for _ in range(K)], Channels(problem)
        self._load, self._sent, self._received = [0.0] * K, [0.0] * K, [0.0] * K
        self._operator = -1  # the last one observed, with its earliest start and its transfers by device
        self._start: list[float] = []
        self._needed: list[list[BookedTransfer]] = []

    def observe(self, operator: int) -> list[float]:
        """`CLOCK_COLUMNS` of every device for the operator: a flat list [10 * K]."""
        problem, assignment, ends = self._problem, self.assignment, self.ends
        K = problem.num_devices
        self._operator, self._start, self._needed, missing = operator, [], [], []
        for device, ticks in enumerate(problem.seconds[operator]):
            transfers, ready = self._channels.plan_transfers(operator, device, assignment, ends)
            self._needed.append(transfers)
            missing.append(sum(each.end - each.start for each in transfers))
            self._start.append(self._compute[device].first_gap(ready, ticks) if ticks else ready)
        compute, first, last, count = [0.0] * K, [0.0] * K, [0.0] * K, [0.0] * K
        for producer in problem.predecessors[operator]:
            device = assignment[producer]
            begin, end = self.starts[producer], ends[producer]
            compute[device] += problem.seconds[producer][device]
            if not count[device] or begin < first[device]:
                first[device] = begin
            if end > last[device]:
                last[device] = end
            count[device] += 1
        free = [spans.free_at for spans in self._compute]
        return [
            *free, *self._load, *self._start, *self._sent, *self._received, *missing, *compute, *first, *last, *count
        ]  # fmt: skip

    def place(self, device: int) -> None:
        """Place the operator that was observed last, and book its transfers."""
        operator, transfers = self._operator, self._needed[device]
        self._channels.book(transfers)
        for each in transfers:
            self._sent[each.source] += each.end - each.start
            self._received[device] += each.end - each.start
        start, ticks = self._start[device], self._problem.seconds[operator][device]
        self.assignment[operator] = device
        self.starts[operator], self.ends[operator] = start, start + ticks
        self._load[device] += ticks
        self._compute[device].book(start, start + ticks)
