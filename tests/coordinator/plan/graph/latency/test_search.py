"""The search for the shortest makespan: never worse than a list schedule, within memory and time; ends at a proven optimum."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import layered_problem, problems
from support.schedule_checker import violations
from support.step_clock import StepClock

from coordinator.plan.graph.auto import plan_instance
from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.list_scheduling import contended_heft, heft
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, in_ticks
from coordinator.plan.graph.latency.schedule import best_schedule
from coordinator.plan.graph.latency.search import Start, best_starts, solve_doppler, solve_moirai, without_idle_devices
from coordinator.plan.graph.latency.windows import WindowSearch
from coordinator.plan.graph.placing import solve_placement
from coordinator.plan.solution import SearchOptions
from hearth.errors import ModelDoesNotFit, NoPlacement
from tools.research.graphs import HOMES, tensor_graph


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


def lists(problem: PlacementProblem) -> list[Start]:
    return best_starts([Start(each) for each in list_schedules(problem, 10.0, "doppler")])


# 12 seconds of work on two devices: 3 + 3 and 2 + 2 + 2. Longest first ends after 7.
UNEVEN = tiny([3.0, 3.0, 2.0, 2.0, 2.0, 0.0], (6, 6))


@settings(max_examples=10)
@given(problems(most=5), st.integers(0, 3))
def test_plan_fits_and_is_never_worse_than_a_list_schedule(problem: PlacementProblem, seed: int) -> None:
    try:
        found = solve_doppler(problem, SearchOptions(400.0, seed, StepClock()))
    except ModelDoesNotFit as error:
        assert error.missing_bytes > 0
        return
    assert violations(problem, found.assignment) == []
    assert problem.overflow_bytes(found.assignment.assignment) == 0
    assert all(found.value <= each.makespan for each in lists(problem))
    assert found.bound <= found.value == found.assignment.makespan


@settings(max_examples=8)
@given(problems(most=5))
def test_plan_is_optimal_where_moirai_proves_the_optimum(problem: PlacementProblem) -> None:
    try:
        optimum = solve_moirai(problem, SearchOptions(10_000.0, 0, StepClock()))
    except ModelDoesNotFit:
        return
    found = solve_doppler(problem, SearchOptions(10_000.0, 0, StepClock()))
    assert optimum.proven
    assert found.proven
    assert found.value == found.bound == optimum.value


def test_plan_without_time_is_the_best_start() -> None:
    known = lists(UNEVEN)
    assert known[0].makespan < known[-1].makespan
    options = SearchOptions(0.0, 0, StepClock())
    assert solve_doppler(UNEVEN, options).assignment.assignment == known[0].schedule.assignment
    better = Start(best_schedule(UNEVEN, (0, 0, 1, 1, 1, 0), range(6)))
    assert solve_doppler(UNEVEN, options, [better]).value == better.makespan == 6.0 < known[0].makespan


def test_starts_differ_and_ascend() -> None:
    found = lists(UNEVEN)
    assert len({each.schedule.assignment for each in found}) == len(found) > 1
    assert [each.makespan for each in found] == sorted(each.makespan for each in found)


def test_search_ends_at_a_proven_optimum() -> None:
    clock = StepClock()
    found = solve_doppler(UNEVEN, SearchOptions(10_000.0, 0, clock))
    assert lists(UNEVEN)[0].makespan > 6.0
    assert found.proven
    assert found.value == found.bound == 6.0
    assert clock.now < 100


def test_search_ends_at_its_deadline() -> None:
    problem = HOMES["wifi"].problem(tensor_graph("chain-mm"))
    clock = StepClock()
    solve_doppler(problem, SearchOptions(1.5, 0, clock))
    assert clock.now <= 12


def test_result_fits_where_list_schedulers_run_out_of_memory() -> None:
    # The operators fill both devices to the last byte.
    sizes = (5, 4, 5, 5, 2, 6, 7, 6, 4)
    problem = replace(tiny([1.0] * 9, (22, 22)), memory_bytes=sizes)
    with pytest.raises(NoPlacement):
        contended_heft(problem)
    found = solve_doppler(problem, SearchOptions(10.0, 0, StepClock()))
    assert problem.used_bytes(found.assignment.assignment) == (22, 22)


def test_missing_bytes_are_named() -> None:
    with pytest.raises(ModelDoesNotFit) as error:
        solve_doppler(tiny([1.0] * 3, (1, 1)), SearchOptions(10.0, 0, StepClock()))
    assert error.value.missing_bytes == 1


def test_strategy_is_known_by_name() -> None:
    chosen = plan_instance(UNEVEN, "doppler", 10_000.0, StepClock()).chosen
    assert (chosen.strategy, chosen.seconds) == ("doppler", 6.0)


@pytest.mark.parametrize("fan_out", [False, True], ids=["layers", "fan-out"])
@pytest.mark.parametrize("name", ["heft", "critical-path", "enumerative", "moirai", "doppler"])
def test_planner_keeps_its_time_limit_with_thousands_of_operators(name: str, fan_out: bool) -> None:
    problem = layered_problem(3000, fan_out)
    began = time.process_time()
    solve_placement(problem, name, SearchOptions(1.0, 0, time.process_time))
    assert (
        time.process_time() - began < 5.0
    )  # HEFT alone takes up to a second, and a look at the clock as long as a list


def test_heft_is_the_first_list() -> None:
    first = next(list_schedules(UNEVEN, 10.0, "doppler"))
    assert first == heft(UNEVEN)
    assert list(list_schedules(UNEVEN, 10.0, "doppler", lambda: True)) == [first]


def test_windows_grow_and_begin_again_with_more_time() -> None:
    ticked, _ = in_ticks(tiny([1.0] * 30, (40, 40)))
    known, windows, sizes = best_schedule(ticked, (0,) * 30, range(30)), WindowSearch(ticked), []
    for _ in range(12):
        known = windows.step(known, 10.0) or known
        sizes.append(windows.bound)
    assert known.makespan == 15.0 == max(sizes)  # a window of the whole graph proves it


def test_moirai_searches_until_its_limit_where_nothing_is_proven() -> None:
    problem, clock = HOMES["unequal"].problem(tensor_graph("chain-mm")), StepClock(0.01)
    found = solve_moirai(problem, SearchOptions(0.2, 0, clock))
    assert not found.proven
    assert clock.now >= 0.2


def test_device_with_next_to_no_work_is_left_out_where_that_costs_nothing() -> None:
    """Device 2, 50 times slower, has one small operator; another device that has room for it takes it."""
    free = ((0.0,) * 3,) * 3
    seconds = (*((1.0, 1.0, 50.0),) * 3, (0.01, 0.01, 0.5))
    problem = replace(tiny([1.0] * 4, (9, 9, 9)), seconds=seconds, flows=(Flow(0, (3,), free),))
    idle, busy = (best_schedule(problem, (0, 0, 1, device), range(4)) for device in (2, 0))
    found = without_idle_devices(problem, idle)
    assert (found.assignment, found.makespan) == ((0, 0, 1, 1), idle.makespan)
    assert without_idle_devices(problem, busy) == busy
    no_room = replace(problem, budget_bytes=(2, 1, 9))
    assert without_idle_devices(no_room, idle) == idle
