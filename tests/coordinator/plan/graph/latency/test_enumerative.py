"""EnumerativeOptimizer: the least transfers of every spread of a group, in topological order, within memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.graphs import cluster_of, from_edges
from support.schedule_checker import violations

from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.latency.enumerative import enumerative, even_capacities, ordered_groups
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, SharedWeights, placement_problem
from coordinator.plan.graph.request import GraphRequest
from hearth.errors import NoPlacement
from hearth.plan.graph_spec import Operator


def links(num_devices: int, seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Seconds of each pair of devices, row by row; 0 within a device."""
    devices = range(num_devices)
    return tuple(tuple(0.0 if a == b else seconds[a * num_devices + b] for b in devices) for a in devices)


def two_operators(num_devices: int, producers: int, consumers: int, flows: Sequence[Flow]) -> PlacementProblem:
    """The tiles of two operators on equal devices, without limits of memory."""
    n = producers + consumers
    return PlacementProblem(
        name="tiles",
        operators=tuple(f"tile{i}" for i in range(n)),
        devices=tuple(f"device{k}" for k in range(num_devices)),
        seconds=((1.0,) * num_devices,) * n,
        memory_bytes=(0,) * n,
        budget_bytes=(0,) * num_devices,
        flows=tuple(flows),
        latency=links(num_devices, [0.25] * num_devices**2),
        groups=tuple(tuple(group) for group in (range(producers), range(producers, n)) if group),
    )


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """Two operators of up to six tiles on up to three devices, with any transfers between them."""
    num_devices, producers, consumers = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    seconds = st.lists(st.sampled_from((0.0, 0.1, 0.3, 1.7, 5.0)), min_size=num_devices**2, max_size=num_devices**2)
    targets = st.sets(st.integers(producers, producers + consumers - 1), max_size=consumers)
    flows = [
        Flow(source, tuple(sorted(found)), links(num_devices, draw(seconds)))
        for source in range(producers)
        if (found := draw(targets))
    ]
    problem = two_operators(num_devices, producers, consumers, flows)
    speeds = draw(st.lists(st.sampled_from((1.0, 2.0, 4.0)), min_size=num_devices, max_size=num_devices))
    return replace(problem, seconds=(tuple(speeds),) * problem.num_operators)


def cost_of(problem: PlacementProblem, where: Sequence[int], group: Sequence[int]) -> float:
    """Network time of all inputs of the group, as in Algorithm 4."""
    return sum(
        flow.seconds[where[flow.source]][where[target]] + problem.latency[where[flow.source]][where[target]]
        for flow in problem.flows
        for target in flow.targets
        if target in group and where[target] != where[flow.source]
    )


@given(problems())
def test_spread_costs_as_little_as_the_best_of_all_spreads(problem: PlacementProblem) -> None:
    found = enumerative(problem).assignment
    group = problem.groups[1]
    capacities = even_capacities(problem, group)
    before = found[: group[0]]
    allowed = [
        cost_of(problem, (*before, *each), group)
        for each in itertools.product(range(problem.num_devices), repeat=len(group))
        if all(each.count(k) <= capacity for k, capacity in enumerate(capacities))
    ]
    assert all(found[group[0] :].count(k) <= capacity for k, capacity in enumerate(capacities))
    assert cost_of(problem, found, group) == pytest.approx(min(allowed), abs=1e-6)


@given(st.lists(st.integers(0, 9), min_size=16, max_size=16), st.permutations(range(4)))
def test_group_as_large_as_the_home_is_placed_as_published(seconds: list[int], consumers: list[int]) -> None:
    """Algorithm 4: every permutation of the devices, one operator on each."""
    flows = [Flow(i, (4 + consumer,), links(4, list(map(float, seconds)))) for i, consumer in enumerate(consumers)]
    problem = two_operators(4, 4, 4, flows)
    found = enumerative(problem).assignment
    assert found[:4] == (0, 1, 2, 3)  # without inputs, all permutations cost the same: the first one
    published = min(cost_of(problem, (0, 1, 2, 3, *each), range(4, 8)) for each in itertools.permutations(range(4)))
    assert sorted(found[4:]) == [0, 1, 2, 3]
    assert cost_of(problem, found, range(4, 8)) == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize(
    ("seconds", "num_tiles", "expected"),
    [
        ((1.0, 1.0, 1.0, 1.0), 16, [4, 4, 4, 4]),
        ((1.0, 1.0, 1.0, 1.0), 6, [2, 2, 2, 2]),
        ((1.0, 1.02, 1.01, 1.03), 6, [2, 2, 2, 2]),  # profiles of equal devices
        ((1.0, 1.0, 2.0, 4.0), 16, [6, 6, 3, 1]),
        ((1.0, 4.0), 2, [2, 0]),
        ((0.0, 0.0, 0.0), 6, [2, 2, 2]),
        ((0.0, 1.0), 3, [3, 0]),
    ],
)
def test_share_of_a_device_follows_its_speed(seconds: tuple[float, ...], num_tiles: int, expected: list[int]) -> None:
    problem = replace(two_operators(len(seconds), num_tiles, 0, []), seconds=(seconds,) * num_tiles)
    assert even_capacities(problem, range(num_tiles)) == expected


