"""Interchangeable devices: found exactly, and the optimum stays when their symmetry is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ortools")

from ortools.sat.python import cp_model
from support.placement_problems import on_media
from support.schedule_checker import violations

from coordinator.plan.graph.latency import cpsat
from coordinator.plan.graph.latency.cpsat import SolverLimits, solve_placement_model
from coordinator.plan.graph.latency.list_scheduling import contended_heft
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule
from coordinator.plan.graph.latency.symmetry import in_order_of_first_use, interchangeable_devices


def links(num_devices: int, seconds: float) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(0.0 if a == b else seconds for b in range(num_devices)) for a in range(num_devices))


def fork(num_devices: int = 4) -> PlacementProblem:
    """0 feeds 1 and 2, both feed 3, on equal devices."""
    ways = links(num_devices, 1.0)
    return PlacementProblem(
        name="fork",
        operators=("in", "left", "right", "out"),
        devices=tuple("abcdef"[:num_devices]),
        seconds=tuple((seconds,) * num_devices for seconds in (1.0, 4.0, 5.0, 1.0)),
        memory_bytes=(1,) * 4,
        budget_bytes=(4,) * num_devices,
        flows=(Flow(0, (1, 2), ways), Flow(1, (3,), ways), Flow(2, (3,), ways)),
        latency=links(num_devices, 0.0),
    )


def changed(rows: Any, row: int, column: int) -> Any:
    return tuple(
        tuple(value + 1 if (i, j) == (row, column) else value for j, value in enumerate(values))
        for i, values in enumerate(rows)
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: {}, [(0, 1, 2, 3)]),
        (lambda p: {"seconds": changed(p.seconds, 2, 1)}, [(0, 2, 3)]),
        (lambda p: {"budget_bytes": (4, 4, 3, 3)}, [(0, 1), (2, 3)]),
        (lambda p: {"latency": changed(p.latency, 0, 1)}, [(2, 3)]),
        (lambda p: {"latency": changed(changed(p.latency, 0, 1), 1, 0)}, [(0, 1), (2, 3)]),
        (lambda p: {"media": on_media(p, (0, 1)).media}, [(0, 1), (2, 3)]),
        (lambda p: {"media": on_media(p, (0,), (1,)).media}, [(2, 3)]),
        (lambda p: {"flows": (p.flows[0]._replace(seconds=changed(p.flows[0].seconds, 3, 0)),)}, [(1, 2)]),
    ],
)
def test_devices_are_interchangeable_if_nothing_tells_them_apart(change: Any, expected: list[tuple[int, ...]]) -> None:
    assert interchangeable_devices(replace(fork(), **change(fork()))) == expected


def test_pins_and_the_surroundings_of_a_window_tell_devices_apart() -> None:
    assert interchangeable_devices(fork(), pinned={1}) == [(0, 2, 3)]
    assert interchangeable_devices(fork(), by_operator=[((0.0, 0.0, 0.0, 2.0),) * 4]) == [(0, 1, 2)]


def test_exchanged_devices_give_an_equal_schedule() -> None:
    found = in_order_of_first_use(best_schedule(fork(), [3, 3, 1, 3], range(4)), [(0, 1, 2, 3)])
    assert found.assignment == (0, 0, 1, 0)
    assert violations(fork(), found) == []


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """Small graphs on three devices, of which at least two are equal."""
    n = draw(st.integers(2, 6))
    ways = st.integers(0, 4).map(lambda seconds: links(3, float(seconds)))
    flows = []
    for source in range(n - 1):
        targets = draw(st.sets(st.integers(source + 1, n - 1), max_size=3))
        if targets:
            flows.append(Flow(source, tuple(sorted(targets)), draw(ways)))
    odd = draw(st.sampled_from((0.0, 1.0)))
    sizes = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    problem = PlacementProblem(
        name="random",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=("a", "b", "c"),
        seconds=tuple((float(s), float(s), s + odd) for s in draw(st.lists(st.integers(1, 6), min_size=n, max_size=n))),
        memory_bytes=tuple(sizes),
        budget_bytes=(max(4, *sizes),) * 3,
        flows=tuple(flows),
        latency=links(3, float(draw(st.integers(0, 1)))),
        congestion=draw(st.booleans()),
    )
    on_air = draw(st.sets(st.integers(0, 2)))
    return on_media(problem, sorted(on_air)) if on_air else problem


@given(problems(), st.permutations(range(3)), st.integers(0, 2) | st.none())
def test_optimum_is_the_same_without_symmetry_breaking(
    problem: PlacementProblem, places: list[int], pin: int | None
) -> None:
    problem = replace(problem, seconds=tuple(tuple(row[k] for k in places) for row in problem.seconds))
    pins = {} if pin is None else {problem.num_operators - 1: pin}
    limits, below = SolverLimits(20), round(sum(map(max, problem.seconds))) + 100
    found = solve_placement_model(problem, limits, below, pins)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpsat, "interchangeable_devices", lambda *_: [])
        plain = solve_placement_model(problem, limits, below, pins)
    assert found.bound == plain.bound
    assert (found.schedule is None) == (plain.schedule is None)
    if found.schedule is not None and plain.schedule is not None:
        assert found.schedule.makespan == plain.schedule.makespan == found.bound
        assert violations(problem, found.schedule) == []


@given(problems())
def test_hint_with_devices_in_another_order_is_a_solution(problem: PlacementProblem) -> None:
    problem = replace(problem, memory_bytes=(0,) * problem.num_operators)
    swapped = [(1, 0, 2)[device] for device in contended_heft(problem).assignment]
    known = best_schedule(problem, swapped, range(problem.num_operators))
    model = cpsat._PlacementModel(problem, {}, round(known.makespan))
    model.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.fix_variables_to_their_hinted_value = True
    assert solver.solve(model.model) == cp_model.OPTIMAL
