"""Simulated annealing of a schedule: random moves of assignment and order, priced in order. Pure.

The cost of a solution is its makespan plus a share of the mean time at which devices end, so that moves between equal
makespans lead somewhere. The limit on the cost of an accepted move (Metropolis rule) is drawn before the move is priced:
its evaluation starts at the first operator that changes, and stops where it must exceed the limit.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf, log
from random import Random
from typing import NamedTuple, TypeVar

from coordinator.plan.graph.latency.doppler.features import mean_operator_seconds
from coordinator.plan.graph.latency.evaluator import IncrementalEvaluator, named, numbered
from coordinator.plan.graph.latency.memory import MemoryLedger
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule

# At the first and at the last move, as fractions of the makespan of the start: hot enough to leave a list schedule, and not so
# hot that a run of a few seconds only finds its way back.
_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 0.003, 0.0002
# At most, in work of mean operators: large graphs get few moves for each operator. On a transformer of 1,374 operators, 40,000
# moves gain 0.75 % from 0.03 of an operator, 0.2 % from 0.3.
_MOST_OPERATORS = 70.0  # divided by the number of operators
# Of the mean end of devices in the cost. With 0.2, 80,000 moves on the Llama block (gigabit) end 1 % higher, on the layer at
# 190 Mbit/s 1 % lower.
_MEAN_END_WEIGHT = 0.4
_CLOCK_MOVES = 32  # between two looks at the clock, and at the temperature: 50 ms with 3,000 operators
_NEAR = 30  # positions in the order; operators swap devices, and items change their position, within this distance
_POSITION_DRAWS = 4
_ABSENT = -1  # position of a transfer that the order does not list
_PROPOSED_SHARE = 0.5  # of devices that are drawn from the given probabilities; the others are uniform
# How often each move is drawn, relative to the others.
_ONE, _WITH_NEIGHBOUR, _SWAP, _REORDER = 3, 2, 1, 6
T = TypeVar("T")


def improve(
    problem: PlacementProblem,
    start: Schedule,
    rng: Random,
    moves: int,
    clock: Callable[[], float],
    deadline: float = inf,
    probabilities: Sequence[Sequence[float]] | None = None,
) -> Schedule:
    """The best schedule found by `moves` moves from `start`, which fits the memory; never worse than `start`.

    The search cools down over `moves`, or until `clock()` reaches `deadline` if that is earlier. `probabilities[i][k]` is
    that of device k for operator i: half of the proposed devices are drawn from it, the others uniformly (default: all).
    """
    annealing = _Annealing(problem, start, rng, probabilities)
    annealing.run(moves, clock, deadline)
    assignment, order = annealing.best
    return min(start, best_schedule(problem, assignment, named(problem, order)), key=lambda each: each.makespan)


class _Annealing:
    def __init__(
        self, problem: PlacementProblem, start: Schedule, rng: Random, probabilities: Sequence[Sequence[float]] | None
    ) -> None:
        assignment = list(start.assignment)
        order = numbered(problem, assignment, start.order)
        self._random = rng.random
        self._most_temperature = _MOST_OPERATORS / problem.num_operators * mean_operator_seconds(problem)
        self._memory = MemoryLedger(problem, assignment)
        self._moves = MoveGenerator(problem, assignment, order, rng, probabilities)
        self._evaluator = IncrementalEvaluator(problem, assignment, order, _MEAN_END_WEIGHT)
        self._best_makespan = self._evaluator.makespan
        self.best = (assignment, order)

    def run(self, moves: int, clock: Callable[[], float], deadline: float) -> None:
        """Make moves, cooling down geometrically."""
        began = clock()
        hottest = min(self._evaluator.makespan * _FIRST_TEMPERATURE, self._most_temperature)
        temperature, ratio = hottest, _LAST_TEMPERATURE / _FIRST_TEMPERATURE
        for number in range(moves):
            if number % _CLOCK_MOVES == 0:
                now = clock()
                if now >= deadline:
                    return
                temperature = hottest * ratio ** max(number / moves, (now - began) / (deadline - began))
            move = self._moves.draw()
            if move is not None:
                self._try(move, self._evaluator.cost - temperature * log(1.0 - self._random()))

    def _try(self, move: Move, limit: float) -> None:
        """Accept the move if it fits the memory and costs at most `limit`."""
        solution = self._moves
        assignment = solution.assignment
        if move.devices:
            assignment = assignment[:]
            for operator, device in move.devices.items():
                assignment[operator] = device
        order = solution.order if move.order is None else move.order
        self._move_memory(move)
        fits = self._memory.fits or not self._memory.is_binding
        if not fits or self._evaluator.trial(assignment, order, move.first, limit) > limit:
            self._move_memory(move, back=True)
            return
        self._evaluator.commit()
        solution.accept(assignment, move)
        if self._evaluator.makespan < self._best_makespan:
            self._best_makespan = self._evaluator.makespan
            self.best = (assignment, order)

    def _move_memory(self, move: Move, back: bool = False) -> None:
        if self._memory.is_binding:
            for operator, device in move.devices.items():
                before = self._moves.assignment[operator]
                self._memory.move(operator, *((device, before) if back else (before, device)))


class Move(NamedTuple):
    """Some operators change their devices, or one item its position in the order."""

    devices: Mapping[int, int]  # operators with their new devices
    order: list[int] | None  # the new order, if it changes
    first: int  # the first position that changes
    removed: Sequence[int] = ()  # transfers that are in the old order only


class MoveGenerator:
    """The current solution, and random moves from it. Moves keep the order topological; memory is not looked at.

    The order lists operators and transfers by their numbers (`numbered`), and a move keeps it complete.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        assignment: list[int],
        order: list[int],
        rng: Random,
        probabilities: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self.assignment, self.order = assignment, order
        self._problem, self._random = problem, rng.random
        self._n, self._num_devices = problem.num_operators, problem.num_devices
        self._contends = [problem.contends(flow) for flow in range(len(problem.flows))]
        self._has_transfers = any(self._contends)
        self._position = [_ABSENT] * (self._n + len(problem.flows) * self._num_devices)  # by item
        self._renumber(0)
        self._neighbours = [
            before + after for before, after in zip(problem.predecessors, problem.successors, strict=True)
        ]
        self._cumulative = [list(accumulate(row)) for row in probabilities or ()]
        self._kinds: list[Callable[[], Move | None]] = [
            *[self._move_one] * _ONE,
            *[self._move_with_neighbour] * _WITH_NEIGHBOUR,
            *[self._swap] * _SWAP,
            *[self._reorder] * _REORDER,
        ]

    def draw(self) -> Move | None:
        """A random move; None if the one that was drawn changes nothing."""
        return self._choice(self._kinds)()

    def accept(self, assignment: list[int], move: Move) -> None:
        """Replace the solution by that of the move."""
        self.assignment = assignment
        if move.order is not None:
            for item in move.removed:
                self._position[item] = _ABSENT
            self.order = move.order
            self._renumber(move.first)

    def _renumber(self, first: int) -> None:
        for index in range(first, len(self.order)):
            self._position[self.order[index]] = index

    def _choice(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def _operator(self) -> int:
        return int(self._random() * self._n)

    def _device(self, operator: int) -> int:
        """A proposed device."""
        if self._cumulative and self._random() < _PROPOSED_SHARE:
            sums = self._cumulative[operator]
            return min(bisect(sums, self._random() * sums[-1]), len(sums) - 1)
        return int(self._random() * self._problem.num_devices)

    def _move_one(self) -> Move | None:
        operator = self._operator()
        return self._placed((operator,), (self._device(operator),))

    def _move_with_neighbour(self) -> Move | None:
        """Move a producer and a consumer to one device."""
        operator = self._operator()
        if not self._neighbours[operator]:
            return None
        device = self._device(operator)
        return self._placed((operator, self._choice(self._neighbours[operator])), (device, device))

    def _swap(self) -> Move | None:
        """Swap the devices of two operators that are near each other in the order."""
        a = self._operator()
        near = self._position[a] + int(self._random() * (2 * _NEAR + 1)) - _NEAR
        b = self.order[min(max(near, 0), len(self.order) - 1)]
        if b >= self._n:
            return None
        return self._placed((a, b), (self.assignment[b], self.assignment[a]))

    def _reorder(self) -> Move | None:
        """Move an item to another position between those before and after it, if it can to one with the same resource.

        Passing items of other resources changes nothing.
        """
        item, position = self._choice(self.order), self._position
        old = position[item]
        earliest, latest = max(old - _NEAR, 0), min(old + _NEAR, len(self.order) - 1)
        before, after = self._bounds(item)
        for each in before:
            if position[each] >= earliest:
                earliest = position[each] + 1
        for each in after:
            if 0 <= position[each] <= latest:
                latest = position[each] - 1
        if earliest >= latest:
            return None
        for _ in range(_POSITION_DRAWS):
            new = earliest + int(self._random() * (latest - earliest))
            new += new >= old
            if self._compete(item, self.order[new]):
                break
        order = self.order[:]
        del order[old]
        order.insert(new, item)
        return Move({}, order, min(old, new))

    def _bounds(self, item: int) -> tuple[Sequence[int], Sequence[int]]:
        """The items that must run before this one, and after it; some of them may be absent."""
        problem, n, num_devices = self._problem, self._n, self._num_devices
        if item >= n:
            index, device = divmod(item - n, num_devices)
            flow = problem.flows[index]
            return (flow.source,), [target for target in flow.targets if self.assignment[target] == device]
        before, after = problem.predecessors[item], problem.successors[item]
        if not self._has_transfers:
            return before, after
        device = self.assignment[item]
        return (
            [*before, *(n + index * num_devices + device for index in problem.incoming[item])],
            [*after, *(n + index * num_devices + k for index in problem.outgoing[item] for k in range(num_devices))],
        )

    def _compete(self, item: int, other: int) -> bool:
        """Whether both are operators on one device, or transfers with a common side."""
        n = self._n
        if item < n or other < n:
            return item < n and other < n and self.assignment[item] == self.assignment[other]
        ours, theirs = divmod(item - n, self._num_devices), divmod(other - n, self._num_devices)
        if ours[1] == theirs[1]:
            return True
        flows, assignment = self._problem.flows, self.assignment
        return assignment[flows[ours[0]].source] == assignment[flows[theirs[0]].source]

    def _placed(self, operators: Sequence[int], devices: Sequence[int]) -> Move | None:
        changes = {
            operator: device
            for operator, device in zip(operators, devices, strict=True)
            if self.assignment[operator] != device
        }
        if not changes:
            return None
        first = min(self._position[operator] for operator in changes)
        return self._with_transfers(Move(changes, None, first)) if self._has_transfers else Move(changes, None, first)

    def _with_transfers(self, move: Move) -> Move:
        """The move with the transfers that it needs, in the places of those that it does not need any more."""
        problem, changes, position, n = self._problem, move.devices, self._position, self._n
        assignment, num_devices = self.assignment, self._num_devices
        affected = {
            f for each in changes for f in (*problem.incoming[each], *problem.outgoing[each]) if self._contends[f]
        }
        order, first, removed = self.order, move.first, list[int]()
        edits: list[tuple[int, int]] = []  # position and the transfer to insert before it; _ABSENT to delete it
        for index in affected:
            flow, offset = problem.flows[index], n + index * num_devices
            source = changes.get(flow.source, assignment[flow.source])
            consumers: dict[int, int] = {}  # by device, the first position of a consumer
            for target in flow.targets:
                device, there = changes.get(target, assignment[target]), position[target]
                if device != source and there < consumers.get(device, there + 1):
                    consumers[device] = there
            listed = [k for k in range(num_devices) if position[offset + k] != _ABSENT]
            missing = [k for k in consumers if k not in listed]
            for k in listed:
                there = position[offset + k]
                if k in consumers:
                    if there > consumers[k]:
                        edits += [(there, _ABSENT), (consumers[k], offset + k)]
                    continue
                first = min(first, there)
                removed.append(offset + k)
                if missing and there < consumers[missing[-1]]:
                    if order is self.order:
                        order = order[:]
                    order[there] = offset + missing.pop()
                else:
                    edits.append((there, _ABSENT))
            edits += [(consumers[k], offset + k) for k in missing]
        if edits and order is self.order:
            order = order[:]
        for there, item in sorted(edits, reverse=True):
            if item == _ABSENT:
                del order[there]
            else:
                order.insert(there, item)
                first = min(first, there)
        return move._replace(order=order if order is not self.order else None, first=first, removed=removed)