def test_consecutive_tiles_share_a_device_when_costs_are_equal() -> None:
    assert enumerative(two_operators(2, 6, 0, [])).assignment == (0, 0, 0, 1, 1, 1)


@given(problems(), st.data())
def test_memory_is_respected(problem: PlacementProblem, data: st.DataObject) -> None:
    n, k = problem.num_operators, problem.num_devices
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    budgets = data.draw(st.lists(st.integers(0, 12), min_size=k, max_size=k))
    shared = (SharedWeights(2, (0, n - 1)),) if n > 1 else ()
    tight = replace(problem, memory_bytes=tuple(sizes), budget_bytes=tuple(budgets), shared=shared)
    try:
        found = enumerative(tight)
    except NoPlacement:
        return
    assert violations(tight, found) == []


def test_full_device_passes_tiles_on() -> None:
    problem = replace(two_operators(2, 4, 0, []), memory_bytes=(1,) * 4, budget_bytes=(1, 3))
    assert sorted(enumerative(problem).assignment) == [0, 1, 1, 1]
    with pytest.raises(NoPlacement):
        enumerative(replace(problem, budget_bytes=(1, 2)))
    unequal = replace(problem, seconds=((1.0, 9.0),) * 4, budget_bytes=(1, 4))  # the share of the slow device is 0
    assert sorted(enumerative(unequal).assignment) == [0, 1, 1, 1]


def test_groups_are_placed_after_the_groups_that_they_need() -> None:
    ways = links(2, [1.0] * 4)
    flows = [Flow(0, (3,), ways), Flow(1, (2,), ways), Flow(3, (4,), ways)]
    problem = replace(two_operators(2, 2, 3, flows), groups=((2, 4), (0, 3)))
    assert ordered_groups(problem) == [(0,), (1,), (2,), (3,), (4,)]  # 0 -> 3 within a group, and 3 -> 4
    assert ordered_groups(replace(problem, groups=((3, 2), (0, 1)))) == [(0, 1), (3, 2), (4,)]


def test_32_tiles_on_8_devices_are_spread_within_50_ms() -> None:
    flows = [
        Flow(i, tuple(32 + (i * 5 + j * 3) % 32 for j in range(4)), links(8, [(i * a) % 7 + 1.0 for a in range(64)]))
        for i in range(32)
    ]
    problem = two_operators(8, 32, 32, flows)

    def seconds() -> float:
        began = time.process_time()
        enumerative(problem)
        return time.process_time() - began

    assert min(seconds() for _ in range(5)) < 0.05  # the least: other programs, and memory of the host, only add time


def test_names_of_groups_reach_the_planner() -> None:
    """Four tiles of one operator and their sum: on equal devices, two tiles each; without the name, all on one."""
    operators = [Operator(f"tile{i}", "MatMul", 1e9, (), "product") for i in range(4)]
    spec = from_edges("tiles", [*operators, Operator("sum", "Sum", 1.0)], [4] * 5, [(i, 4) for i in range(4)])
    problem = placement_problem(spec, [(1.0, 1.0)] * 5, (1, 1), [(1.0, 1.0)] * 2, [(0.0, 0.0)] * 2)
    assert problem.groups == ((0, 1, 2, 3),)
    request = GraphRequest(spec, cluster_of(spec, [1e9, 1e9], 1e9), strategy="enumerative")
    chosen = plan_graph(request, time.monotonic).chosen
    assert chosen.solution is not None
    assert chosen.solution.assignment.devices[:4] == (0, 0, 1, 1)
    plain = replace(spec, operators=tuple(operator._replace(group="") for operator in spec.operators))
    alone = plan_graph(replace(request, spec=plain), time.monotonic).chosen
    assert alone.solution is not None
    assert set(alone.solution.assignment.devices) == {0}
