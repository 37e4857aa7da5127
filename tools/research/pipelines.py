"""Set-up of Parthasarathy and Krishnamachari (section IV): models, memory, random clusters; random and joint choice. Pure.

Where the paper does not say how it counts memory and transfers, or its authors' notebooks differ, an accounting chooses:

- `paper`: a partition holds its float32 weights and the outputs of its layers; a transfer is the boundary tensor divided by
  lambda = 1.44 * 2.1; a node's rate depends on its distance to the router, and a link is as fast as its slower end. (Outputs
  must count, given the paper's figures: there MobileNetV2, with 14 MB of weights, does not fit into 64 MB, and
  InceptionResNetV2, with 223 MB, not into five times 64 MB.)
- `weights`: the same, but a partition holds only weights.
- `notebooks`: 1 byte is held per weight and 8 are sent per float; lambda = 1.44; a tensor is sent once per consumer; the
  first block of a partition does not count in its memory; rates depend on the distance between two nodes, all of which
  lie in one quadrant around the router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.throughput.planners import largest_first
from coordinator.plan.graph.throughput.points import candidate_chain
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stage, Stages, pipeline_problem
from hearth.plan.graph_spec import GraphSpec

# Equation 12: the rate is log2(1 + A / distance^2) Mbit/s. A, in square metres, gives 5.5 Mbit/s at 80 m.
_A = 283_230.0
_RANGE_METRES, _NEAREST_METRES = 150.0, 1.0  # largest and smallest coordinate of a node, from the router
_ZFP, _LZ4 = 1.44, 2.1  # average compression ratios, equation 4
# With devices of unequal memory, a random order can reach a dead end. Each attempt costs one pass over the blocks.
_MAX_ATTEMPTS = 200

Accounting = Literal["paper", "weights", "notebooks"]


def problem_of(spec: GraphSpec, accounting: Accounting, memory_bytes: int, num_nodes: int) -> PipelineProblem:
    """The problem without compute times, with equal memory on all nodes, and links still to be drawn."""
    notebooks = accounting == "notebooks"
    chain = candidate_chain(spec)
    weights = tuple(
        parameter._replace(num_bytes=round(parameter.num_bytes * (0.25 if notebooks else 1)))
        for parameter in spec.parameters
    )
    problem = pipeline_problem(
        replace(spec, parameters=weights),
        np.zeros((spec.num_operators, num_nodes)).tolist(),
        [memory_bytes] * num_nodes,
        np.ones((num_nodes, num_nodes)).tolist(),
        chain,
    )
    stage_bytes, sizes = problem.stage_bytes, problem.boundary_bytes
    if accounting != "weights":
        outputs = [
            sum(each.num_bytes for operator in block for each in spec.produced[operator]) for block in chain.blocks
        ]
        ends = np.cumsum([0, *outputs])
        stage_bytes = stage_bytes + np.triu(ends[None, 1:] - ends[:-1, None])
    if notebooks:
        stage_bytes = np.vstack([stage_bytes[1:], np.zeros_like(stage_bytes[:1])])
        counts = [max(len(spec.successors[point]), 1) for point in chain.points[: len(sizes)]]
        sizes = tuple(2 * size * count for size, count in zip(sizes, counts, strict=True))
    compression = _ZFP if notebooks else _ZFP * _LZ4
    return replace(problem, boundary_bytes=tuple(size / compression for size in sizes), stage_bytes=stage_bytes)


def draw_links(problem: PipelineProblem, accounting: Accounting, rng: Random) -> PipelineProblem:
    """The same problem in a random communication graph."""
    places, notebooks = positions(problem.num_devices, rng), accounting == "notebooks"
    return replace(problem, rate=rates(np.abs(places) if notebooks else places, between_nodes=notebooks))


def positions(num_nodes: int, rng: Random) -> NDArray[np.float64]:
    """[n, 2] metres from the router, each coordinate uniform in (-150, -1) and (1, 150)."""
    sides = [[rng.choice((-1, 1)) for _ in "xy"] for _ in range(num_nodes)]
    span = _RANGE_METRES - _NEAREST_METRES
    return np.array([[side * (_NEAREST_METRES + span * rng.random()) for side in node] for node in sides])


def rates(places: NDArray[np.float64], between_nodes: bool) -> NDArray[np.float64]:
    """[n, n] bytes per second; infinite on the diagonal."""
    if between_nodes:
        squares = ((places[:, None] - places[None]) ** 2).sum(axis=2)
    else:
        ways = (places**2).sum(axis=1)
        squares = np.maximum(ways[:, None], ways[None])
    np.fill_diagonal(squares, math.inf)
    # Distances below 1 m count as 1 m, as to the router; otherwise nodes at the same place would have an infinite rate.
    found: NDArray[np.float64] = np.log2(1 + _A / np.maximum(squares, _NEAREST_METRES**2)) * 1e6 / 8
    np.fill_diagonal(found, math.inf)
    return found


# ---- the paper's baselines ---------------------------------------------------------------------------------------------


def random_stages(problem: PipelineProblem, rng: Random) -> Stages:
    """Repeatedly choose a random device, and a random partition that it can hold and that leaves the rest feasible.

    Raises ModelDoesNotFit.
    """
    needed = min_num_stages(problem, max(problem.memory_bytes))
    for _ in range(_MAX_ATTEMPTS):
        devices = list(range(problem.num_devices))
        rng.shuffle(devices)
        stages: list[Stage] = []
        first = 0
        while first < problem.num_blocks and devices:
            device = devices.pop()
            ends = _feasible_ends(problem, needed, first, device, len(devices))
            if not ends:
                break
            stages.append(Stage(first, rng.choice(ends), device))
            first = stages[-1].last + 1
        if first == problem.num_blocks:
            return tuple(stages)
    return largest_first(problem)


def joint_stages_from(problem: PipelineProblem, device: int) -> Stages | None:
    """The greedy choice that starts at one device; None if it reaches a dead end."""
    needed = min_num_stages(problem, max(problem.memory_bytes))
    unused = set(range(problem.num_devices)) - {device}
    stages: list[Stage] = []
    first = 0
    while True:
        ends = _feasible_ends(problem, needed, first, device, len(unused))
        if not ends:
            return None
        last = min(ends, key=lambda each: (_bytes_after(problem, each), -each))
        stages.append(Stage(first, last, device))
        first = last + 1
        if first == problem.num_blocks:
            return tuple(stages)
        device = fastest_neighbour(problem, device, unused)
        unused.remove(device)


def fastest_neighbour(problem: PipelineProblem, device: int, unused: Iterable[int]) -> int:
    """The unused device with the fastest link from this one."""
    rates = problem.rate[device]
    return max(unused, key=lambda each: (rates[each], -each))


def _feasible_ends(problem: PipelineProblem, needed: list[float], first: int, device: int, num_left: int) -> list[int]:
    """Last blocks of a partition on this device after which the remaining devices may still hold the rest."""
    last = problem.last_block(first, problem.memory_bytes[device])
    return [each for each in range(first, last + 1) if needed[each + 1] <= num_left]


def _bytes_after(problem: PipelineProblem, last: int) -> float:
    return problem.boundary_bytes[last] if last < problem.num_blocks - 1 else 0.0


def min_num_stages(problem: PipelineProblem, budget_bytes: int) -> list[float]:
    """[N + 1]: the least number of devices of this memory for the blocks from each one on; infinite if a block does not fit."""
    needed: list[float] = [math.inf] * problem.num_blocks + [0]
    for first in range(problem.num_blocks - 1, -1, -1):
        last = problem.last_block(first, budget_bytes)
        if last >= first:  # a longer stage leaves less for the others
            needed[first] = 1 + needed[last + 1]
    return needed
