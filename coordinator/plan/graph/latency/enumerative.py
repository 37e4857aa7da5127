"""EnumerativeOptimizer (Doppler, arXiv 2505.23131, appendix A): spread each operator's tiles, close to their inputs. Pure.

Groups of operators that can run in parallel (the tiles of an operator, then its formations) are placed in topological
order. Each group is spread evenly over the devices such that its inputs take the least time in transfers; compute time
plays no part in this cost. Algorithm 4 tries every permutation of the devices, for groups of at most one operator per
device. The cost is a sum over operators, so the best spread is an assignment problem: a minimum-cost flow solves it
exactly for groups of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

from coordinator.models.ordering import topological_order
from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, rank_order, upward_ranks
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule

_COST_STEPS = 1 << 26  # in which the largest cost of a group is expressed: the flow takes whole costs
_EQUAL_SPEEDS = 1.05  # ratio of speeds below which devices count as equal: measured times of equal devices differ, too
_SMALLEST_SECONDS = 1e-300  # of an operator that takes no time: its share is bounded by the others
_ROUNDING = 1e-9  # a share this little below a whole number of operators means that number


def enumerative(problem: PlacementProblem) -> Schedule:
    """Place the problem's groups one after another. Raises NoPlacement.

    The paper leaves the order of execution to its runtime: take the better of the order of placement and that of HEFT's
    upward ranks.
    """
    partial = PartialSchedule(problem, "enumerative")
    for group in ordered_groups(problem):
        _place(problem, partial, group)
    by_rank = best_schedule(problem, partial.assignment, rank_order(problem, upward_ranks(problem)))
    return min(partial.to_schedule(), by_rank, key=lambda each: each.makespan)


def _place(problem: PlacementProblem, partial: PartialSchedule, group: Sequence[int]) -> None:
    """Place a group with the least cost within `even_capacities`. If memory binds, operators without room are spread again."""
    capacities = even_capacities(problem, group)
    left = list(group)
    while left:
        costs = [
            {
                device: input_seconds(problem, partial.assignment, operator, device)
                for device in partial.candidates(operator)
            }
            for operator in left
        ]
        for operator, device in zip(left, _spread(costs, capacities, _by_speed(problem, left)), strict=True):
            if device in partial.candidates(operator):
                partial.place(operator, device, partial.earliest_start(operator, device))
                capacities[device] -= 1
        left = [operator for operator in left if partial.assignment[operator] < 0]


def _by_speed(problem: PlacementProblem, group: Sequence[int]) -> list[int]:
    """Devices, the one that runs the group fastest first."""
    return sorted(range(problem.num_devices), key=lambda device: sum(problem.seconds[i][device] for i in group))


def ordered_groups(problem: PlacementProblem) -> list[tuple[int, ...]]:
    """The problem's groups in topological order. Operators in none, and those of groups in or after a cycle, are alone."""
    grouped = {operator for group in problem.groups for operator in group}
    alone = [(operator,) for operator in range(problem.num_operators) if operator not in grouped]
    groups = sorted([*map(tuple, problem.groups), *alone])
    order = _topological_order(problem, groups)
    if len(order) < len(groups):
        kept = [groups[index] for index in order]
        rest = set(range(problem.num_operators)).difference(*kept)
        groups = sorted([*kept, *((operator,) for operator in rest)])
        order = _topological_order(problem, groups)
    return [groups[index] for index in order]


def _topological_order(problem: PlacementProblem, groups: Sequence[tuple[int, ...]]) -> list[int]:
    group_of = {operator: index for index, group in enumerate(groups) for operator in group}
    return topological_order([{group_of[p] for i in group for p in problem.predecessors[i]} for group in groups])


def even_capacities(problem: PlacementProblem, group: Sequence[int]) -> list[int]:
    """By device, the most operators of the group: what it runs in the least time in which all devices together run all.

    That is ceil(|group| / K) on equal devices, also where their speeds differ by less than `_EQUAL_SPEEDS`.
    """
    devices = range(problem.num_devices)
    mean_seconds = [sum(problem.seconds[i][device] for i in group) / len(group) for device in devices]
    mean_seconds = [max(each, _SMALLEST_SECONDS) for each in mean_seconds]
    counts = [0] * problem.num_devices
    for _ in group:
        counts[min(devices, key=lambda device: (counts[device] + 1) * mean_seconds[device])] += 1
    longest = max(count * each for count, each in zip(counts, mean_seconds, strict=True))
    even = math.ceil(len(group) / problem.num_devices)
    return [
        max(math.floor(longest / each + _ROUNDING), min(even, math.floor(longest * _EQUAL_SPEEDS / each)))
        for each in mean_seconds
    ]


def input_seconds(problem: PlacementProblem, assignment: Sequence[int], operator: int, device: int) -> float:
    """Total seconds to carry the operator's inputs to the device from where they were placed (getNetworkTime)."""
    total = 0.0
    for index in problem.incoming[operator]:
        source = assignment[problem.flows[index].source]
        total += problem.flows[index].seconds[source][device] + problem.latency[source][device]
    return total


def _spread(costs: Sequence[Mapping[int, float]], capacities: Sequence[int], preferred: Sequence[int]) -> list[int]:
    """The device of each operator, with the least total cost within the capacities.

    `costs[i]` are those of the devices on which operator i may run. Of equal costs, consecutive operators take the same
    device, in the order of `preferred`. Capacities grow by one until every operator has a device.
    """
    num_operators, num_devices = len(costs), len(capacities)
    largest = max(max(row.values()) for row in costs) or 1.0
    sink = num_operators + num_devices
    for extra in range(num_operators + 1):
        flow, arcs = SimpleMinCostFlow(), dict[int, tuple[int, int]]()
        flow.set_node_supply(sink, -num_operators)
        for device, capacity in enumerate(capacities):
            most = max(0, capacity) + extra
            flow.add_arc_with_capacity_and_unit_cost(num_operators + device, sink, most, 0)
        for index, row in enumerate(costs):
            flow.set_node_supply(index, 1)
            for device, cost in row.items():
                steps = round(cost / largest * _COST_STEPS) * num_operators * num_devices  # outweighs all preferences
                preference = (preferred.index(device) - index * num_devices // num_operators) % num_devices
                arc = flow.add_arc_with_capacity_and_unit_cost(index, num_operators + device, 1, steps + preference)
                arcs[arc] = index, device
        if flow.solve() == flow.OPTIMAL:
            chosen = dict(ends for arc, ends in arcs.items() if flow.flow(arc))
            return [chosen[index] for index in range(num_operators)]
    raise AssertionError("with a capacity for all operators on every device there is a spread")
