"""Random moves between neighbouring solutions of a placement problem. Pure."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple, TypeVar

from ortools.graph.python import linear_sum_assignment

from coordinator.plan.graph.latency.problem import PlacementProblem

_NEAR = 30  # positions in the order; operators swap devices, and change their position, within this distance
_POSITION_DRAWS = 4
_PROPOSED_SHARE = 0.5  # of devices that are drawn from the given probabilities; the others are uniform
# How often each move is drawn, relative to the others.
_ONE, _WITH_NEIGHBOUR, _SWAP, _REORDER = 3, 2, 1, 3
_GROUP_SHARE = 0.01  # of moves permute a group: they cost as much as ten others
_COST_STEPS = 1_000_000  # the assignment problem of a group has integer costs

T = TypeVar("T")


class Move(NamedTuple):
    """Some operators change their devices, or one operator its position in the order."""

    devices: Sequence[tuple[int, int]]  # operators with their new devices
    order: list[int] | None  # the new order, if it changes
    first: int  # the first position that changes


class MoveGenerator:
    """The current solution, and random moves from it. Moves keep the order topological; memory is not looked at."""

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
        self._position = [0] * len(order)
        self._renumber(0)
        self._neighbours = [
            before + after for before, after in zip(problem.predecessors, problem.successors, strict=True)
        ]
        self._cumulative = [list(accumulate(row)) for row in probabilities or ()]
        self._groups = [each for each in problem.groups if len(each) > 1] or interchangeable_operators(problem)
        self._kinds: list[Callable[[], Move | None]] = [
            *[self._move_one] * _ONE,
            *[self._move_with_neighbour] * _WITH_NEIGHBOUR,
            *[self._swap] * _SWAP,
            *[self._reorder] * _REORDER,
        ]

    def draw(self) -> Move | None:
        """A random move; None if the one that was drawn changes nothing."""
        if self._groups and self._random() < _GROUP_SHARE:
            return self._permute_group()
        return self._choice(self._kinds)()

    def accept(self, assignment: list[int], order: list[int], first: int) -> None:
        """Replace the solution by one whose order differs only from position `first` on."""
        changed = order is not self.order
        self.assignment, self.order = assignment, order
        if changed:
            self._renumber(first)

    def _renumber(self, first: int) -> None:
        for index in range(first, len(self.order)):
            self._position[self.order[index]] = index

    def _choice(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def _device(self, operator: int) -> int:
        """A proposed device."""
        if self._cumulative and self._random() < _PROPOSED_SHARE:
            sums = self._cumulative[operator]
            return min(bisect(sums, self._random() * sums[-1]), len(sums) - 1)
        return int(self._random() * self._problem.num_devices)

    def _move_one(self) -> Move | None:
        operator = self._choice(self.order)
        return self._placed((operator,), (self._device(operator),))

    def _move_with_neighbour(self) -> Move | None:
        """Move a producer and a consumer to one device."""
        operator = self._choice(self.order)
        if not self._neighbours[operator]:
            return None
        device = self._device(operator)
        return self._placed((operator, self._choice(self._neighbours[operator])), (device, device))

    def _swap(self) -> Move | None:
        """Swap the devices of two operators that are near each other in the order."""
        a = self._choice(self.order)
        near = self._position[a] + int(self._random() * (2 * _NEAR + 1)) - _NEAR
        b = self.order[min(max(near, 0), len(self.order) - 1)]
        return self._placed((a, b), (self.assignment[b], self.assignment[a]))

    def _reorder(self) -> Move | None:
        """Move an operator to another position between its predecessors and its successors, if it can to one of its device.

        Passing operators of other devices changes the order of transfers at most, and mostly nothing.
        """
        operator = self._choice(self.order)
        old = self._position[operator]
        earliest, latest = max(old - _NEAR, 0), min(old + _NEAR, len(self.order) - 1)
        for before in self._problem.predecessors[operator]:
            earliest = max(earliest, self._position[before] + 1)
        for after in self._problem.successors[operator]:
            latest = min(latest, self._position[after] - 1)
        if earliest == latest:
            return None
        for _ in range(_POSITION_DRAWS):
            new = earliest + int(self._random() * (latest - earliest))
            new += new >= old
            if self.assignment[self.order[new]] == self.assignment[operator]:
                break
        order = self.order[:]
        del order[old]
        order.insert(new, operator)
        return Move((), order, min(old, new))

    def _permute_group(self) -> Move | None:
        """Permute the devices of a group: the least transfer time to and from all others, with random noise."""
        group = self._choice(self._groups)
        devices = [self.assignment[operator] for operator in group]
        noise = self._random()
        costs = [
            [self._transfer_seconds(operator, device) * (1.0 + noise * self._random()) for device in devices]
            for operator in group
        ]
        scale = _COST_STEPS / (max(map(max, costs)) or 1.0)
        solver = linear_sum_assignment.SimpleLinearSumAssignment()
        for left, row in enumerate(costs):
            for right, cost in enumerate(row):
                solver.add_arc_with_cost(left, right, int(cost * scale))
        solver.solve()
        return self._placed(group, [devices[solver.right_mate(left)] for left in range(len(group))])

    def _transfer_seconds(self, operator: int, device: int) -> float:
        """Seconds of all transfers to and from the operator if it runs on this device."""
        problem, assignment, seconds = self._problem, self.assignment, 0.0
        for index in problem.incoming[operator]:
            flow = problem.flows[index]
            seconds += flow.seconds[assignment[flow.source]][device]
        for index in problem.outgoing[operator]:
            flow = problem.flows[index]
            seconds += sum(flow.seconds[device][there] for there in {assignment[target] for target in flow.targets})
        return seconds

    def _placed(self, operators: Sequence[int], devices: Sequence[int]) -> Move | None:
        changes = [
            (operator, device)
            for operator, device in zip(operators, devices, strict=True)
            if self.assignment[operator] != device
        ]
        if not changes:
            return None
        return Move(changes, None, min(self._position[operator] for operator, _ in changes))


def interchangeable_operators(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """Groups of at least two operators with equal times, as many operators after the graph's inputs: tiles of one operator."""
    depth = [0] * problem.num_operators
    groups: dict[tuple[int, tuple[float, ...]], list[int]] = defaultdict(list)
    for operator in range(problem.num_operators):
        depth[operator] = 1 + max((depth[before] for before in problem.predecessors[operator]), default=0)
        groups[depth[operator], problem.seconds[operator]].append(operator)
    return [tuple(group) for group in groups.values() if len(group) > 1]
