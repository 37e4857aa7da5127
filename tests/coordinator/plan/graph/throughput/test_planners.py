"""Throughput pipelines: partitions, k-paths, the published planner, baselines, and the exact one against brute force."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs import chain, cluster_of, from_edges, layered_graph
from support.schedule_checker import check_stages
from support.step_clock import StepClock

from coordinator.plan.graph.placing import place_operators
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.graph.throughput.k_path import (
    FAILURE_PROBABILITY,
    colour_coded_path,
    k_path,
    longest_coloured_path,
    num_trials,
)
from coordinator.plan.graph.throughput.planners import (
    PIPELINE,
    PIPELINE_EXACT,
    best_stages,
    plan_pipeline,
    relaxed_bound,
    without_idle_devices,
)
from coordinator.plan.graph.throughput.problem import MediaCrossed, PipelineProblem, Stage, Stages, pipeline_problem
from coordinator.plan.graph.throughput.published import (
    class_runs,
    equal_partitions,
    min_transfer_partitioning,
    published_stages,
    transfer_classes,
)
from coordinator.plan.methods import GRAPH_METHODS
from coordinator.plan.solution import Candidate, SearchOptions, with_reasons
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter
from hearth.plan.profile import SharedMedium, WireCost, media_between
from tools.research.partition import joint_stages, nearest_stages, random_stages, theorem_bound

SEEDS = st.integers(0, 10**9)


def crossed_media(num_devices: int, *media: Sequence[int]) -> MediaCrossed:
    """The media that transfers cross, with the devices of these numbers on each."""
    ids = tuple(map(str, range(num_devices)))
    shared = [SharedMedium(device_ids=tuple(ids[device] for device in each)) for each in media]
    return tuple(tuple(media_between(shared, a, b) for b in ids) for a in ids)


def random_problem(rng: Random, equal: bool = False) -> PipelineProblem:
    """Up to 6 blocks on up to 5 devices; weights, times and rates from few values, so that ties occur."""
    n, k = rng.randint(1, 6), rng.randint(1, 5)
    ends = np.cumsum([0, *(rng.randint(1, 9) for _ in range(n))])
    rate = np.array([[rng.choice([1.0, 2.0, 3.0, 7.5]) for _ in range(k)] for _ in range(k)])
    if rng.random() < 0.5:
        rate = np.minimum(rate, rate.T)
    np.fill_diagonal(rate, np.inf)
    memory = (rng.randint(6, 25),) * k if equal else tuple(rng.randint(4, 25) for _ in range(k))
    seconds = np.array([[rng.uniform(0.1, 2) for _ in range(k)] for _ in range(n)]) * rng.choice([0, 1])
    return PipelineProblem(
        name="random",
        blocks=tuple((index,) for index in range(n)),
        boundary_bytes=tuple(float(rng.randint(0, 9)) for _ in range(n - 1)),
        seconds=seconds,
        stage_bytes=np.triu(ends[None, 1:] - ends[:-1, None]),
        memory_bytes=memory,
        rate=rate,
    )


def pipelines(problem: PipelineProblem) -> Iterator[Stages]:
    """All pipelines."""
    n = problem.num_blocks
    for count in range(1, min(n, problem.num_devices) + 1):
        for cuts in itertools.combinations(range(n - 1), count - 1):
            firsts, lasts = [0, *(cut + 1 for cut in cuts)], [*cuts, n - 1]
            for devices in itertools.permutations(range(problem.num_devices), count):
                held = [problem.stage_bytes[a, b] for a, b in zip(firsts, lasts, strict=True)]
                if all(held[i] <= problem.memory_bytes[device] for i, device in enumerate(devices)):
                    yield tuple(map(Stage, firsts, lasts, devices))


def bottleneck(problem: PipelineProblem, stages: Sequence[Stage]) -> float:
    """From the problem's own numbers, block by block."""
    compute = [sum(problem.seconds[b, s.device] for b in range(s.first, s.last + 1)) for s in stages]
    links = [problem.boundary_bytes[a.last] / problem.rate[a.device, b.device] for a, b in itertools.pairwise(stages)]
    if not problem.media:
        return float(max([*compute, *links]))
    crossed = [problem.media[a.device][b.device] for a, b in itertools.pairwise(stages)]
    numbers = {number for each in crossed for number in each}
    media = [sum(link for link, each in zip(links, crossed, strict=True) if number in each) for number in numbers]
    return float(max([*compute, *links, *media]))


