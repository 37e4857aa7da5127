"""HEFT with link contention: list scheduling that books transfers on channels (Sinnen and Sousa, IEEE TPDS 2005). Pure.

Where links are slow compared with operators, plain HEFT sends more than the channels can carry. This variant records
when each device's sending and receiving sides are busy, and puts a transfer into the first gap that both have.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.plan.graph.latency.heft import by_rank
from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, first_gap, upward_ranks
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule, by_start

_Spans = list[tuple[float, float]]  # sorted, none overlaps another


class _Trip(NamedTuple):
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
    for operator in by_rank(problem, ranks):
        ways = []
        for device in partial.candidates(operator, [pins[operator]] if operator in pins else None):
            trips, ready = channels.bring(operator, device, partial)
            start = partial.earliest_after(operator, device, ready)
            ways.append((start + problem.seconds[operator][device], device, start, trips))
        end, device, start, trips = min(ways, key=lambda way: way[:2])
        partial.place(operator, device, start)
        channels.book(trips)
        items.append((start, end, operator, operator))
        items += [(trip.start, trip.end, problem.flows[trip.send.flow].source, trip.send) for trip in trips]
    return best_schedule(problem, partial.assignment, by_start(items))


class _Channels:
    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._sending: list[_Spans] = [[] for _ in problem.devices]
        self._receiving: list[_Spans] = [[] for _ in problem.devices]
        self._there: dict[Send, float] = {}  # arrival time of each booked transfer

    def bring(self, operator: int, device: int, partial: PartialSchedule) -> tuple[list[_Trip], float]:
        """The transfers that the operator needs on a device, and the time at which all its inputs are there."""
        problem, trips, ready = self._problem, list[_Trip](), 0.0
        taken: _Spans = []  # of the device's receiving side, by these transfers
        for index in sorted(problem.incoming[operator], key=lambda f: partial.ends[problem.flows[f].source]):
            made = problem.flows[index].source
            source, send = partial.assignment[made], Send(index, device)
            if source == device:
                ready = max(ready, partial.ends[made])
            elif send in self._there:
                ready = max(ready, self._there[send])
            else:
                seconds = problem.flows[index].seconds[source][device]
                start = self._first_gap(partial.ends[made], seconds, source, device, taken)
                trips.append(_Trip(send, source, start, start + seconds))
                insort(taken, (start, start + seconds))
                ready = max(ready, start + seconds + problem.latency[source][device])
        return trips, ready

    def book(self, trips: list[_Trip]) -> None:
        for trip in trips:
            self._there[trip.send] = trip.end + self._problem.latency[trip.source][trip.send.device]
            if self._problem.congestion and trip.end > trip.start:
                insort(self._sending[trip.source], (trip.start, trip.end))
                insort(self._receiving[trip.send.device], (trip.start, trip.end))

    def _first_gap(self, ready: float, seconds: float, source: int, device: int, taken: _Spans) -> float:
        if not self._problem.congestion or seconds == 0:
            return ready
        start, before = ready, -1.0
        while start != before:  # until one start time is free in all three
            before = start
            for spans in (self._sending[source], self._receiving[device], taken):
                start = first_gap(spans, start, seconds)
        return start
