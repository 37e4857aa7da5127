"""The published throughput planner (Parthasarathy and Krishnamachari, III-B): partitions first, then k-paths for them. Pure.

The partitions have the least sum of transfers (Algorithm 1). The vertices of the partition graph are the runs of blocks that
fit into a device. An edge joins a run to each run that begins where it ends; its weight is the bytes across that cut. All
runs that end at one point have the same successors, so that the cheapest continuation is computed once per point.

Transfers are divided into classes. From the highest class to the lowest, and from the longest run of one class to the
shortest, each run gets the path of unused devices whose slowest link is fastest, between the ends fixed by earlier runs
(Algorithms 2 and 3). The planner ignores compute, and assumes that every device has the memory of the smallest. If that is
too little, the smallest devices are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from coordinator.plan.graph.bits import set_bits
from coordinator.plan.graph.throughput.k_path import Links, k_path, longest_coloured_path
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages, stages_from
from coordinator.plan.solution import Stop
from hearth.errors import ModelDoesNotFit

# Classes of transfers: the largest number that the paper tries, and the best one it finds.
NUM_CLASSES = 20


class Partitioning(NamedTuple):
    """`last` is each partition's last block, `transfers` [len(last) - 1] the bytes across the cuts between them."""

    last: tuple[int, ...]
    transfers: tuple[float, ...]


def published_stages(
    problem: PipelineProblem, rng: Random, num_classes: int = NUM_CLASSES, stop: Stop = lambda: False
) -> Stages:
    """Algorithms 1 to 3. Uses fewer classes if `num_classes` yield no placement. Raises ModelDoesNotFit.

    After `stop()`, the partitions of which no path is known yet go to the devices in order.
    """
    partitioning, devices = equal_partitions(problem)
    links = Links(problem, devices)
    for classes in range(num_classes, 0, -1):
        of_cut = transfer_classes(problem, partitioning.transfers, classes)
        nodes = match_paths(links, of_cut, rng, stop)
        if nodes is not None:
            return stages_from(partitioning.last, nodes)
    # Every search missed, by chance or for lack of time: any order of the devices is a placement.
    return stages_from(partitioning.last, devices[: len(partitioning.last)])


def search_note(stages: Stages) -> str:
    """What a user should know of the search for a pipeline this long; empty if it is complete but for its known chance."""
    longest = longest_coloured_path()
    if len(stages) <= longest:
        return ""
    return (
        f"pipeline: its {len(stages)} stages may form a path of more than {longest} devices, for which colour coding's "
        "tables are too large. Such paths were looked for by a short depth-first search alone, which may miss faster "
        "links: compare with --strategy pipeline-exact"
    )


def equal_partitions(problem: PipelineProblem) -> tuple[Partitioning, tuple[int, ...]]:
    """The partitions of Algorithm 1, and the devices that may hold them.

    These are all devices if the smallest is large enough, otherwise as many of the largest as possible. Raises
    ModelDoesNotFit.
    """
    ranked = sorted(range(problem.num_devices), key=lambda device: (-problem.memory_bytes[device], device))
    missing = []
    for count in range(len(ranked), 0, -1):
        budget = problem.memory_bytes[ranked[count - 1]]
        found = min_transfer_partitioning(problem, budget, count)
        if found is not None:
            return found, tuple(sorted(ranked[:count]))
        missing.append(problem.missing_bytes([budget] * count))
    raise ModelDoesNotFit(model=problem.name, missing_bytes=min(missing))


# ---- Algorithm 1 ------------------------------------------------------------------------------------------------------


def min_transfer_partitioning(problem: PipelineProblem, budget_bytes: int, max_stages: int) -> Partitioning | None:
    """Algorithm 1: the partitions of at most `budget_bytes` with the least sum of transfers; None if none fit.

    The paper does not say what happens if there are more partitions than nodes; this takes the least sum with at most
    `max_stages` partitions.
    """
    n, sizes = problem.num_blocks, np.array([*problem.boundary_bytes, 0.0])
    reach = [problem.last_block(first, budget_bytes) for first in range(n)]
    cost = np.array([math.inf] * n + [0.0])  # of the blocks from each one on, in at most len(choices) stages
    choices: list[list[int]] = []  # [stages left - 1][first block]: the last block of the first of these stages
    while len(choices) < max_stages:
        rest, cost, choice = cost, np.array([math.inf] * n + [0.0]), [0] * n
        cut_cost = rest[1:] + sizes  # of a stage that ends with each block, and of all after it
        for first in range(n):
            if reach[first] >= first:
                longest_first = cut_cost[first : reach[first] + 1][::-1]
                choice[first] = reach[first] - int(longest_first.argmin())  # the longest of equals
                cost[first] = cut_cost[choice[first]]
        choices.append(choice)
        if np.array_equal(cost, rest):  # more stages would change nothing
            break
    if np.isinf(cost[0]):
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


# ---- Algorithms 2 and 3 ------------------------------------------------------------------------------------------------


def match_paths(links: Links, classes: Sequence[int], rng: Random, stop: Stop) -> tuple[int, ...] | None:
    """Algorithm 3 for the classes of the transfers, in order: the device of each partition, or None."""
    nodes: list[int | None] = [None] * (len(classes) + 1)
    unused = links.devices
    if not classes:
        return (next(set_bits(unused)),)
    for first, last in class_runs(classes):
        start, end = nodes[first], nodes[last + 1]
        path = _best_path(links, unused, last - first + 2, (start, end), rng, stop)
        if path is None:
            return None
        nodes[first : last + 2] = path
        unused &= ~sum(1 << node for node in path)
    return tuple(node for node in nodes if node is not None)


def class_runs(classes: Sequence[int]) -> list[tuple[int, int]]:
    """First and last transfer of each maximal run of one class: highest class first, longest run first within a class."""
    runs: list[tuple[int, int]] = []
    for index, each in enumerate(classes):
        if index and classes[index - 1] == each:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return sorted(runs, key=lambda run: (-classes[run[0]], run[0] - run[1], run[0]))


def _best_path(
    links: Links, unused: int, k: int, ends: tuple[int | None, int | None], rng: Random, stop: Stop
) -> tuple[int, ...] | None:
    """Algorithm 2: binary search for the highest threshold whose links contain a path of k vertices."""
    low, high = 0, len(links.thresholds)
    best = None
    while low < high and not stop():
        middle = (low + high) // 2
        path = k_path(links.graph_at_threshold(middle), unused, k, *ends, rng)
        if path is None:
            low = middle + 1
        else:
            best, high = path, middle
    return best
