"""Strategy doppler: never worse than a list schedule, within memory and time, repeatable, and ends at a proven optimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems
from support.schedule_checker import violations
from support.step_clock import StepClock

from coordinator.plan.graph.auto import plan_instance
from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler import planner
from coordinator.plan.graph.latency.doppler.planner import Annealing, solve_doppler
from coordinator.plan.graph.latency.doppler.starts import Start, best_starts
from coordinator.plan.graph.latency.list_scheduling import contended_heft
from coordinator.plan.graph.latency.moirai import solve_moirai
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, in_ticks
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.graph.latency.windows import WindowSearch
from coordinator.plan.solution import SearchOptions
from hearth.errors import ModelDoesNotFit, NoPlacement
from tools.research.graphs import HOMES, tensor_graph

NEVER = float("inf")


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
        found = solve_doppler(problem, SearchOptions(10.0, seed, StepClock()))
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
        optimum = solve_moirai(problem, 10_000.0, StepClock())
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


def test_same_seed_gives_the_same_runs() -> None:
    starts = lists(UNEVEN)[-1:]
    first, second = (
        list(Annealing(UNEVEN, starts, Random(3), lambda: 0.0, NEVER).explore(2000, NEVER)) for _ in range(2)
    )
    assert first == second
    assert first[0].makespan < starts[0].makespan


def test_search_ends_at_its_deadline() -> None:
    problem = HOMES["wifi"].problem(tensor_graph("chain-mm"))
    clock = StepClock()
    solve_doppler(problem, SearchOptions(1.5, 0, clock))
    assert clock.now <= 12


def test_annealing_explores_from_its_starts_again_but_for_those_that_are_far_behind() -> None:
    slow = Start(best_schedule(UNEVEN, (0, 0, 0, 0, 1, 1), range(6)))
    slower = Start(best_schedule(UNEVEN, (0,) * 6, range(6)))
    assert slower.makespan == 12.0 > 1.05 * slow.makespan
    annealing = Annealing(UNEVEN, [slower, slow], Random(0), lambda: 0.0, NEVER)
    assert list(annealing.explore(0, NEVER)) == [slower.schedule, slow.schedule]
    assert list(annealing.explore(0, 9.0)) == [slow.schedule]
    assert list(annealing.explore(0, 9.0)) == []


def test_annealing_refines_a_schedule() -> None:
    annealing = Annealing(UNEVEN, [], Random(0), lambda: 0.0, NEVER)
    slow, optimum = (best_schedule(UNEVEN, (0, 0, 1, 1, device, 0), range(6)) for device in (0, 1))
    assert annealing.refine(slow, 2000).makespan == optimum.makespan == 6.0 < slow.makespan
    assert annealing.refine(optimum, 1) == optimum


def test_runs_share_the_time_that_is_left() -> None:
    clock = StepClock()
    starts = lists(UNEVEN)[:2]
    annealing = Annealing(UNEVEN, starts, Random(0), clock, 90.0)
    ends = [round(clock.now) for _ in annealing.explore(10**9, NEVER)]
    assert ends[0] < 40 < ends[1] < 70


@pytest.mark.parametrize(("seconds", "num_starts"), [(1.0, 1), (10.0, 4)])
def test_short_search_spends_its_time_on_one_start(
    monkeypatch: pytest.MonkeyPatch, seconds: float, num_starts: int
) -> None:
    problem = HOMES["wifi"].problem(tensor_graph("llama-block"))
    annealed: list[Start] = []

    class Recorded(Annealing):
        def explore(self, moves: int, best: float) -> Iterator[Schedule]:
            annealed.extend(self._starts)
            raise TimeoutError  # the rest takes the time limit

    monkeypatch.setattr(planner, "Annealing", Recorded)
    with pytest.raises(TimeoutError):
        solve_doppler(problem, SearchOptions(seconds, 0, StepClock(1e-6)))
    assert len(annealed) == num_starts


def test_windows_improve_a_schedule_and_end_when_none_does() -> None:
    ticked, _ = in_ticks(tiny([1.0] * 14, (20, 20)))
    known, windows, steps = best_schedule(ticked, (0,) * 14, range(14)), WindowSearch(ticked), 0
    while not windows.is_over:
        known = windows.step(known, 10.0) or known
        steps += 1
    assert known.makespan == 7.0
    windows.restart()
    assert not windows.is_over
    assert steps == 4  # the first window finds the optimum; no other window of the two sweeps finds anything


def first_window(
    monkeypatch: pytest.MonkeyPatch, problem: PlacementProblem, seconds: float, moves: int
) -> tuple[Schedule, float]:
    """The schedule of the first window, and the time for it; no window finds anything."""
    clock = StepClock(0.001)
    calls: list[tuple[Schedule, float]] = []

    def step(self: WindowSearch, known: Schedule, limit: float) -> None:
        calls.append((known, limit))
        clock.now = NEVER

    monkeypatch.setattr(WindowSearch, "step", step)
    monkeypatch.setattr(planner, "_FIRST_MOVES", moves)
    solve_doppler(problem, SearchOptions(seconds, 0, clock))
    return calls[0]


@pytest.mark.parametrize(
    ("home", "seconds", "is_of_start"),
    [("gigabit", 1000.0, True), ("gigabit", 20.0, False), ("wifi", 1000.0, False)],
    ids=["close", "little time", "far behind"],
)
def test_windows_begin_at_the_best_start_with_time_unless_it_is_far_behind(
    home: str, seconds: float, is_of_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = HOMES[home].problem(tensor_graph("llama-block"))
    known, _ = first_window(monkeypatch, problem, seconds, 200)
    assert (known.assignment == lists(problem)[0].schedule.assignment) == is_of_start


@pytest.mark.parametrize(("moves", "fraction"), [(0, 0.5), (200, 0.25)], ids=["best", "behind"])
def test_windows_of_the_best_start_get_more_time_while_it_is_the_best_schedule(
    moves: int, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = HOMES["gigabit"].problem(tensor_graph("llama-block"))
    _, limit = first_window(monkeypatch, problem, 1000.0, moves)
    assert limit == pytest.approx(1000.0 * fraction, rel=0.01)


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
