"""Which blocks become one partition (Parthasarathy and Krishnamachari, III-B1, Algorithm 1), and classes of transfers. Pure.

The partition graph's vertices are the runs of blocks that fit into a device; an edge joins a run to each that begins where
it ends, and weighs what crosses that cut. All runs that end at one point have the same ways on, so the cheapest is found
once for each point.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from coordinator.plan.graph.throughput.problem import PipelineProblem

# Equal steps from the smallest transfer at any cut to the largest, or as many cuts in each class.
Scale = Literal["width", "quantile"]


class Partitioning(NamedTuple):
    """`last` is each partition's last block, `transfers` [len(last) - 1] the bytes across the cuts between them."""

    last: tuple[int, ...]
    transfers: tuple[float, ...]


def fewest_stages(problem: PipelineProblem, budget_bytes: int) -> list[float]:
    """[N + 1]: how many devices of this memory the blocks from each on need at least; infinite where none would do."""
    needed: list[float] = [math.inf] * problem.num_blocks + [0]
    for first in range(problem.num_blocks - 1, -1, -1):
        last = problem.last_block(first, budget_bytes)
        if last >= first:  # what is left only shrinks with a longer stage
            needed[first] = 1 + needed[last + 1]
    return needed


def least_transfers(problem: PipelineProblem, budget_bytes: int, max_stages: int) -> Partitioning | None:
    """Algorithm 1: the partitions of at most `budget_bytes` whose transfers sum up to least; None where none fit.

    The paper does not say what happens when there are more partitions than nodes; then this is the least sum with
    `max_stages` of them.
    """
    found = _cheapest(problem, [problem.last_block(first, budget_bytes) for first in range(problem.num_blocks)])
    if found is None or len(found.last) <= max_stages:
        return found
    return _cheapest_within(problem, budget_bytes, max_stages)


def classes_of(problem: PipelineProblem, transfers: Sequence[float], num_classes: int, scale: Scale) -> tuple[int, ...]:
    """1 (smallest) to `num_classes`, by where each transfer lies among those at all cuts (equation 5)."""
    ranked = sorted(problem.boundary_bytes)
    if not ranked:
        return ()
    if scale == "quantile":
        places = [bisect_right(ranked, size) - 1 for size in transfers]
        return tuple(1 + place * num_classes // len(ranked) for place in places)
    low, step = ranked[0], (ranked[-1] - ranked[0]) / num_classes
    if step == 0:
        return (num_classes,) * len(transfers)
    return tuple(min(1 + int((size - low) / step), num_classes) for size in transfers)


def _cheapest(problem: PipelineProblem, reach: Sequence[int]) -> Partitioning | None:
    """`reach` is the last block of the longest partition from each block."""
    n, sizes = problem.num_blocks, problem.boundary_bytes
    cost: list[float] = [math.inf] * n + [0.0]
    choice = [0] * n
    for first in range(n - 1, -1, -1):
        for last in range(reach[first], first - 1, -1):  # of equals the longest
            total = cost[last + 1] + (sizes[last] if last < n - 1 else 0.0)
            if total < cost[first]:
                cost[first], choice[first] = total, last
    if math.isinf(cost[0]):
        return None
    found, first = [], 0
    while first < n:
        found.append(choice[first])
        first = choice[first] + 1
    return _partitioning(problem, found)


def _cheapest_within(problem: PipelineProblem, budget_bytes: int, max_stages: int) -> Partitioning | None:
    n, sizes = problem.num_blocks, problem.boundary_bytes
    reach = [problem.last_block(first, budget_bytes) for first in range(n)]
    costs: list[list[float]] = [[math.inf] * n + [0.0]]  # [stages left][first block]
    choices: list[list[int]] = [[]]
    for _ in range(max_stages):
        cost, choice = [math.inf] * n + [0.0], [0] * n
        for first in range(n):
            for last in range(reach[first], first - 1, -1):
                total = costs[-1][last + 1] + (sizes[last] if last < n - 1 else 0.0)
                if total < cost[first]:
                    cost[first], choice[first] = total, last
        costs.append(cost)
        choices.append(choice)
    if math.isinf(costs[-1][0]):
        return None
    found, first, left = [], 0, max_stages
    while first < n:
        found.append(choices[left][first])
        first, left = choices[left][first] + 1, left - 1
    return _partitioning(problem, found)


def _partitioning(problem: PipelineProblem, last: Sequence[int]) -> Partitioning:
    return Partitioning(tuple(last), tuple(problem.boundary_bytes[cut] for cut in last[:-1]))
