"""Lower bounds on the makespan: never above an optimum, and equal to known ones on unequal devices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from support.placement_problems import layered_problem, problems

from coordinator.plan.graph.latency.bounds import fractional_load, relaxed_makespan
from coordinator.plan.graph.latency.problem import PlacementProblem


def independent(*seconds: tuple[float, ...]) -> PlacementProblem:
    """Operators without flows."""
    n, k = len(seconds), len(seconds[0])
    return PlacementProblem(
        name="independent", operators=tuple(map(str, range(n))), devices=tuple(map(str, range(k))), seconds=seconds,
        memory_bytes=(0,) * n, budget_bytes=(0,) * k, flows=(), latency=((0.0,) * k,) * k,
    )  # fmt: skip


@pytest.mark.parametrize(
    "problem",
    [
        independent(*[(10.0, 20.0)] * 15),  # 10 on the fast device, 5 on the slow one
        independent(*[(25.0, 50.0, 100.0)] * 7),  # 4, 2 and 1
        independent(*[(1.0, 4.0)] * 100, *[(4.0, 1.0)] * 100),  # each on its own
        independent(*[(20.0, 20.0, 1000.0)] * 10, (1000.0, 1000.0, 100.0)),
        independent(*[(50.0, 5000.0)] * 2, *[(100.0, 100.0)]),
    ],
    ids=["2 to 1", "4 to 2 to 1", "specialised", "three kinds", "one fits one"],
)
def test_load_of_unequal_devices_is_the_known_optimum(problem: PlacementProblem) -> None:
    assert fractional_load(problem) == 100
    assert relaxed_makespan(problem) <= 100


@given(problems(most=8))
def test_load_is_at_most_that_of_the_best_assignment(problem: PlacementProblem) -> None:
    devices = range(problem.num_devices)
    loads = (
        max(sum(row[k] for row, on in zip(problem.seconds, where, strict=True) if on == k) for k in devices)
        for where in itertools.product(devices, repeat=problem.num_operators)
    )
    assert fractional_load(problem) <= min(loads)


def test_bound_of_thousands_of_operators_is_above_that_of_the_fastest_times() -> None:
    problem = layered_problem(3000, num_devices=8)
    fastest = sum(map(min, problem.seconds)) / 8
    assert fractional_load(problem) > fastest
