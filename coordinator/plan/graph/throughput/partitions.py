"""Partitions of a chain (Parthasarathy and Krishnamachari, III-B1, Algorithm 1), and classes of transfers. Pure.

The vertices of the partition graph are the runs of blocks that fit into a device. An edge joins a run to each run that
begins where it ends; its weight is the bytes across that cut. All runs that end at one point have the same successors, so
that the cheapest continuation is computed once per point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.plan.graph.throughput.problem import PipelineProblem


class Partitioning(NamedTuple):
    """`last` is each partition's last block, `transfers` [len(last) - 1] the bytes across the cuts between them."""

    last: tuple[int, ...]
    transfers: tuple[float, ...]


def min_num_stages(problem: PipelineProblem, budget_bytes: int) -> list[float]:
    """[N + 1]: the least number of devices of this memory for the blocks from each one on; infinite if a block does not fit."""
    needed: list[float] = [math.inf] * problem.num_blocks + [0]
    for first in range(problem.num_blocks - 1, -1, -1):
        last = problem.last_block(first, budget_bytes)
        if last >= first:  # a longer stage leaves less for the others
            needed[first] = 1 + needed[last + 1]
    return needed


def min_transfer_partitioning(problem: PipelineProblem, budget_bytes: int, max_stages: int) -> Partitioning | None:
    """Algorithm 1: the partitions of at most `budget_bytes` with the least sum of transfers; None if none fit.

    The paper does not say what happens if there are more partitions than nodes; this takes the least sum with at most
    `max_stages` partitions.
    """
    n, sizes = problem.num_blocks, (*problem.boundary_bytes, 0.0)
    reach = [problem.last_block(first, budget_bytes) for first in range(n)]
    cost: list[float] = [math.inf] * n + [0.0]  # of the blocks from each one on, in at most len(choices) stages
    choices: list[list[int]] = []  # [stages left - 1][first block]: the last block of the first of these stages
    while len(choices) < max_stages:
        rest, cost, choice = cost, [math.inf] * n + [0.0], [0] * n
        for first in range(n):
            for last in range(reach[first], first - 1, -1):  # the longest of equals
                if rest[last + 1] + sizes[last] < cost[first]:
                    cost[first], choice[first] = rest[last + 1] + sizes[last], last
        choices.append(choice)
        if cost == rest:  # more stages would change nothing
            break
    if math.isinf(cost[0]):
        return None
    ends, first = list[int](), 0
    for left in range(max_stages, 0, -1):
        if first < n:
            ends.append(choices[min(left, len(choices)) - 1][first])
            first = ends[-1] + 1
    return Partitioning(tuple(ends), tuple(problem.boundary_bytes[cut] for cut in ends[:-1]))


def transfer_classes(problem: PipelineProblem, transfers: Sequence[float], num_classes: int) -> tuple[int, ...]:
    """The class of each transfer, 1 (smallest) to `num_classes` (equation 5).

    The classes are equal steps from the smallest transfer at any cut to the largest.
    """
    ranked = sorted(problem.boundary_bytes)
    if not ranked:
        return ()
    low, step = ranked[0], (ranked[-1] - ranked[0]) / num_classes
    if step == 0:
        return (num_classes,) * len(transfers)
    return tuple(min(1 + int((size - low) / step), num_classes) for size in transfers)
