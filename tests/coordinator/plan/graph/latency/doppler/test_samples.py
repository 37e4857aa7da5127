"""Schedules sampled from a policy: valid, distinct, sorted, repeatable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.placement_problems import random_problem
from support.policies import random_policy
from support.schedule_checker import violations

from coordinator.plan.graph.latency.doppler import home_policy
from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.home_policy import few_samples, policy_samples
from coordinator.plan.graph.latency.doppler.rollout import draw_noise, orders_by_start, roll_out
from coordinator.plan.graph.latency.doppler.starts import Start
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.list_scheduling import contended_heft

POLICY = random_policy(np.random.default_rng(0))
PROBLEM = random_problem(np.random.default_rng(1), num_operators=20, spare_memory=0.5)
INCUMBENT = contended_heft(PROBLEM)


def samples(seed: int = 0, num_samples: int = 15, num_rounds: int = 1) -> list[Start]:
    return policy_samples(PROBLEM, POLICY, INCUMBENT, seed, num_samples, num_rounds)


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
    assert policy_samples(replace(PROBLEM, budget_bytes=(1, 1, 1)), POLICY, INCUMBENT, seed=0) == []


def test_the_best_of_all_episodes_comes_first() -> None:
    features = problem_features(PROBLEM).with_incumbent(INCUMBENT)
    found = roll_out(features, POLICY, draw_noise(PROBLEM, 15, np.random.default_rng(0)))
    pairs = zip(found.assignments.tolist(), orders_by_start(found).tolist(), found.complete, strict=True)
    makespans = [Evaluator(PROBLEM).makespan(*pair) for *pair, complete in pairs if complete]
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
    found = few_samples(PROBLEM, POLICY, INCUMBENT, 0)
    assert found == ([] if num_samples is None else samples(num_samples=num_samples))


def test_orders_by_start_are_topological() -> None:
    found = roll_out(problem_features(PROBLEM), POLICY, draw_noise(PROBLEM, 15, np.random.default_rng(0)))
    for b, order in enumerate(orders_by_start(found)):
        if found.complete[b]:
            position = {operator: at for at, operator in enumerate(order.tolist())}
            assert all(position[u] < position[v] for v in position for u in PROBLEM.predecessors[v])
            assert (np.diff(found.starts[b][order]) >= 0).all()


def test_same_seed_gives_the_same_samples() -> None:
    assert [each.schedule for each in samples(3)] == [each.schedule for each in samples(3)]
    assert samples(3)[0].schedule != samples(4)[0].schedule
