"""Turn an assignment of operators to devices into a schedule, with the simulator. Pure.

An order lists the operators, and those transfers (`Send`) whose position matters. There are two disciplines:

- work-conserving: what is ready starts as soon as its device or channel is free; the order only decides between ready
  items.
- in order: each device and each channel follows the order, even if that means waiting for an urgent item while another
  one is ready. An optimal schedule sometimes needs this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.simulator import Resource, Task, compute_resources, simulate, transfer_resources
from hearth.plan.phases import Phase, TaskKind, Work


class Send(NamedTuple):
    """The transfer of a flow to a device."""

    flow: int
    device: int


Item = int | Send  # an operator, or a transfer


class ScheduledTransfer(NamedTuple):
    """A scheduled transfer. At `end` the channel is free again; the tensor arrives the channel's latency later."""

    flow: int
    source: int  # device
    device: int  # the receiver
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Device, start and end of every operator, and all transfers between devices. Times are in the problem's unit."""

    assignment: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[ScheduledTransfer, ...]
    makespan: float
    sources: tuple[int, ...]  # of each flow, its operator

    @property
    def order(self) -> list[Item]:
        """Operators and transfers by start; `schedule` with this order reproduces the schedule."""
        items: list[tuple[float, float, int, Item]] = [
            (each.start, each.end, self.sources[each.flow], Send(each.flow, each.device)) for each in self.transfers
        ]
        for index, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            items.append((start, end, index, index))
        return sorted_by_start(items)

    @property
    def operator_order(self) -> list[int]:
        """The operators by start."""
        return [item for item in self.order if isinstance(item, int)]


def sorted_by_start(items: Iterable[tuple[float, float, int, Item]]) -> list[Item]:
    """Sort items given as (start, end, operator or transfer's source, item): dependencies come first.

    Items that take no time precede others with the same start, so that they do not wait for them.
    """
    return [item for *_, item in sorted(items, key=lambda each: (*each[:3], isinstance(each[3], Send)))]


def with_required_sends(problem: PlacementProblem, assignment: Sequence[int], order: Iterable[Item]) -> list[Item]:
    """Add missing transfers to the order, each just before the first operator that waits for it.

    Transfers that this assignment does not need are removed.
    """
    items: list[Item] = []
    sent: set[Send] = set()
    for item in order:
        if isinstance(item, Send):
            flow = problem.flows[item.flow]
            needed = item.device in {assignment[target] for target in flow.targets} - {assignment[flow.source]}
            if needed and item not in sent:
                sent.add(item)
                items.append(item)
            continue
        device = assignment[item]
        for index in problem.incoming[item]:
            send = Send(index, device)
            if assignment[problem.flows[index].source] != device and send not in sent:
                sent.add(send)
                items.append(send)
        items.append(item)
    return items


def schedule(
    problem: PlacementProblem, assignment: Sequence[int], order: Iterable[Item], in_order: bool = False
) -> Schedule:
    """Run the assignment in the simulator.

    `order` lists every operator once; with `in_order`, every item comes after its dependencies. Raises ValueError if not.
    """
    items = with_required_sends(problem, assignment, order)
    tasks: list[Task] = []
    ran: dict[int, int] = {}  # operator -> task
    sent: dict[Send, int] = {}  # transfer -> task that keeps the channel busy
    arrived: dict[Send, int] = {}  # transfer -> task after which the tensor is there
    number = 0
    for item in items:  # tasks may wait for later ones, so number all of them first
        if isinstance(item, Send):
            sent[item] = arrived[item] = number
            if problem.latency[assignment[problem.flows[item.flow].source]][item.device] > 0:
                number += 1
                arrived[item] = number
        else:
            ran[item] = number
        number += 1
    if len(ran) != problem.num_operators or number != len(sent) + len(ran) + sum(sent[s] != arrived[s] for s in sent):
        raise ValueError("an order lists every operator once")
    last: dict[Resource, int] = {}  # by resource, the task that had it last; only in order

    def add(
        kind: TaskKind, layer: int, device: int, resources: tuple[Resource, ...], seconds: float, after: Iterable[int]
    ) -> None:
        before = set(after)
        if in_order:
            before.update(last[resource] for resource in resources if resource in last)
            last.update(dict.fromkeys(resources, len(tasks)))
        tasks.append(Task(kind, layer, None, device, resources, seconds, tuple(sorted(before))))

    for item in items:
        if isinstance(item, Send):
            flow = problem.flows[item.flow]
            source = assignment[flow.source]
            seconds, latency = flow.seconds[source][item.device], problem.latency[source][item.device]
            crossed = problem.media_crossed(source, item.device)
            busy = transfer_resources(source, item.device, crossed) if problem.congestion and seconds > 0 else ()
            add(Phase.TENSOR, item.flow, item.device, busy, seconds, (ran[flow.source],))
            if latency > 0:
                add(Phase.TENSOR, item.flow, item.device, (), latency, (sent[item],))
        else:
            device = assignment[item]
            needs = []
            for index in problem.incoming[item]:
                source = problem.flows[index].source
                needs.append(ran[source] if assignment[source] == device else arrived[Send(index, device)])
            add(Work.OPERATOR, item, device, compute_resources(device), problem.seconds[item][device], needs)
    timeline = simulate(tasks)
    sources = tuple(flow.source for flow in problem.flows)
    return Schedule(
        assignment=tuple(assignment),
        starts=tuple(timeline.starts[ran[i]] for i in range(problem.num_operators)),
        ends=tuple(timeline.ends[ran[i]] for i in range(problem.num_operators)),
        transfers=tuple(
            ScheduledTransfer(
                send.flow, assignment[sources[send.flow]], send.device, timeline.starts[task], timeline.ends[task]
            )
            for send, task in sent.items()
        ),
        makespan=timeline.makespan,
        sources=sources,
    )


def best_schedule(problem: PlacementProblem, assignment: Sequence[int], order: Iterable[Item]) -> Schedule:
    """The schedule of the discipline with the shorter makespan; work-conserving if both are equal."""
    items = list(order)
    return min(
        (schedule(problem, assignment, items, in_order) for in_order in (False, True)), key=lambda each: each.makespan
    )
