"""Set-up of Parthasarathy and Krishnamachari (section IV): models, memory, random clusters; random and joint choice. Pure.

A partition holds its float32 weights and the outputs of its layers. Outputs must count, given the paper's figures: there
MobileNetV2, with 14 MB of weights, does not fit into 64 MB, and InceptionResNetV2, with 223 MB, not into five times 64 MB. A
transfer is the boundary tensor divided by lambda = 1.44 * 2.1; a node's rate depends on its distance to the router, and a link
is as fast as its slower end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random

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


def problem_of(spec: GraphSpec, memory_bytes: int, num_nodes: int) -> PipelineProblem:
    """The problem without compute times, with equal memory on all nodes, and links still to be drawn."""
    chain = candidate_chain(spec)
    nodes = np.ones((num_nodes, num_nodes)).tolist()
    no_seconds = np.zeros((spec.num_operators, num_nodes)).tolist()
    problem = pipeline_problem(spec, no_seconds, [memory_bytes] * num_nodes, nodes, chain)
    outputs = [sum(each.num_bytes for operator in block for each in spec.produced[operator]) for block in chain.blocks]
    ends = np.cumsum([0, *outputs])
    return replace(
        problem,
        boundary_bytes=tuple(size / (_ZFP * _LZ4) for size in problem.boundary_bytes),
        stage_bytes=problem.stage_bytes + np.triu(ends[None, 1:] - ends[:-1, None]),
    )


def draw_links(problem: PipelineProblem, rng: Random) -> PipelineProblem:
    """The same problem in a random communication graph."""
    return replace(problem, rate=rates(positions(problem.num_devices, rng)))


def positions(num_nodes: int, rng: Random) -> NDArray[np.float64]:
    """[n, 2] metres from the router, each coordinate uniform in (-150, -1) and (1, 150)."""
    sides = [[rng.choice((-1, 1)) for _ in "xy"] for _ in range(num_nodes)]
    span = _RANGE_METRES - _NEAREST_METRES
    return np.array([[side * (_NEAREST_METRES + span * rng.random()) for side in node] for node in sides])


def rates(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, n] bytes per second; infinite on the diagonal."""
    ways = (places**2).sum(axis=1)
    found: NDArray[np.float64] = np.log2(1 + _A / np.maximum(ways[:, None], ways[None])) * 1e6 / 8
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
