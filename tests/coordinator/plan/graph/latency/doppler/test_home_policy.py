"""A policy that learns before it plans: never worse than without learning, within memory, once per run."""

from __future__ import annotations

from collections.abc import Iterator
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

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler import home_policy, learning, planner
from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy
from coordinator.plan.graph.latency.doppler.learning import BATCH
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
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
    with mock.patch.object(planner, "_MIN_SOLVER_SECONDS", 0.0):  # as many samples as in a longer search
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
