"""The clock of an episode: where and when operators can run, given those that are placed. Pure.

An operator starts in the first gap of its device that is long enough, after its inputs have arrived. With congestion, a
transfer books the first gap that the sender's sending side, the receiver's receiving side and the shared media that it
crosses have in common, as in `contention.contended_heft`. Times are whole ticks, held in floats, so that sums and ties are
exact.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from operator import itemgetter

from coordinator.plan.graph.latency.doppler.features import mean_operator_seconds
from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem

TICKS_PER_MEAN_OPERATOR = float(1 << 20)  # precise to 1e-6 of a mean operator; sums stay far below 2^53
_Table = list[list[float]]


class ClockTimes:
    """The times of a problem in ticks, in the form that the clock reads fastest. Shared by all episodes."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.seconds_per_tick = mean_operator_seconds(problem) / TICKS_PER_MEAN_OPERATOR
        self.operators = self._in_ticks(problem.seconds)  # [n][K]
        self.latency = self._in_ticks(problem.latency)  # [K][K]
        tables: dict[int, _Table] = {}  # flows of one size share a table
        for flow in problem.flows:
            if id(flow.seconds) not in tables:
                tables[id(flow.seconds)] = self._in_ticks(flow.seconds)
        self.transfers = [tables[id(flow.seconds)] for flow in problem.flows]  # [flow][K][K]
        self.sources = [flow.source for flow in problem.flows]

    def _in_ticks(self, table: FloatTable) -> _Table:
        return [[float(round(seconds / self.seconds_per_tick)) for seconds in row] for row in table]


class _Spans:
    """Busy times of a resource; adjacent ones are merged, so that gaps are found fast."""

    __slots__ = ("begins", "ends")

    def __init__(self) -> None:
        self.begins: list[float] = []  # both sorted
        self.ends: list[float] = []

    def first_gap(self, ready: float, ticks: float) -> float:
        """The first time from `ready` on with `ticks` > 0 free."""
        ends = self.ends
        if not ends or ready >= ends[-1]:
            return ready
        begins, index = self.begins, bisect_right(ends, ready)
        while index < len(ends) and begins[index] < ready + ticks:
            ready = ends[index]
            index += 1
        return ready

    def book(self, start: float, end: float) -> None:
        """Mark a free time as busy."""
        begins, ends = self.begins, self.ends
        index = bisect_left(begins, start)
        joins_last = index > 0 and ends[index - 1] == start
        joins_next = index < len(begins) and begins[index] == end
        if joins_last and joins_next:
            ends.pop(index - 1)
            begins.pop(index)
        elif joins_last:
            ends[index - 1] = end
        elif joins_next:
            begins[index] = start
        else:
            begins.insert(index, start)
            ends.insert(index, end)


class EpisodeClock:
    """The state of one episode. `observe` an operator whose predecessors are placed, then `place` it."""

    def __init__(self, times: ClockTimes) -> None:
        problem, self._times = times.problem, times
        n, K = problem.num_operators, problem.num_devices
        self.starts, self.ends = [0.0] * n, [0.0] * n
        self.assignment = [-1] * n
        self._compute = [_Spans() for _ in range(K)]
        self._sending = [_Spans() for _ in range(K)]
        self._receiving = [_Spans() for _ in range(K)]
        self._media: defaultdict[int, _Spans] = defaultdict(_Spans)  # by number
        self._load, self._sent, self._received = [0.0] * K, [0.0] * K, [0.0] * K
        self._arrivals = [-1.0] * (K * len(problem.flows))  # at flow * K + device; -1: the flow is not sent there
        self._operator = -1  # the last one observed, with its earliest start and its transfers by device
        self._start: list[float] = []
        self._needed: list[list[tuple[int, int, float, float]]] = []  # (flow, source device, start, end)

    def observe(self, operator: int) -> list[float]:
        """`CLOCK_COLUMNS` of every device for the operator: a flat list [10 * K]."""
        times, problem, ends, assignment = self._times, self._times.problem, self.ends, self.assignment
        K = problem.num_devices
        flows = problem.incoming[operator]
        if len(flows) > 1:
            flows = tuple(flow for flow, _ in sorted(((f, ends[times.sources[f]]) for f in flows), key=itemgetter(1)))
        starts, missing, needed = [0.0] * K, [0.0] * K, []
        ticks_by_device = times.operators[operator]
        for device in range(K):
            ready, transfers = 0.0, list[tuple[int, int, float, float]]()
            for flow in flows:
                arrival = self._arrivals[flow * K + device]
                if arrival < 0:
                    producer = times.sources[flow]
                    source, start = assignment[producer], ends[producer]
                    ticks = times.transfers[flow][source][device]
                    missing[device] += ticks
                    if ticks and problem.congestion:
                        start = self._common_gap(start, ticks, source, device, transfers)
                    transfers.append((flow, source, start, start + ticks))
                    arrival = start + ticks + times.latency[source][device]
                if arrival > ready:
                    ready = arrival
            needed.append(transfers)
            ticks = ticks_by_device[device]
            starts[device] = self._compute[device].first_gap(ready, ticks) if ticks else ready
        self._operator, self._start, self._needed = operator, starts, needed
        compute, first, last, count = [0.0] * K, [0.0] * K, [0.0] * K, [0.0] * K
        for producer in problem.predecessors[operator]:
            device = assignment[producer]
            begin, end = self.starts[producer], ends[producer]
            compute[device] += times.operators[producer][device]
            if not count[device] or begin < first[device]:
                first[device] = begin
            if end > last[device]:
                last[device] = end
            count[device] += 1
        free = [spans.ends[-1] if spans.ends else 0.0 for spans in self._compute]
        return [
            *free, *self._load, *starts, *self._sent, *self._received, *missing, *compute, *first, *last, *count
        ]  # fmt: skip

    def place(self, device: int) -> None:
        """Place the operator that was observed last, and book its transfers."""
        times, operator, K = self._times, self._operator, len(self._compute)
        for flow, source, begin, finish in self._needed[device]:
            self._arrivals[flow * K + device] = finish + times.latency[source][device]
            self._sent[source] += finish - begin
            self._received[device] += finish - begin
            if times.problem.congestion and finish > begin:
                for spans in self._occupied(source, device):
                    spans.book(begin, finish)
        start, ticks = self._start[device], times.operators[operator][device]
        end = start + ticks
        self.assignment[operator] = device
        self.starts[operator], self.ends[operator] = start, end
        self._load[device] += ticks
        if ticks:
            self._compute[device].book(start, end)
        for flow in times.problem.outgoing[operator]:
            self._arrivals[flow * K + device] = end

    def _occupied(self, source: int, device: int) -> list[_Spans]:
        """What a transfer occupies: the sides of both ends, and the media that it crosses."""
        crossed = self._times.problem.media_crossed(source, device)
        return [self._sending[source], self._receiving[device], *(self._media[number] for number in crossed)]

    def _common_gap(
        self, ready: float, ticks: float, source: int, device: int, reserved: list[tuple[int, int, float, float]]
    ) -> float:
        """The first time that is free on all that the transfer occupies, and of the operator's other transfers there."""
        occupied = self._occupied(source, device)
        while True:
            start = ready
            for spans in occupied:
                start = spans.first_gap(start, ticks)
            for _, _, begin, finish in reserved:
                if start < finish and begin < start + ticks and begin < finish:
                    start = finish
            if start == ready:
                return start
            ready = start
