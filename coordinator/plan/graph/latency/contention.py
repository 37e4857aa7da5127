"""HEFT with link contention: list scheduling that books transfers on channels (Sinnen and Sousa, IEEE TPDS 2005). Pure.

Where links are slow compared with operators, plain HEFT sends more than the channels can carry. This variant records
when each device's sending and receiving sides and the shared media are busy, and puts a transfer into the first gap that
all of its resources have.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.plan.graph.latency.heft import rank_order
from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, first_gap, upward_ranks
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule, sorted_by_start

_Spans = list[tuple[float, float]]  # sorted, none overlaps another


class _BookedTransfer(NamedTuple):
    send: Send
    source: int  # device
    start: float
    end: float


def contended_heft(
    problem: PlacementProblem, pins: Mapping[int, int] | None = None, ranks: Sequence[float] | None = None
) -> Schedule:
    """Place operators by decreasing rank, each on the device where it ends first with the transfers that it needs.

    `pins` bind operators to devices; `ranks` default to HEFT's upward ranks. Raises NoPlacement.
    """
    pins = pins or {}
    partial = PartialSchedule(problem, "contended-heft")
    channels = _Channels(problem)
    if ranks is None:
        ranks = upward_ranks(problem)
    items: list[tuple[float, float, int, Item]] = []
    for operator in rank_order(problem, ranks):
        options = []
        for device in partial.candidates(operator, [pins[operator]] if operator in pins else None):
            transfers, ready = channels.plan_transfers(operator, device, partial)
            start = partial.first_gap_start(operator, device, ready)
            options.append((start + problem.seconds[operator][device], device, start, transfers))
        end, device, start, transfers = min(options, key=lambda option: option[:2])
        partial.place(operator, device, start)
        channels.book(transfers)
        items.append((start, end, operator, operator))
        items += [(each.start, each.end, problem.flows[each.send.flow].source, each.send) for each in transfers]
    return best_schedule(problem, partial.assignment, sorted_by_start(items))


class _Channels:
    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._sending: list[_Spans] = [[] for _ in problem.devices]
        self._receiving: list[_Spans] = [[] for _ in problem.devices]
        self._media: defaultdict[int, _Spans] = defaultdict(list)  # by number
        self._arrivals: dict[Send, float] = {}  # arrival time of each booked transfer

    def plan_transfers(
        self, operator: int, device: int, partial: PartialSchedule
    ) -> tuple[list[_BookedTransfer], float]:
        """The transfers that the operator needs on a device, and the time at which all its inputs are there."""
        problem, transfers, ready = self._problem, list[_BookedTransfer](), 0.0
        reserved: _Spans = []  # of the device's receiving side, by these transfers
        for index in sorted(problem.incoming[operator], key=lambda f: partial.ends[problem.flows[f].source]):
            producer = problem.flows[index].source
            source, send = partial.assignment[producer], Send(index, device)
            if source == device:
                ready = max(ready, partial.ends[producer])
            elif send in self._arrivals:
                ready = max(ready, self._arrivals[send])
            else:
                seconds = problem.flows[index].seconds[source][device]
                start = self._first_gap(partial.ends[producer], seconds, source, device, reserved)
                transfers.append(_BookedTransfer(send, source, start, start + seconds))
                insort(reserved, (start, start + seconds))
                ready = max(ready, start + seconds + problem.latency[source][device])
        return transfers, ready

    def book(self, transfers: list[_BookedTransfer]) -> None:
        for transfer in transfers:
            self._arrivals[transfer.send] = transfer.end + self._problem.latency[transfer.source][transfer.send.device]
            if self._problem.congestion and transfer.end > transfer.start:
                for spans in self._occupied(transfer.source, transfer.send.device):
                    insort(spans, (transfer.start, transfer.end))

    def _occupied(self, source: int, device: int) -> list[_Spans]:
        """What a transfer occupies: the sides of both ends, and the media that it crosses."""
        crossed = self._problem.media_crossed(source, device)
        return [self._sending[source], self._receiving[device], *(self._media[number] for number in crossed)]

    def _first_gap(self, ready: float, seconds: float, source: int, device: int, reserved: _Spans) -> float:
        if not self._problem.congestion or seconds == 0:
            return ready
        start, before = ready, -1.0
        occupied = [*self._occupied(source, device), reserved]
        while start != before:  # until one start time is free in all
            before = start
            for spans in occupied:
                start = first_gap(spans, start, seconds)
        return start
