"""The policy of a home: samples that are valid and repeat, and plans after learning that are never worse than without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.placement_problems import problems, random_problem
from support.policies import random_policy
from support.schedule_checker import violations
from support.step_clock import StepClock

from coordinator.plan.graph.latency import search
from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler import home_policy, learning
from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy, few_samples, policy_samples
from coordinator.plan.graph.latency.doppler.learning import BATCH
from coordinator.plan.graph.latency.doppler.rollout import draw_noise, orders_by_start, roll_out
from coordinator.plan.graph.latency.list_scheduling import contended_heft
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.graph.latency.search import Start
from coordinator.plan.solution import SearchOptions
from hearth.errors import ModelDoesNotFit, NoPlacement

POLICY = random_policy(np.random.default_rng(1))


def options(time_limit_seconds: float = 0.0, seed: int = 0) -> SearchOptions:
    """Each look at the clock takes a second."""
    looks = count()
    return SearchOptions(time_limit_seconds, seed, lambda: float(next(looks)))


@settings(max_examples=8)
@given(problems(memory=True), st.integers(0, 2))
def test_plans_after_learning_are_never_worse_than_without(problem: PlacementProblem, seed: int) -> None:
    with mock.patch.object(search, "_MIN_SOLVER_SECONDS", 0.0):  # as many samples as in a longer search
        try:
            without = HomePolicy(POLICY).solve(problem, options(seed=seed))
        except (ModelDoesNotFit, NoPlacement):  # it does not fit, or that is not decided within the limit of 0 s
            return
        found = HomePolicy(POLICY, 2.0).solve(problem, options(seed=seed))
    assert found.value <= without.value
    assert violations(problem, found.assignment) == []
    assert problem.overflow_bytes(found.assignment.assignment) == 0


def test_plans_found_while_learning_are_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_SEARCH_BATCHES", 1)
    problem = random_problem(np.random.default_rng(0), 16, 4)
    without, found = (HomePolicy(POLICY, seconds).solve(problem, options()) for seconds in (0.0, 200.0))
    assert found.value < without.value


def test_a_policy_learns_once() -> None:
    problem = random_problem(np.random.default_rng(3), 10, 3)
    home = HomePolicy(POLICY, 3.0)
    home.solve(problem, options())
    learnt = home.policy
    assert learnt is not POLICY
    assert home.num_episodes == 3 * BATCH
    home.solve(problem, options())
    assert home.policy is learnt


def test_time_to_learn_begins_after_the_first_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()

    def slow_schedules(*arguments: Any) -> Iterator[Schedule]:
        yield from list_schedules(*arguments)
        clock.now += 100.0

    monkeypatch.setattr(home_policy, "list_schedules", slow_schedules)
    home = HomePolicy(POLICY, 3.0)
    home.solve(random_problem(np.random.default_rng(3), 10, 3), SearchOptions(0.0, 0, clock))
    assert home.num_episodes == 3 * BATCH


def test_nothing_learns_without_a_policy() -> None:
    home = HomePolicy(None, 3.0)
    home.solve(random_problem(np.random.default_rng(3), 10, 3), options())
    assert (home.policy, home.num_episodes) == (None, 0)


# ---- samples ----------------------------------------------------------------------------------------------------------

SAMPLED = random_policy(np.random.default_rng(0))
PROBLEM = random_problem(np.random.default_rng(1), num_operators=20, spare_memory=0.5)
INCUMBENT = contended_heft(PROBLEM)


def samples(seed: int = 0, num_samples: int = 15, num_rounds: int = 1) -> list[Start]:
    return policy_samples(PROBLEM, SAMPLED, INCUMBENT, seed, num_samples, num_rounds)


def test_samples_are_valid_distinct_and_sorted() -> None:
    found = samples()
    schedules = [each.schedule for each in found]
    assert len({each.assignment for each in schedules}) == len(found) == 4
    assert [each.makespan for each in schedules] == sorted(each.makespan for each in schedules)
    for each in found:
        assert violations(PROBLEM, each.schedule) == []
        assert PROBLEM.overflow_bytes(each.schedule.assignment) == 0
        probabilities = np.array(each.probabilities)
        assert probabilities.sum(axis=1) == pytest.approx(np.ones(20), abs=1e-5)
        assert (probabilities[np.arange(20), each.schedule.assignment] > 0).all()


def test_without_room_there_are_no_samples() -> None:
    assert policy_samples(replace(PROBLEM, budget_bytes=(1, 1, 1)), SAMPLED, INCUMBENT, seed=0) == []


def test_the_best_of_all_episodes_comes_first() -> None:
    features = problem_features(PROBLEM).with_incumbent(INCUMBENT)
    found = roll_out(features, SAMPLED, draw_noise(PROBLEM, 15, np.random.default_rng(0)))
    pairs = zip(found.assignments.tolist(), orders_by_start(found).tolist(), found.complete, strict=True)
    makespans = [best_schedule(PROBLEM, *pair).makespan for *pair, complete in pairs if complete]
    assert samples()[0].schedule.makespan == pytest.approx(min(makespans))
    assert min(makespans) < max(makespans)


def test_later_rounds_improve_the_best_of_earlier_ones() -> None:
    one, three = samples(), samples(num_rounds=3)
    assert three[0].makespan < one[0].makespan
    assert len({each.schedule.assignment for each in three}) == len(three) == 4


@pytest.mark.parametrize(("num_placements", "num_samples"), [(1000, 12), (100, 4), (20, 0), (19, None)])
def test_short_searches_draw_few_samples(
    num_placements: int, num_samples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_policy, "_SHORT_NUM_PLACEMENTS", num_placements)
    found = few_samples(PROBLEM, SAMPLED, INCUMBENT, 0)
    assert found == ([] if num_samples is None else samples(num_samples=num_samples))


def test_orders_by_start_are_topological() -> None:
    found = roll_out(problem_features(PROBLEM), SAMPLED, draw_noise(PROBLEM, 15, np.random.default_rng(0)))
    for b, order in enumerate(orders_by_start(found)):
        if found.complete[b]:
            position = {operator: at for at, operator in enumerate(order.tolist())}
            assert all(position[u] < position[v] for v in position for u in PROBLEM.predecessors[v])
            assert (np.diff(found.starts[b][order]) >= 0).all()


def test_same_seed_gives_the_same_samples() -> None:
    assert [each.schedule for each in samples(3)] == [each.schedule for each in samples(3)]
    assert samples(3)[0].schedule != samples(4)[0].schedule
