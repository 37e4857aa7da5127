"""Baselines of the throughput planner (Parthasarathy and Krishnamachari, IV): random and greedy joint choice. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from coordinator.plan.graph.throughput.partitions import min_num_stages
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stage, Stages
from hearth.errors import ModelDoesNotFit

# With devices of unequal memory, a random order can reach a dead end. Each attempt costs one pass over the blocks.
_MAX_ATTEMPTS = 200


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


def joint_stages(problem: PipelineProblem) -> Stages:
    """Greedy choice of cuts and devices together, tried from each device; the lowest bottleneck wins.

    Each step takes the partition with the smallest transfer after it that the device can hold, then the device with the
    fastest link from there. Raises ModelDoesNotFit.
    """
    pipelines = [stages for start in range(problem.num_devices) if (stages := joint_stages_from(problem, start))]
    return min(pipelines, key=problem.bottleneck_seconds) if pipelines else largest_first(problem)


def largest_first(problem: PipelineProblem) -> Stages:
    """Fill each device with as many blocks as it can hold, largest device first. Raises ModelDoesNotFit."""
    stages: list[Stage] = []
    first = 0
    for device in sorted(range(problem.num_devices), key=lambda each: (-problem.memory_bytes[each], each)):
        last = problem.last_block(first, problem.memory_bytes[device])
        if last < first:
            break
        stages.append(Stage(first, last, device))
        first = last + 1
        if first == problem.num_blocks:
            return tuple(stages)
    raise ModelDoesNotFit(model=problem.name, missing_bytes=problem.missing_bytes(problem.memory_bytes))


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