def after_a_minute() -> Callable[[], bool]:
    deadline = time.monotonic() + 60.0
    return lambda: time.monotonic() > deadline


# ---- the exact planner and its bounds -----------------------------------------------------------------------------------


@given(SEEDS)
def test_exact_planner_equals_brute_force_and_proves_it(seed: int) -> None:
    problem = random_problem(Random(seed))
    values = [bottleneck(problem, stages) for stages in pipelines(problem)]
    if not values:
        with pytest.raises(ModelDoesNotFit) as error:
            best_stages(problem, Random(seed), after_a_minute())
        assert error.value.missing_bytes > 0
        return
    found = best_stages(problem, Random(seed), after_a_minute())
    assert found.proven
    assert found.value == pytest.approx(min(values))
    assert found.bound == pytest.approx(min(values))


def test_exact_planner_counts_shared_media_and_is_seldom_above_the_optimum() -> None:
    num_problems = num_optimal = num_better = 0
    for seed in range(150):
        rng = Random(seed)
        without = random_problem(rng)
        k = without.num_devices
        media = [[device for device in range(k) if device % 2 == air] for air in range(rng.randint(1, 2))]
        problem = replace(without, media=crossed_media(k, *filter(None, media)))
        values = [bottleneck(problem, stages) for stages in pipelines(problem)]
        if not values:
            continue
        found = best_stages(problem, Random(seed), after_a_minute())
        check_stages(problem, found.assignment)
        ignored = bottleneck(problem, best_stages(without, Random(seed), after_a_minute()).assignment)
        assert found.value == pytest.approx(bottleneck(problem, found.assignment))
        assert found.bound - 1e-9 <= min(values) <= found.value + 1e-9
        assert found.value <= ignored + 1e-9
        assert found.proven == (found.bound >= found.value)
        num_problems += 1
        num_optimal += found.value <= min(values) + 1e-9
        num_better += found.value < ignored - 1e-9
    assert num_problems > 50
    assert num_better > 0
    assert num_optimal >= 0.9 * num_problems


@given(SEEDS)
def test_every_planner_gives_a_valid_pipeline_and_bound(seed: int) -> None:
    problem = random_problem(Random(seed), equal=True)
    values = [bottleneck(problem, stages) for stages in pipelines(problem)]
    searches = {
        PIPELINE: published_stages,
        PIPELINE_EXACT: lambda problem, rng: best_stages(problem, rng, after_a_minute()).assignment,
    }
    for name, search in searches.items():
        if not values:
            with pytest.raises(ModelDoesNotFit):
                search(problem, Random(seed))
            continue
        stages = search(problem, Random(seed))
        check_stages(problem, stages)
        assert problem.bottleneck_seconds(stages) == pytest.approx(bottleneck(problem, stages))
        assert relaxed_bound(problem, stages) <= min(values) + 1e-9, name
        assert list(problem.assignment(stages)) == [
            stage.device for stage in stages for _ in range(stage.first, stage.last + 1)
        ]


@given(SEEDS)
def test_joint_takes_the_best_nearest_neighbour_walk(seed: int) -> None:
    problem = random_problem(Random(seed), equal=True)
    try:
        partitioning, devices = equal_partitions(problem)
    except ModelDoesNotFit:
        return
    found = nearest_stages(problem, partitioning)
    for stages in (found, random_stages(problem, Random(seed)), joint_stages(problem, 0)):
        check_stages(problem, stages)
    assert tuple(stage.last for stage in found) == partitioning.last
    taken = [stage.device for stage in found]
    for index, (device, after) in enumerate(itertools.pairwise(taken)):
        left = [each for each in devices if each not in taken[: index + 1]]
        assert problem.rate[device, after] == max(problem.rate[device, each] for each in left)
    walks = (_nearest_walk(problem, start, devices, len(found)) for start in devices)
    every = [tuple(stage._replace(device=device) for stage, device in zip(found, walk, strict=True)) for walk in walks]
    assert problem.bottleneck_seconds(found) == min(map(problem.bottleneck_seconds, every))


