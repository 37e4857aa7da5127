"""Large neighbourhood search: re-optimise a window of the schedule while everything else keeps its place.

The window's operators are consecutive in the schedule's order. Operators before it are fixed in time. Operators after it
keep their devices and their order; the model sees them as the time from the end of each window operator, on each device,
to the end of the schedule. This is exact except for transfers that contend across the window's edges; therefore every
result is simulated before it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from coordinator.plan.graph.latency.cpsat import SolverLimits, WindowContext, solve_placement_model
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, SharedWeights
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule

# Operators in the first windows: each is solved in about a second. Larger ones follow once these improve nothing.
_WINDOW_OPERATORS = 24
# CP-SAT's deterministic seconds for a window of the first round, doubled in each further one.
_WINDOW_SECONDS = 2.0
# Of a window, about the number of variables: operators times pairs of devices. Building a model of this size takes a second.
_MAX_WINDOW_CHANNELS = 6000


class WindowSearch:
    """Sweeps over a schedule in ticks, window by window; consecutive windows overlap by half.

    After a sweep that improves nothing, the windows get twice as large, up to the whole graph. After the largest, a round
    begins with the smallest again, for which the solver takes twice the time; its windows begin elsewhere.
    """

    def __init__(self, problem: PlacementProblem, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._problem, self._clock = problem, clock
        most = max(_WINDOW_OPERATORS, _MAX_WINDOW_CHANNELS // problem.num_devices**2)
        self._max_size = min(problem.num_operators, most)
        self._size, self._round = min(_WINDOW_OPERATORS, self._max_size), 0
        self._position = 0  # in the schedule's order, of the next window
        self._improved = False  # in this sweep
        self.bound = 0  # on the makespan: proven by windows of the whole graph

    def step(self, known: Schedule, seconds: float) -> Schedule | None:
        """Solve the next window of a schedule within `seconds`. None if it finds nothing better."""
        inside = known.operator_order[self._position : self._position + self._size]
        limits = SolverLimits(seconds, _WINDOW_SECONDS * 2**self._round, clock=self._clock)
        if len(inside) == self._problem.num_operators:
            result = solve_placement_model(self._problem, limits, round(known.makespan), hint=known)
            self.bound, found = max(self.bound, result.bound), result.schedule
        else:
            found = solve_window(self._problem, known, inside, limits)
        better = found if found is not None and found.makespan < known.makespan else None
        self._improved |= better is not None
        self._position += max(1, self._size // 2)
        if self._position >= self._problem.num_operators:
            self._begin_sweep()
        return better

    def _begin_sweep(self) -> None:
        if not self._improved and self._size < self._max_size:
            self._size = min(2 * self._size, self._max_size)
        elif not self._improved:
            self._size, self._round = min(_WINDOW_OPERATORS, self._max_size), self._round + 1
        shift = self._size // 4 if self._round % 2 and self._size < self._problem.num_operators else 0
        self._position, self._improved = shift, False


class _Window(NamedTuple):
    problem: PlacementProblem
    operators: tuple[int, ...]  # numbers in the whole problem; pinned ones first, then those inside
    flows: tuple[int, ...]
    pins: dict[int, int]
    context: WindowContext


def solve_window(
    problem: PlacementProblem, known: Schedule, inside: Sequence[int], limits: SolverLimits
) -> Schedule | None:
    """The schedule with the operators inside re-placed and reordered; None when the model found no improvement."""
    window = _make_window(problem, known, inside)
    result = solve_placement_model(window.problem, limits, round(known.makespan), window.pins, context=window.context)
    if result.schedule is None:
        return None
    assignment = list(known.assignment)
    for operator, device in zip(window.operators, result.schedule.assignment, strict=True):
        assignment[operator] = device
    new, inside_set = list[Item](), set(inside)
    for item in result.schedule.order:
        if isinstance(item, Send):
            new.append(Send(window.flows[item.flow], item.device))
        elif window.operators[item] in inside_set:
            new.append(window.operators[item])
    old = known.order
    moved = set(new)
    first = next(index for index, item in enumerate(old) if item in inside_set)
    before = [item for item in old[:first] if item not in moved]
    after = [item for item in old[first:] if item not in inside_set and item not in moved]
    return best_schedule(problem, assignment, [*before, *new, *after])


def _make_window(problem: PlacementProblem, known: Schedule, inside: Sequence[int]) -> _Window:
    inside_set = set(inside)
    order = known.order
    position = {item: index for index, item in enumerate(order)}
    first = min(position[operator] for operator in inside)
    past = {i for i in range(problem.num_operators) if position[i] < first}
    outside = [i for i in range(problem.num_operators) if i not in inside_set]
    remaining = _remaining_times(problem, known, order)
    ranks = range(problem.num_devices)
    free_at, next_on = [0.0] * problem.num_devices, [0.0] * problem.num_devices
    for i in outside:
        k = known.assignment[i]
        if i in past:
            free_at[k] = max(free_at[k], known.ends[i])
        else:
            next_on[k] = max(next_on[k], remaining[i])

    sources = sorted({problem.flows[f].source for i in inside for f in problem.incoming[i]} - inside_set)
    holders = _shared_weight_holders(problem, known, inside_set, sources)
    pinned = sources + holders
    operators = tuple(sorted(pinned) + sorted(inside))
    local = {operator: index for index, operator in enumerate(operators)}
    zero_ticks = [0.0] * len(ranks)
    releases = [
        list(free_at) if i in inside_set else [known.ends[i]] * len(ranks) if i in sources else zero_ticks
        for i in operators
    ]
    tails = [list(next_on) if i in inside_set else zero_ticks for i in operators]
    arrived = {Send(t.flow, t.device): t.end + problem.latency[t.source][t.device] for t in known.transfers}

    flows, flow_numbers = [], []
    for number in sorted({f for i in inside for f in (*problem.incoming[i], *problem.outgoing[i])}):
        flow = problem.flows[number]
        targets = tuple(local[target] for target in flow.targets if target in inside_set)
        times = [list(row) for row in flow.seconds]
        if flow.source not in inside_set:
            # It is already on the devices of its consumers before the window.
            here = known.assignment[flow.source]
            for k in {known.assignment[t] for t in flow.targets if t in past} - {here}:
                times[here][k] = 0.0
                for target in targets:
                    releases[target][k] = max(releases[target][k], arrived[Send(number, k)])
        else:
            for target in (t for t in flow.targets if t not in inside_set):
                there = known.assignment[target]
                tail = tails[local[flow.source]]
                for k in ranks:
                    tail[k] = max(tail[k], flow.seconds[k][there] + problem.latency[k][there] + remaining[target])
        if targets:
            flows.append(Flow(local[flow.source], targets, tuple(map(tuple, times))))
            flow_numbers.append(number)
    part = replace(
        problem,
        operators=tuple(problem.operators[i] for i in operators),
        seconds=tuple(problem.seconds[i] if i in inside_set else (0.0,) * len(ranks) for i in operators),
        memory_bytes=tuple(problem.memory_bytes[i] if i in inside_set else 0 for i in operators),
        budget_bytes=_free_bytes(problem, known, outside),
        flows=tuple(flows),
        shared=tuple(
            SharedWeights(group.num_bytes, tuple(local[i] for i in group.operators if i in local))
            for group in problem.shared
            if inside_set.intersection(group.operators)
        ),
        groups=(),
        fitting=(),
    )
    pins = {local[i]: known.assignment[i] for i in pinned}
    return _Window(
        part, operators, tuple(flow_numbers), pins, WindowContext(tuple(map(tuple, releases)), tuple(map(tuple, tails)))
    )


def _remaining_times(problem: PlacementProblem, known: Schedule, order: Sequence[Item]) -> dict[int, float]:
    """By operator, the time from its start to the end of everything that waits for it, in the schedule's order."""
    assignment = known.assignment
    remaining: dict[int, float] = {}
    sent: dict[Send, float] = {}
    next_on: dict[tuple[str, int], float] = {}  # by resource, the rest of the item that uses it next
    for item in reversed(order):
        if isinstance(item, Send):
            flow = problem.flows[item.flow]
            source, device = assignment[flow.source], item.device
            after = problem.latency[source][device] + max(remaining[t] for t in flow.targets if assignment[t] == device)
            sides: list[tuple[str, int]] = []
            if problem.congestion and flow.seconds[source][device]:
                sides = [("send", source), ("receive", device)]
                sides += [("medium", number) for number in problem.media_crossed(source, device)]
            after = max(after, *(next_on.get(side, 0.0) for side in sides), 0.0)
            sent[item] = flow.seconds[source][device] + after
            next_on.update(dict.fromkeys(sides, sent[item]))
            continue
        device = assignment[item]
        after = next_on.get(("compute", device), 0.0)
        for index in problem.outgoing[item]:
            for target in problem.flows[index].targets:
                there = assignment[target]
                after = max(after, remaining[target] if there == device else sent[Send(index, there)])
        remaining[item] = problem.seconds[item][device] + after
        next_on["compute", device] = remaining[item]
    return remaining


def _shared_weight_holders(
    problem: PlacementProblem, known: Schedule, inside: set[int], already_pinned: Sequence[int]
) -> list[int]:
    """Operators outside that hold weights shared with operators inside: one per group of weights and device."""
    holders: dict[tuple[int, int], int] = {}
    for index, group in enumerate(problem.shared):
        if inside.intersection(group.operators):
            for i in group.operators:
                if i not in inside:
                    holders.setdefault((index, known.assignment[i]), i)
    return sorted(set(holders.values()) - set(already_pinned))


def _free_bytes(problem: PlacementProblem, known: Schedule, outside: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each device that the operators outside leave free; weights shared with the inside are not subtracted."""
    free = list(problem.budget_bytes)
    for i in outside:
        free[known.assignment[i]] -= problem.memory_bytes[i]
    for group in problem.shared:
        if set(group.operators) <= set(outside):
            for device in {known.assignment[i] for i in group.operators}:
                free[device] -= group.num_bytes
    return tuple(free)
