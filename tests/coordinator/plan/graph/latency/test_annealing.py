"""Local search: valid, within memory, never worse than its start, repeatable, and optimal on small graphs."""

from __future__ import annotations

import time
from math import inf
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems
from support.schedule_checker import violations

from coordinator.plan.graph.latency.annealing import MoveGenerator, improve
from coordinator.plan.graph.latency.evaluator import named, numbered
from coordinator.plan.graph.latency.list_scheduling import heft
from coordinator.plan.graph.latency.memory import MemoryLedger
from coordinator.plan.graph.latency.problem import FloatTable, Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, Send, best_schedule
from coordinator.plan.graph.latency.search import solve_moirai
from coordinator.plan.solution import SearchOptions
from hearth.errors import NoPlacement


def stopped() -> float:
    """A clock that never reaches a deadline."""
    return 0.0


def links(seconds: float, num_devices: int = 2) -> FloatTable:
    return tuple(tuple(0.0 if a == b else seconds for b in range(num_devices)) for a in range(num_devices))


def two_layers(width: int, transfer: float = 1.0) -> PlacementProblem:
    """`width` chains of two operators on two equal devices; transfers cost as much as operators."""
    return PlacementProblem(
        name="two layers",
        operators=tuple(f"op{i}" for i in range(2 * width)),
        devices=("device0", "device1"),
        seconds=((1.0, 1.0),) * (2 * width),
        memory_bytes=(1,) * (2 * width),
        budget_bytes=(2 * width, 2 * width),
        flows=tuple(Flow(i, (width + i,), links(transfer)) for i in range(width)),
        latency=links(0.0),
    )


def start_of(problem: PlacementProblem) -> Schedule:
    try:
        return heft(problem)
    except NoPlacement:
        assume(False)
        raise


@given(problems(most=6), st.integers(0, 3))
def test_result_is_valid_and_never_worse_than_its_start(problem: PlacementProblem, seed: int) -> None:
    start = start_of(problem)
    found = improve(problem, start, Random(seed), 150, stopped)
    assert found.makespan <= start.makespan
    assert violations(problem, found) == []


@settings(max_examples=10, derandomize=True)  # nothing guarantees an optimum
@given(problems(most=5, media=False))  # drawing media would change which ten problems these are
def test_optimum_of_small_graphs_is_found(problem: PlacementProblem) -> None:
    start = start_of(problem)
    best = solve_moirai(problem, SearchOptions(20, 0, time.monotonic))
    assert best.proven
    found = min(improve(problem, start, Random(seed), 400, stopped).makespan for seed in range(2))
    assert found == pytest.approx(best.value)


def test_same_seed_gives_the_same_plan() -> None:
    problem = two_layers(8)
    start = best_schedule(problem, [0] * 16, range(16))
    first, second = (improve(problem, start, Random(7), 500, stopped) for _ in range(2))
    assert first == second
    assert first.makespan == 8.0  # half of the work on each device


def test_deadline_ends_the_search() -> None:
    problem = two_layers(4)
    start = best_schedule(problem, [0] * 8, range(8))
    looks = iter([0.0, 1.0])
    found = improve(problem, start, Random(0), 10**9, lambda: next(looks), 1.0)
    assert found.makespan <= start.makespan
    assert improve(problem, start, Random(0), 10**9, lambda: 1.0, 1.0) == start
    assert next(looks, None) is None


@given(problems(most=6), st.randoms(use_true_random=False))
def test_ledger_equals_the_bytes_of_the_assignment(problem: PlacementProblem, rng: Random) -> None:
    assignment = [rng.randrange(problem.num_devices) for _ in problem.operators]
    ledger = MemoryLedger(problem, assignment)
    for _ in range(10):
        operator, device = rng.randrange(len(assignment)), rng.randrange(problem.num_devices)
        ledger.move(operator, assignment[operator], device)
        assignment[operator] = device
        assert ledger.fits == (problem.overflow_bytes(assignment) == 0)
        assert ledger.fits or ledger.is_binding


@settings(max_examples=10)
@given(problems(most=6), st.randoms(use_true_random=False))
def test_moves_keep_the_order_topological_and_list_what_must_be_sent(problem: PlacementProblem, rng: Random) -> None:
    assignment = [rng.randrange(problem.num_devices) for _ in problem.operators]
    order = numbered(problem, assignment, range(problem.num_operators))
    solution = MoveGenerator(problem, assignment, order, rng)
    for _ in range(30):
        move = solution.draw()
        if move is None:
            continue
        before, assignment = solution.order, list(solution.assignment)
        assert all(assignment[operator] != device for operator, device in move.devices.items())
        assert move.devices or move.order != before
        for operator, device in move.devices.items():
            assignment[operator] = device
        solution.accept(assignment, move)
        order = solution.order
        assert order == numbered(problem, assignment, named(problem, order))
        assert order[: move.first] == before[: move.first]
        position = {item: index for index, item in enumerate(order)}
        assert all(position[operator] >= move.first for operator in move.devices)
        assert all(position[a] < position[b] for b, before in enumerate(problem.predecessors) for a in before)
        sends = [(item, index) for index, item in enumerate(named(problem, order)) if isinstance(item, Send)]
        assert all(position[problem.flows[send.flow].source] < index for send, index in sends)


def test_devices_are_proposed_with_the_given_probabilities() -> None:
    problem = two_layers(2)
    solution = MoveGenerator(problem, [0] * 4, list(range(4)), Random(0), [[0.0, 1.0], *[[1.0, 0.0]] * 3])
    drawn = [solution.draw() for _ in range(3000)]
    moved = [next(iter(move.devices)) for move in drawn if move is not None and len(move.devices) == 1]
    # Uniform proposals move each operator to device 1 equally often; operator 0 gets those of the table, too.
    assert moved.count(0) > 1.5 * moved.count(1)


def test_operators_move_to_where_their_inputs_are() -> None:
    problem = two_layers(4, transfer=3.0)
    start = best_schedule(problem, [0, 1, 0, 1, 1, 0, 1, 0], range(8))
    assert improve(problem, start, Random(0), 500, stopped, inf).makespan == 4.0 < start.makespan
