"""Fast makespans: equal to those of the schedules in order, from every checkpoint."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from support.placement_problems import on_media, problems, random_problem

from coordinator.models.ordering import topological_order
from coordinator.plan.graph.latency.evaluator import Evaluator, IncrementalEvaluator, named, numbered
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Send, schedule, with_required_sends


def random_solution(problem: PlacementProblem, rng: Random) -> tuple[list[int], list[int]]:
    """An assignment, and an order in which operators follow their predecessors."""
    keys = [rng.random() for _ in problem.operators]
    assignment = [rng.randrange(problem.num_devices) for _ in problem.operators]
    return assignment, topological_order(problem.predecessors, lambda operator: keys[operator])


@pytest.mark.parametrize("media", [((1, 2),), ((0, 1), (2, 3)), ((0,), (1, 2, 3))])
def test_makespans_equal_those_of_the_schedules_on_shared_media(media: tuple[tuple[int, ...], ...]) -> None:
    num_longer = 0
    for seed in range(20):
        wired = random_problem(default_rng(seed), num_operators=24, num_devices=4)
        problem = on_media(wired, *media)
        assignment, order = random_solution(problem, Random(seed))
        evaluator = Evaluator(problem)
        expected = schedule(problem, assignment, order, in_order=True).makespan
        assert evaluator.in_order(assignment, order) == pytest.approx(expected)
        num_longer += expected > schedule(wired, assignment, order, in_order=True).makespan
        incremental = IncrementalEvaluator(problem, assignment, order)
        changed = [*assignment[:-8], *((device + 1) % 4 for device in assignment[-8:])]
        assert incremental.trial(changed, order, 0) == evaluator.in_order(changed, order)
        first = min(order.index(operator) for operator in range(16, 24))
        assert incremental.trial(changed, order, first) == evaluator.in_order(changed, order)
    assert num_longer > 5


@given(problems(most=10), st.randoms(use_true_random=False))
def test_makespans_equal_those_of_the_schedules(problem: PlacementProblem, rng: Random) -> None:
    assignment, order = random_solution(problem, rng)
    evaluator = Evaluator(problem)
    assert evaluator.in_order(assignment, order) == schedule(problem, assignment, order, in_order=True).makespan
    items = with_required_sends(problem, assignment, schedule(problem, assignment, order).order)
    transfers = numbered(problem, assignment, items)
    assert evaluator.in_order(assignment, transfers) == schedule(problem, assignment, items, in_order=True).makespan
    assert named(problem, transfers) == [
        item for item in items if not isinstance(item, Send) or problem.contends(item.flow)
    ]


@settings(max_examples=12)
@given(problems(most=40), st.randoms(use_true_random=False))
def test_trials_and_commits_equal_full_runs(problem: PlacementProblem, rng: Random) -> None:
    evaluator = Evaluator(problem)
    assignment, order = random_solution(problem, rng)
    incremental = IncrementalEvaluator(problem, assignment, order)
    for _ in range(8):
        first = rng.randrange(len(order))
        changed = list(assignment)
        for operator in order[first:]:
            changed[operator] = rng.randrange(problem.num_devices)
        expected = evaluator.in_order(changed, order)
        assert incremental.trial(changed, order, first) == expected
        assert incremental.trial(changed, order, first, expected) == expected
        assert incremental.trial(changed, order, first, expected - 0.5) == inf
        assert incremental.makespan == evaluator.in_order(assignment, order)
        if rng.random() < 0.5:
            incremental.trial(changed, order, first)
            incremental.commit()
            assignment = changed
