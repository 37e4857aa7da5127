"""Set-up of Parthasarathy and Krishnamachari (section IV): models, memory, random clusters; random and joint choice. Pure.

A partition holds its float32 weights and the outputs of its layers. Outputs must count, given the paper's figures: there
MobileNetV2, with 14 MB of weights, does not fit into 64 MB, and InceptionResNetV2, with 223 MB, not into five times 64 MB. A
transfer is the boundary tensor divided by lambda = 1.44 * 2.1; a node's rate depends on its distance to the router, and a link
is as fast as its slower end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.throughput.points import candidate_chain
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stage, Stages, pipeline_problem, stages_from
from coordinator.plan.graph.throughput.published import Partitioning
from hearth.plan.graph_spec import GraphSpec

# Equation 12: the rate is log2(1 + A / distance^2) Mbit/s. A, in square metres, gives 5.5 Mbit/s at 80 m.
_A = 283_230.0
_RANGE_METRES, _NEAREST_METRES = 150.0, 1.0  # largest and smallest coordinate of a node, from the router
_ZFP, _LZ4 = 1.44, 2.1  # average compression ratios, equation 4


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


# ---- the paper's baselines, for devices of equal memory that hold the graph -----------------------------------------------


def random_stages(problem: PipelineProblem, rng: Random) -> Stages:
    """Random devices in turn, each with a random partition that it can hold and that leaves the rest feasible."""
    devices = list(range(problem.num_devices))
    rng.shuffle(devices)
    return _stages_along(problem, reversed(devices), rng.choice)


def joint_stages(problem: PipelineProblem, start: int) -> Stages:
    """The greedy choice from one device on: the fewest bytes across each cut, then the fastest link to an unused device."""
    boundary_bytes = (*problem.boundary_bytes, 0.0)
    return _stages_along(
        problem, _nearest_walk(problem, start), lambda ends: min(ends, key=lambda each: (boundary_bytes[each], -each))
    )


def nearest_stages(problem: PipelineProblem, partitioning: Partitioning) -> Stages:
    """The joint baseline with these partitions: the greedy walk over devices with the lowest bottleneck, of all starts."""
    walks = (_nearest_walk(problem, start) for start in range(problem.num_devices))
    found = (stages_from(partitioning.last, list(islice(walk, len(partitioning.last)))) for walk in walks)
    return min(found, key=problem.bottleneck_seconds)


def _nearest_walk(problem: PipelineProblem, start: int) -> Iterator[int]:
    """All devices: after each, the unused one with the fastest link from it."""
    device, unused = start, set(range(problem.num_devices)) - {start}
    yield device
    while unused:
        rates = problem.rate[device]
        device = max(unused, key=lambda each: (rates[each], -each))
        unused.remove(device)
        yield device


def _stages_along(problem: PipelineProblem, devices: Iterable[int], choose: Callable[[list[int]], int]) -> Stages:
    """Stages on these devices, one after the other.

    `choose` takes the last block of each, among those after which the remaining devices can still hold the rest.
    """
    last_block = [problem.last_block(first, problem.memory_bytes[0]) for first in range(problem.num_blocks)]
    needed = [0] * (problem.num_blocks + 1)  # by block: the least number of devices for it and all after it
    for first in reversed(range(problem.num_blocks)):
        needed[first] = 1 + needed[last_block[first] + 1]  # a longer stage leaves less for the others
    stages: list[Stage] = []
    first = 0
    for num_used, device in enumerate(devices, 1):
        left = problem.num_devices - num_used
        last = choose([each for each in range(first, last_block[first] + 1) if needed[each + 1] <= left])
        stages.append(Stage(first, last, device))
        first = last + 1
        if first == problem.num_blocks:
            break
    return tuple(stages)
