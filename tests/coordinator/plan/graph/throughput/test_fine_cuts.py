"""Pipelines of graphs with parallel branches, cut where several tensors cross, against brute force."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs import from_edges, two_branches
from support.schedule_checker import check_stages

from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.throughput.planners import PIPELINE, PIPELINE_EXACT, plan_pipeline, to_fine_chain
from coordinator.plan.graph.throughput.points import candidate_chain, fine_chain
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stage, Stages, pipeline_problem
from coordinator.plan.graph.throughput.published import published_stages
from coordinator.plan.solution import SearchOptions
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter

SEEDS = st.integers(0, 10**9)


def random_case(rng: Random) -> tuple[GraphSpec, list[list[float]], list[int], list[list[float]]]:
    """A graph with branches; times, memory and rates of up to three devices."""
    count, devices = rng.randint(1, 7), rng.randint(1, 3)
    edges = {(max(0, target - rng.randint(1, 3)), target) for target in range(1, count)}
    edges |= {(rng.randrange(target), target) for target in range(1, count) if rng.random() < 0.3}
    operators = [Operator(f"op{index}", "X", 1.0, (index,)) for index in range(count)]
    weights = [Parameter(f"w{index}", rng.randint(1, 9)) for index in range(count)]
    spec = from_edges("random", operators, [rng.randint(1, 9) for _ in range(count)], sorted(edges), weights)
    seconds = [[rng.uniform(0.5, 3) for _ in range(devices)] for _ in range(count)]
    rate = [[rng.choice([1.0, 4.0, 20.0]) for _ in range(devices)] for _ in range(devices)]
    return spec, seconds, [rng.randint(8, 50) for _ in range(devices)], rate


@given(SEEDS)
def test_exact_planner_equals_brute_force_over_fine_cuts(seed: int) -> None:
    spec, seconds, memory, rate = random_case(Random(seed))
    fine = pipeline_problem(spec, seconds, memory, rate, chain=fine_chain(spec))
    n, k = fine.num_blocks, fine.num_devices
    best = min(
        (
            fine.bottleneck_seconds(stages)
            for count in range(1, min(n, k) + 1)
            for cuts in itertools.combinations(range(1, n), count - 1)
            for devices in itertools.permutations(range(k), count)
            if _fits(fine, stages := _stages([0, *cuts, n], devices))
        ),
        default=None,
    )
    for strategy in (PIPELINE_EXACT, PIPELINE):
        try:
            found = plan_pipeline(spec, seconds, memory, rate, strategy, SearchOptions(60.0, seed, time.monotonic))
        except ModelDoesNotFit:
            assert best is None or strategy != "pipeline-exact"
            continue
        assert best is not None
        assert found.bound <= best * (1 + 1e-9)
        assert found.value >= best * (1 - 1e-9)
        if strategy == "pipeline-exact":
            assert found.value == pytest.approx(best)


def _stages(ends: Sequence[int], devices: Sequence[int]) -> Stages:
    return tuple(Stage(a, b - 1, device) for (a, b), device in zip(itertools.pairwise(ends), devices, strict=True))


def _fits(problem: PipelineProblem, stages: Stages) -> bool:
    held = [problem.stage_bytes[stage.first, stage.last] for stage in stages]
    return all(size <= problem.memory_bytes[stage.device] for size, stage in zip(held, stages, strict=True))


@given(SEEDS)
def test_stages_between_points_are_also_fine_cuts(seed: int) -> None:
    spec, seconds, memory, rate = random_case(Random(seed))
    coarse = pipeline_problem(spec, seconds, memory, rate, chain=candidate_chain(spec))
    fine = pipeline_problem(spec, seconds, memory, rate, chain=fine_chain(spec))
    try:
        stages = published_stages(coarse, Random(seed))
    except ModelDoesNotFit:
        return
    same = to_fine_chain(coarse, stages)
    check_stages(fine, same)
    assert fine.bottleneck_seconds(same) == pytest.approx(coarse.bottleneck_seconds(stages))
    assert fine.assignment(same) == coarse.assignment(stages)


def test_bound_excludes_tensors_that_bypass_a_stage() -> None:
    """0 -> 1 -> 2 -> 3, and 0 -> 3: with one operator per stage, the second tensor need not pass the middle stages."""
    operators = [Operator(f"op{index}", "X", 1.0) for index in range(4)]
    spec = from_edges("skip", operators, [100, 10, 10, 1], [(0, 1), (1, 2), (2, 3), (0, 3)])
    chain = fine_chain(spec)
    assert chain.boundary_bytes(spec) == (100, 110, 110)
    assert chain.adjacent_bytes(spec) == (100, 10, 10)
    args = (spec, [[1.0] * 4] * 4, [1000] * 4, [[100.0] * 4] * 4)
    found = plan_pipeline(*args, "pipeline-exact", SearchOptions(10.0, 1, time.monotonic))
    assert found.value == pytest.approx(1.1)
    assert (found.bound, found.proven) == (1.0, False)


def test_parallel_branches_are_divided() -> None:
    """0 -> (1 -> 2 | 3 -> 4) -> 5: only the ends are partition points, yet two devices halve the time."""
    spec = two_branches()
    args = (spec, [[1.0, 1.0]] * 6, [1000, 1000], [[1e6, 1e6]] * 2)
    published, exact = (
        plan_pipeline(*args, strategy, SearchOptions(10.0, 1, time.monotonic))
        for strategy in ("pipeline", "pipeline-exact")
    )
    # The published planner cuts at points only, and with the least transfers not at all.
    assert published.value == 6.0
    assert not published.proven
    assert published.bound <= 3.0
    assert (exact.value, exact.proven) == (3.0, True)
    segments = cut(spec, exact.assignment.devices)
    assert [segment.operators for segment in segments] == [(0, 1, 2), (3, 4, 5)]
    assert segments[1].inputs == ("op0", "op2")