def _nearest_walk(problem: PipelineProblem, start: int, devices: Sequence[int], count: int) -> list[int]:
    walk = [start]
    while len(walk) < count:
        left = [each for each in devices if each not in walk]
        walk.append(min(left, key=lambda each: (-problem.rate[walk[-1], each], each)))
    return walk


@given(SEEDS)
def test_exact_is_never_worse_than_published_even_without_time(seed: int) -> None:
    rng = Random(seed)
    problem = larger_problem(rng, num_blocks=12, num_devices=9)
    for stop in (lambda: True, lambda: False):
        published = published_stages(problem, Random(seed), stop=stop)
        answer = best_stages(problem, Random(seed), stop)
        check_stages(problem, answer.assignment)
        value = problem.bottleneck_seconds(answer.assignment)
        assert answer.bound <= value <= problem.bottleneck_seconds(published)
    assert answer.bound == value  # proven, given time


def larger_problem(rng: Random, num_blocks: int, num_devices: int) -> PipelineProblem:
    spec = chain(1, [rng.randint(1, 50) for _ in range(num_blocks)], [1] * num_blocks)
    rate = [[rng.uniform(1, 10) for _ in range(num_devices)] for _ in range(num_devices)]
    seconds = [[rng.uniform(0.1, 3) for _ in range(num_devices)] for _ in range(num_blocks)]
    return pipeline_problem(spec, seconds, [num_blocks // 3] * num_devices, rate)


def test_slow_devices_and_links_are_avoided() -> None:
    spec = chain(1, [8, 8, 8], [10, 10, 10])
    seconds = [[1.0, 1.0, 9.0]] * 3
    found = best_stages(pipeline_problem(spec, seconds, [100] * 3, [[8.0] * 3] * 3), Random(0), after_a_minute())
    assert {stage.device for stage in found.assignment} == {0, 1}
    assert (found.value, found.proven) == (2.0, True)
    slow = best_stages(pipeline_problem(spec, seconds, [100] * 3, [[1.0] * 3] * 3), Random(0), after_a_minute())
    assert len(slow.assignment) == 1
    assert slow.value == 3.0


@pytest.mark.parametrize("fan_out", [False, True], ids=["layers", "fan-out"])
@pytest.mark.parametrize("strategy", [PIPELINE, PIPELINE_EXACT])
def test_planner_keeps_its_time_limit_with_thousands_of_operators(strategy: str, fan_out: bool) -> None:
    spec = layered_graph(3000, fan_out)
    request = GraphRequest(spec, cluster_of(spec, [1e3, 7e2, 4e2], 1e7, wire=WireCost()), "throughput", strategy)
    (method,) = GRAPH_METHODS.select(strategy, "throughput")
    began = time.process_time()
    place_operators(request, method, SearchOptions(1.0, 0, time.process_time), None)
    assert time.process_time() - began < 4.0  # 30 to 80 without looks at the clock


def test_time_limit_ends_the_moving_of_cuts() -> None:
    """Transfers take as long as compute: the middle stage has too much work. Each simulation needs a look at the clock."""
    spec = chain(1, [100] * 14)
    cluster = cluster_of(spec, [1.0] * 3, 1e6, wire=WireCost(encrypted_seconds_per_byte=0.005))
    request = GraphRequest(spec, cluster, "throughput", PIPELINE_EXACT)
    (method,) = GRAPH_METHODS.select(PIPELINE_EXACT, "throughput")
    long, short = (place_operators(request, method, SearchOptions(t, 0, StepClock()), None) for t in (1e6, 5.0))
    assert long.value < short.value


def test_stage_with_next_to_no_work_is_left_out_where_that_costs_nothing() -> None:
    """Device 2 has the last operator, 0.1 % of the work: it goes to the device before it, if that has room."""
    spec, stages = chain(1, [8, 8, 8], [10, 10, 10]), (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 2))

    def left(first: float, second: float, room: int) -> Stages:
        seconds = [[first] * 3, [second] * 3, [0.01] * 3]
        return without_idle_devices(pipeline_problem(spec, seconds, [20, room, 20], [[1.0] * 3] * 3), stages)

    assert left(9.0, 8.5, 20) == (Stage(0, 0, 0), Stage(1, 2, 1))
    assert left(9.0, 8.5, 10) == left(8.5, 9.0, 20) == stages  # no room; slower


# ---- partitions ---------------------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 6))
def test_partitions_minimise_total_transfers(seed: int, max_stages: int) -> None:
    problem = random_problem(Random(seed))
    n, budget = problem.num_blocks, max(problem.memory_bytes)
    sums: dict[int, list[float]] = {}
    for count in range(1, n + 1):
        for cuts in itertools.combinations(range(n - 1), count - 1):
            firsts, lasts = [0, *(cut + 1 for cut in cuts)], [*cuts, n - 1]
            if all(problem.stage_bytes[a, b] <= budget for a, b in zip(firsts, lasts, strict=True)):
                sums.setdefault(count, []).append(sum(problem.boundary_bytes[cut] for cut in cuts))
    within = [each for count, found in sums.items() if count <= max_stages for each in found]
    found = min_transfer_partitioning(problem, budget, max_stages)
    if found is None:
        assert not within
        return
    assert len(found.last) <= max_stages
    assert sum(found.transfers) == min(within)


def test_transfer_classes_have_equal_width() -> None:
    problem = pipeline_problem(chain(1, [10, 20, 30, 100, 5]), [[1.0]] * 5, [1], [[1.0]])
    assert transfer_classes(problem, [10, 20, 30, 100], 3) == (1, 1, 1, 3)
    assert transfer_classes(problem, [10], 1) == (1,)


def test_runs_are_ordered_by_class_then_length() -> None:
    assert class_runs([2, 3, 3, 1, 3, 2, 2]) == [(1, 2), (4, 4), (5, 6), (0, 0), (3, 3)]


def test_shared_weights_count_once_per_stage() -> None:
    operators = [Operator("a", "X", 1.0, (0,)), Operator("b", "X", 1.0, (1,)), Operator("c", "X", 1.0, (0,))]
    spec: GraphSpec = from_edges("tied", operators, [1, 1, 1], [(0, 1), (1, 2)], [Parameter("w", 7), Parameter("v", 2)])
    problem = pipeline_problem(spec, [[1.0]] * 3, [9], [[1.0]])
    assert problem.stage_bytes.tolist() == [[7, 9, 9], [0, 2, 9], [0, 0, 7]]
    assert problem.boundary_bytes == (1.0, 1.0)
    assert published_stages(problem, Random(0)) == (Stage(0, 2, 0),)


# ---- k-paths ------------------------------------------------------------------------------------------------------------


def random_digraph(rng: Random, n: int) -> list[int]:
    share = rng.uniform(0.1, 0.6)
    return [sum(1 << b for b in range(n) if a != b and rng.random() < share) for a in range(n)]


def has_path(graph: Sequence[int], k: int, start: int | None, end: int | None) -> bool:
    return any(
        (start is None or path[0] == start)
        and (end is None or path[-1] == end)
        and all(graph[a] >> b & 1 for a, b in itertools.pairwise(path))
        for path in itertools.permutations(range(len(graph)), k)
    )


def assert_path(graph: Sequence[int], path: Sequence[int], k: int) -> None:
    assert len(path) == len(set(path)) == k
    assert all(graph[a] >> b & 1 for a, b in itertools.pairwise(path))


@given(SEEDS)
def test_k_path_is_found_if_one_exists(seed: int) -> None:
    rng = Random(seed)
    n = rng.randint(2, 7)
    graph, k = random_digraph(rng, n), rng.randint(2, min(n, 5))
    start = rng.choice([None, *range(n)])
    end = rng.choice([None, *(each for each in range(n) if each != start)])
    # The failure probability is so small that a miss is a defect.
    path = k_path(graph, (1 << n) - 1, k, start, end, rng, failure_probability=1e-9)
    assert (path is not None) == has_path(graph, k, start, end)
    if path is not None:
        assert_path(graph, path, k)
        assert start in (None, path[0])
        assert end in (None, path[-1])


@given(SEEDS)
def test_colour_coding_finds_a_path_if_one_exists(seed: int) -> None:
    rng = Random(seed)
    n = rng.randint(2, 7)
    graph, k = random_digraph(rng, n), rng.randint(2, min(n, 5))
    path = colour_coded_path(graph, [(1 << n) - 1] * k, rng, 1e-9)
    assert (path is not None) == has_path(graph, k, None, None)
    if path is not None:
        assert_path(graph, path, k)


def test_colour_coding_failure_rate_is_as_specified() -> None:
    """One path of 5 in 70 vertices (more than a machine word), and no other edges."""
    graph = [0] * 70
    for a, b in itertools.pairwise((3, 68, 12, 66, 40)):
        graph[a] |= 1 << b
    rng, tries = Random(5), 60
    found = [colour_coded_path(graph, [(1 << 70) - 1] * 5, rng, 0.2) for _ in range(tries)]
    assert {each for each in found if each} == {(3, 68, 12, 66, 40)}
    missed = found.count(None) / tries
    # The number of trials follows from 0.2, rounded up; the tolerance is three standard errors.
    success = math.perm(7, 5) / 7**5
    expected = (1 - success) ** num_trials(5, 0.2)
    assert abs(missed - expected) <= 3 * math.sqrt(expected * (1 - expected) / tries)
    assert num_trials(5, FAILURE_PROBABILITY) > num_trials(5, 0.2)


def test_colour_coding_stops_where_its_tables_are_too_large() -> None:
    """The path has a layer of one vertex for each position, so that the only answer is known."""
    longest = longest_coloured_path()
    for k, expected in ((longest, tuple(range(longest))), (longest + 1, None)):
        graph = [1 << vertex + 1 for vertex in range(k)]
        assert (
            colour_coded_path(graph, [1 << vertex for vertex in range(k)], Random(0), FAILURE_PROBABILITY) == expected
        )


# ---- the published planner ------------------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from([1, 3, 20]))
def test_published_planner_is_bounded_and_deterministic(seed: int, num_classes: int) -> None:
    problem = larger_problem(Random(seed), num_blocks=15, num_devices=8)
    stages = published_stages(problem, Random(seed), num_classes)
    check_stages(problem, stages)
    partitioning, _ = equal_partitions(problem)
    assert tuple(stage.last for stage in stages) == partitioning.last
    links = [problem.transfer_seconds(a.last, a.device, b.device) for a, b in itertools.pairwise(stages)]
    assert max(links) >= theorem_bound(problem, partitioning)
    assert stages == published_stages(problem, Random(seed), num_classes)


@pytest.mark.parametrize("strategy", [PIPELINE, PIPELINE_EXACT])
def test_a_pipeline_too_long_for_colour_coding_says_so(strategy: str) -> None:
    longest = longest_coloured_path()
    for num_stages in (longest, longest + 1):
        spec, devices = chain(1, [7] * num_stages, [10] * num_stages), range(num_stages)
        rates = [[1.0] * num_stages for _ in devices]
        seconds = [[1.0] * num_stages for _ in spec.operators]
        found = plan_pipeline(spec, seconds, [10] * num_stages, rates, strategy, SearchOptions(5.0, 0, time.monotonic))
        assert len(set(found.assignment.devices)) == num_stages
        assert with_reasons(Candidate("", "", solution=found), (), strategy).notes == found.notes
        if strategy == PIPELINE and num_stages > longest:
            assert f"more than {longest} devices" in found.notes[0]
        else:
            assert found.notes == ()


def test_single_class_maximises_the_slowest_link() -> None:
    """Four partitions; the only path with all links at 9 is 4, 2, 0, 3."""
    rate = np.ones((5, 5))
    for a, b in itertools.pairwise((4, 2, 0, 3)):
        rate[a, b] = rate[b, a] = 9.0
    problem = pipeline_problem(chain(1, [7] * 4, [10] * 4), [[0.0] * 5] * 4, [10] * 5, rate.tolist())
    devices = [stage.device for stage in published_stages(problem, Random(0), 1)]
    assert devices in ([4, 2, 0, 3], [3, 0, 2, 4])


def test_published_planner_uses_only_devices_that_fit_a_partition() -> None:
    problem = pipeline_problem(chain(1, [7] * 4, [10] * 4), [[0.0] * 3] * 4, [25, 3, 20], [[1.0] * 3] * 3)
    assert [stage.device in (0, 2) for stage in published_stages(problem, Random(0))] == [True, True]
    too_large = pipeline_problem(chain(1, [7] * 4, [10] * 4), [[0.0] * 2] * 4, [25, 3], [[1.0] * 2] * 2)
    with pytest.raises(ModelDoesNotFit):
        published_stages(too_large, Random(0))
