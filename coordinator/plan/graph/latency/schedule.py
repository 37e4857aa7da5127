"""When everything runs, once each operator has a device: priced by the one simulator. Pure.

An order lists operators, and transfers (`Send`) where their turn matters. Two disciplines read it:

- work-conserving: whatever is ready starts as soon as its device or channel is free; the order only says who goes first.
- in order: each device and each channel keeps to the order, and so may wait for something urgent while something else
  is ready. An optimal schedule sometimes does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.simulator import Resource, Task, compute_of, sides_of, simulate
from hearth.plan.phases import Phase, TaskKind, Work


class Send(NamedTuple):
    """A flow on its way to a device."""

    flow: int
    device: int


Item = int | Send  # an operator, or a transfer


class Transfer(NamedTuple):
    """`end` is when the channel is free again; the tensor arrives the channel's latency later."""

    flow: int
    source: int  # device
    device: int  # that it goes to
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Of all operators: device, start and end; of all transfers between devices. Times as in the problem."""

    assignment: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    makespan: float
    sources: tuple[int, ...]  # of each flow, its operator

    @property
    def order(self) -> list[Item]:
        """Everything by its start; run in that order, it is this schedule again."""
        items: list[tuple[float, float, int, Item]] = [
            (each.start, each.end, self.sources[each.flow], Send(each.flow, each.device)) for each in self.transfers
        ]
        for index, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            items.append((start, end, index, index))
        return by_start(items)


def by_start(items: Iterable[tuple[float, float, int, Item]]) -> list[Item]:
    """Of (start, end, operator or transfer's source, item): what depends on something else stands after it.

    What takes no time stands before what starts with it, so that it waits for nobody.
    """
    return [item for *_, item in sorted(items, key=lambda each: (*each[:3], isinstance(each[3], Send)))]


def with_sends(problem: PlacementProblem, assignment: Sequence[int], order: Iterable[Item]) -> list[Item]:
    """The order, with each transfer that it lacks just before the first operator that waits for it.

    Transfers that this assignment does not need are left out.
    """
    items: list[Item] = []
    there: set[Send] = set()
    for item in order:
        if isinstance(item, Send):
            flow = problem.flows[item.flow]
            needed = item.device in {assignment[target] for target in flow.targets} - {assignment[flow.source]}
            if needed and item not in there:
                there.add(item)
                items.append(item)
            continue
        device = assignment[item]
        for index in problem.incoming[item]:
            send = Send(index, device)
            if assignment[problem.flows[index].source] != device and send not in there:
                there.add(send)
                items.append(send)
        items.append(item)
    return items


def schedule(
    problem: PlacementProblem, assignment: Sequence[int], order: Iterable[Item], in_order: bool = False
) -> Schedule:
    """Run the assignment in the simulator.

    `order` has every operator once; with `in_order`, nothing stands before what it depends on. Raises ValueError else.
    """
    items = with_sends(problem, assignment, order)
    tasks: list[Task] = []
    ran: dict[int, int] = {}  # operator -> task
    sent: dict[Send, int] = {}  # transfer -> task that keeps the channel busy
    arrived: dict[Send, int] = {}  # transfer -> task after which the tensor is there
    number = 0
    for item in items:  # tasks may wait for later ones: first all get their numbers
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
            busy = sides_of(source, item.device) if problem.congestion and seconds > 0 else ()
            add(Phase.TENSOR, item.flow, item.device, busy, seconds, (ran[flow.source],))
            if latency > 0:
                add(Phase.TENSOR, item.flow, item.device, (), latency, (sent[item],))
        else:
            device = assignment[item]
            needs = []
            for index in problem.incoming[item]:
                source = problem.flows[index].source
                needs.append(ran[source] if assignment[source] == device else arrived[Send(index, device)])
            add(Work.OPERATOR, item, device, compute_of(device), problem.seconds[item][device], needs)
    timeline = simulate(tasks)
    sources = tuple(flow.source for flow in problem.flows)
    return Schedule(
        assignment=tuple(assignment),
        starts=tuple(timeline.starts[ran[i]] for i in range(problem.num_operators)),
        ends=tuple(timeline.ends[ran[i]] for i in range(problem.num_operators)),
        transfers=tuple(
            Transfer(send.flow, assignment[sources[send.flow]], send.device, timeline.starts[task], timeline.ends[task])
            for send, task in sent.items()
        ),
        makespan=timeline.makespan,
        sources=sources,
    )


def best_schedule(problem: PlacementProblem, assignment: Sequence[int], order: Iterable[Item]) -> Schedule:
    """The order under the discipline that ends sooner; work-conserving where both are equal."""
    items = list(order)
    return min(
        (schedule(problem, assignment, items, in_order) for in_order in (False, True)), key=lambda each: each.makespan
    )
