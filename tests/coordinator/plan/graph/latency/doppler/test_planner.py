"""Strategy doppler: never worse than a list schedule, within memory and time, repeatable, and ends at a proven optimum."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems
from support.schedule_checker import violations

from coordinator.plan.graph.auto import plan_instance
from coordinator.plan.graph.latency.contention import contended_heft
from coordinator.plan.graph.latency.doppler.planner import best_starts, search, solve_doppler
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.solution import SearchOptions
from hearth.errors import ModelDoesNotFit, NoPlacement

NEVER = float("inf")


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def tiny(seconds: list[float], budget_bytes: tuple[int, ...], memory_bytes: int = 1) -> PlacementProblem:
    """Independent operators, and a last one that joins the first two; equal devices, free transfers."""
    n, k = len(seconds), len(budget_bytes)
    free = ((0.0,) * k,) * k
    return PlacementProblem(
        name="tiny",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=tuple(f"device{d}" for d in range(k)),
        seconds=tuple((each,) * k for each in seconds),
        memory_bytes=(memory_bytes,) * n,
        budget_bytes=budget_bytes,
        flows=(Flow(0, (n - 1,), free), Flow(1, (n - 1,), free)),
        latency=free,
    )


# 12 seconds of work on two devices: 3 + 3 and 2 + 2 + 2. Longest first ends after 7.
UNEVEN = tiny([3.0, 3.0, 2.0, 2.0, 2.0, 0.0], (6, 6))


@settings(max_examples=10)
@given(problems(most=5), st.integers(0, 3))
def test_plan_fits_and_is_never_worse_than_a_list_schedule(problem: PlacementProblem, seed: int) -> None:
    try:
        found = solve_doppler(problem, SearchOptions(10.0, seed, Clock()))
    except ModelDoesNotFit as error:
        assert error.missing_bytes > 0
        return
    assert violations(problem, found.assignment) == []
    assert problem.overflow_bytes(found.assignment.assignment) == 0
    assert all(found.value <= each.makespan for each in best_starts(problem))
    assert found.bound <= found.value == found.assignment.makespan


def test_plan_without_time_is_the_best_list_schedule() -> None:
    lists = best_starts(UNEVEN)
    assert lists[0].makespan < lists[-1].makespan
    assert solve_doppler(UNEVEN, SearchOptions(0.0, 0, Clock())).assignment == lists[0]


def test_starts_differ_and_ascend() -> None:
    found = best_starts(UNEVEN)
    assert len({each.assignment for each in found}) == len(found) > 1
    assert [each.makespan for each in found] == sorted(each.makespan for each in found)


def test_search_ends_at_a_proven_optimum() -> None:
    clock = Clock()
    found = solve_doppler(UNEVEN, SearchOptions(10_000.0, 0, clock))
    assert best_starts(UNEVEN)[0].makespan > 6.0
    assert found.proven
    assert found.value == found.bound == 6.0
    assert clock.now < 100


def test_same_seed_gives_the_same_plan() -> None:
    starts = best_starts(UNEVEN)[-1:]
    first, second = (search(UNEVEN, starts, Random(3), lambda: 0.0, NEVER, lambda _: False, 1) for _ in range(2))
    assert first == second
    assert first.makespan < starts[0].makespan


def test_search_ends_at_its_deadline() -> None:
    problem = tiny([5.0, 5.0, 4.0, 0.0], (4, 4, 4, 4))  # the bound of 5 is reached; pretend that it is not
    clock = Clock()
    search(problem, best_starts(problem), Random(0), clock, 20.0, lambda _: False)
    assert 20 <= clock.now <= 22


def test_result_fits_where_list_schedulers_run_out_of_memory() -> None:
    # The operators fill both devices to the last byte.
    sizes = (5, 4, 5, 5, 2, 6, 7, 6, 4)
    problem = replace(tiny([1.0] * 9, (22, 22)), memory_bytes=sizes)
    with pytest.raises(NoPlacement):
        contended_heft(problem)
    found = solve_doppler(problem, SearchOptions(10.0, 0, Clock()))
    assert problem.used_bytes(found.assignment.assignment) == (22, 22)


def test_missing_bytes_are_named() -> None:
    with pytest.raises(ModelDoesNotFit) as error:
        solve_doppler(tiny([1.0] * 3, (1, 1)), SearchOptions(10.0, 0, Clock()))
    assert error.value.missing_bytes == 1


def test_strategy_is_known_by_name() -> None:
    chosen = plan_instance(UNEVEN, "doppler", 10_000.0, Clock()).chosen
    assert (chosen.strategy, chosen.seconds) == ("doppler", 6.0)
