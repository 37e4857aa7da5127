"""Learning at home: plans that fit and are never worse than the starts, repeatable, in time, and a policy that improves."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placement_problems import problems, random_problem
from support.policies import random_policy
from support.schedule_checker import violations
from support.step_clock import StepClock

from coordinator.plan.graph.latency.doppler import learning
from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.gradients import head_weights
from coordinator.plan.graph.latency.doppler.learning import BATCH, Learnt, learn
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.rollout import draw_noise, roll_out
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from hearth.errors import NoPlacement

POLICY = random_policy(np.random.default_rng(1))
LOOSE = random_problem(np.random.default_rng(3), 10, 3)
TIGHT = random_problem(np.random.default_rng(2), 12, 3, spare_memory=0.25)


def learnt(
    problem: PlacementProblem,
    num_batches: int,
    starts: list[Schedule] | None = None,
    seed: int = 0,
    policy: Policy = POLICY,
    clock: Callable[[], float] = lambda: 0.0,
    deadline: float = inf,
) -> Learnt:
    rng = np.random.default_rng(seed)
    return learn(problem_features(problem), policy, starts or [], rng, clock, deadline, num_batches)


def on_one_device(problem: PlacementProblem) -> list[Schedule]:
    n = problem.num_operators
    found = [[device] * n for device in range(problem.num_devices) if not problem.overflow_bytes([device] * n)]
    return [best_schedule(problem, each, range(n)) for each in found]


@settings(max_examples=8)
@given(problems(), st.integers(0, 3))
def test_elites_fit_and_are_never_worse_than_the_starts(problem: PlacementProblem, seed: int) -> None:
    starts = on_one_device(problem)
    found = learnt(problem, 2, starts, seed)
    assert len(found.elites) >= min(len(starts), 1)
    assert len({each.assignment for each in found.elites}) == len(found.elites)
    for each in found.elites:
        assert violations(problem, each) == []
        assert problem.overflow_bytes(each.assignment) == 0
    makespans = [each.makespan for each in found.elites]
    assert makespans == sorted(makespans)
    if starts:
        assert makespans[0] <= min(each.makespan for each in starts)


def test_searched_elites_fit_and_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    before = learnt(TIGHT, 2)
    monkeypatch.setattr(learning, "_SEARCH_BATCHES", 2)
    monkeypatch.setattr(learning, "_SEARCH_MOVES", 300)
    after = learnt(TIGHT, 2)
    assert after.elites[0].makespan < before.elites[0].makespan
    assert all(violations(TIGHT, each) == [] for each in after.elites)
    assert all(TIGHT.overflow_bytes(each.assignment) == 0 for each in after.elites)


def test_same_seed_and_counts_give_the_same_weights() -> None:
    first, again, other = learnt(TIGHT, 3), learnt(TIGHT, 3), learnt(TIGHT, 3, seed=1)
    assert first.elites == again.elites
    for name, weight in first.policy.weights.items():
        assert np.array_equal(weight, again.policy.weights[name]), name
    assert any(not np.array_equal(first.policy.weights[name], each) for name, each in other.policy.weights.items())


def test_only_the_heads_of_a_copy_change() -> None:
    before = {name: weight.copy() for name, weight in POLICY.weights.items()}
    found = learnt(LOOSE, 2)
    assert all(np.array_equal(POLICY.weights[name], weight) for name, weight in before.items())
    changed = {name for name, weight in found.policy.weights.items() if not np.array_equal(weight, before[name])}
    assert changed == set(head_weights(POLICY))


def test_learning_ends_at_its_deadline() -> None:
    clock = StepClock()
    found = learnt(LOOSE, 1000, clock=clock, deadline=4.0)
    assert clock.now == 4.0
    assert found.num_episodes == 4 * BATCH


def test_learning_takes_one_batch_at_least() -> None:
    found = learnt(LOOSE, 1000, clock=StepClock(), deadline=0.0)
    assert found.num_episodes == BATCH
    assert not all(np.array_equal(found.policy.weights[name], each) for name, each in POLICY.weights.items())


def greedy(problem: PlacementProblem, policy: Policy) -> Schedule:
    """The schedule of the policy's most probable choices."""
    found = roll_out(problem_features(problem), policy, draw_noise(problem, 0, np.random.default_rng(0)))
    return best_schedule(problem, found.assignments[0].tolist(), found.orders[0].tolist())


def test_the_policy_learns_from_episodes() -> None:
    found = learnt(LOOSE, 25)
    assert greedy(LOOSE, found.policy).makespan < 0.9 * greedy(LOOSE, POLICY).makespan


def test_the_policy_learns_from_plans_where_no_episode_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object) -> NoReturn:
        raise NoPlacement(graph="small", strategy="doppler")

    monkeypatch.setattr(learning, "roll_out", no_room)
    monkeypatch.setattr(learning, "_SEARCH_BATCHES", 1000)
    start = on_one_device(LOOSE)[0]
    assert greedy(LOOSE, POLICY).assignment != start.assignment
    found = learnt(LOOSE, 100, [start])
    assert found.elites == (start,)
    assert greedy(LOOSE, found.policy).assignment == start.assignment
