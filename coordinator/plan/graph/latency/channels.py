"""When devices and links are busy: the gaps that list schedulers and the episodes of policies book. Pure.

With congestion, a transfer books the first gap that the sender's sending side, the receiver's receiving side and the shared
media that it crosses have in common.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Send


class Spans:
    """Busy times of a resource; adjacent ones are merged, so that gaps are found fast."""

    __slots__ = ("begins", "ends")

    def __init__(self) -> None:
        self.begins: list[float] = []  # both sorted
        self.ends: list[float] = []

    @property
    def free_at(self) -> float:
        """The end of the last busy time."""
        return self.ends[-1] if self.ends else 0.0

    def first_gap(self, ready: float, seconds: float) -> float:
        """The first time from `ready` on with `seconds` free."""
        ends = self.ends
        if not ends or ready >= ends[-1]:
            return ready
        begins, index = self.begins, bisect_right(ends, ready)
        while index < len(ends) and begins[index] < ready + seconds:
            ready = ends[index]
            index += 1
        return ready

    def book(self, start: float, end: float) -> None:
        """Mark a free time as busy; nothing if it is empty."""
        if end <= start:
            return
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


class BookedTransfer(NamedTuple):
    """A transfer from a device; `end` is before the link's latency."""

    send: Send
    source: int  # device
    start: float
    end: float


class Channels:
    """The transfers of a schedule under construction."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._sending = [Spans() for _ in problem.devices]
        self._receiving = [Spans() for _ in problem.devices]
        self._media: defaultdict[int, Spans] = defaultdict(Spans)  # by number
        self._arrivals: dict[Send, float] = {}  # arrival time of each booked transfer

    def plan_transfers(
        self, operator: int, device: int, assignment: Sequence[int], ends: Sequence[float]
    ) -> tuple[list[BookedTransfer], float]:
        """The transfers that the operator needs on a device, and the time at which all its inputs are there.

        `assignment` and `ends` are those of the operators placed so far, its predecessors among them.
        """
        problem, transfers, ready = self._problem, list[BookedTransfer](), 0.0
        reserved = Spans()  # of the device's receiving side, by these transfers
        for index in sorted(problem.incoming[operator], key=lambda flow: ends[problem.flows[flow].source]):
            producer, _, seconds = problem.flows[index]
            source, send = assignment[producer], Send(index, device)
            if source == device:
                arrival = ends[producer]
            elif send in self._arrivals:
                arrival = self._arrivals[send]
            else:
                busy = seconds[source][device]
                start = self._common_gap(ends[producer], busy, source, device, reserved)
                transfers.append(BookedTransfer(send, source, start, start + busy))
                reserved.book(start, start + busy)
                arrival = start + busy + problem.latency[source][device]
            ready = max(ready, arrival)
        return transfers, ready

    def book(self, transfers: Sequence[BookedTransfer]) -> None:
        for (flow, device), source, start, end in transfers:
            self._arrivals[Send(flow, device)] = end + self._problem.latency[source][device]
            if self._problem.congestion:
                for spans in self._occupied(source, device):
                    spans.book(start, end)

    def _occupied(self, source: int, device: int) -> list[Spans]:
        """What a transfer occupies: the sides of both ends, and the media that it crosses."""
        crossed = self._problem.media_crossed(source, device)
        return [self._sending[source], self._receiving[device], *(self._media[number] for number in crossed)]

    def _common_gap(self, ready: float, seconds: float, source: int, device: int, reserved: Spans) -> float:
        """The first time that is free in all that the transfer occupies, and in what is reserved."""
        if not self._problem.congestion or seconds == 0:
            return ready
        start, before = ready, -1.0
        occupied = [*self._occupied(source, device), reserved]
        while start != before:
            before = start
            for spans in occupied:
                start = spans.first_gap(start, seconds)
        return start
