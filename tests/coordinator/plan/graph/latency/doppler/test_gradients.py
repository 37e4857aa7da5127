"""Gradients of the heads against finite differences of the loss, and the episodes of known plans."""

from __future__ import annotations

import numpy as np
import pytest
from support.placement_problems import random_problem, relabelled
from support.policies import loss, shaken_policy

from coordinator.plan.graph.latency.doppler.features import Floats, ProblemFeatures, problem_features
from coordinator.plan.graph.latency.doppler.gradients import HeadGradients, Weights, head_weights
from coordinator.plan.graph.latency.doppler.policy import HEADS, Policy
from coordinator.plan.graph.latency.doppler.rollout import Rollouts, repeat, roll_out, sampling_noise
from coordinator.plan.graph.latency.problem import PlacementProblem

POLICY = shaken_policy(7)


def sampled(problem: ProblemFeatures, policy: Policy, B: int = 3) -> Rollouts:
    return roll_out(problem, policy, sampling_noise(problem.problem, B, np.random.default_rng(0)))


def gradients(
    problem: ProblemFeatures, policy: Policy, episodes: Rollouts, weights_B: Floats, entropy_weight: float = 0.0
) -> Weights:
    return HeadGradients(problem, policy, policy.embed(problem)).of(episodes, weights_B, entropy_weight)


def test_gradients_are_those_of_the_loss() -> None:
    problem = problem_features(random_problem(np.random.default_rng(2), spare_memory=0.25))
    policy = shaken_policy(7)
    episodes = sampled(problem, policy, 6)
    assert 0 < episodes.complete.sum() < 6
    assert not episodes.allowed[episodes.complete].all()
    weights_B, entropy_weight, step = np.array([1.3, -0.6, 0.2, -1.1, 0.7, 0.4]), 0.3, 1e-6
    found = gradients(problem, policy, episodes, weights_B, entropy_weight)
    rng = np.random.default_rng(0)
    for name, weight in head_weights(policy).items():
        for index in {tuple(rng.integers(0, weight.shape)) for _ in range(4)}:
            at = weight[index]
            losses = []
            for weight[index] in (at - step, at + step):
                losses.append(loss(problem, policy, episodes, weights_B, entropy_weight))
            weight[index] = at
            slope = (losses[1] - losses[0]) / (2 * step)
            assert found[name][index] == pytest.approx(slope, rel=1e-4, abs=1e-6), (name, index)


def test_heads_are_all_layers_after_the_encoder() -> None:
    names = {name.split(".")[0] for name in POLICY.weights}
    assert names - set(HEADS) == {"input", "rounds", "vertex"}


def test_a_plan_is_repeated_as_the_episode_that_made_it() -> None:
    problem = problem_features(random_problem(np.random.default_rng(5), 16, 3, spare_memory=0.5))
    episodes = sampled(problem, POLICY, 4)
    (b, *_) = np.flatnonzero(episodes.complete).tolist()
    found = repeat(problem, episodes.orders[b].tolist(), episodes.assignments[b].tolist())
    for name in ("orders", "assignments", "starts", "makespans", "allowed", "features"):
        assert np.array_equal(getattr(found, name)[0], getattr(episodes, name)[b]), name


def with_equal_devices(seed: int, K: int) -> PlacementProblem:
    """Devices 0 to K - 2 are equal, the last one is slower."""
    one = random_problem(np.random.default_rng(seed), 12, 1)
    links = tuple(tuple(float(a != b) for b in range(K)) for a in range(K))
    return PlacementProblem(
        "equal", one.operators, tuple(f"d{k}" for k in range(K)),
        tuple((*(row * (K - 1)), 2 * row[0]) for row in one.seconds), one.memory_bytes, one.budget_bytes * K,
        tuple(flow._replace(seconds=links) for flow in one.flows), tuple((0.0,) * K for _ in range(K)),
    )  # fmt: skip


def test_a_plan_with_equal_devices_renamed_teaches_the_same() -> None:
    placement = with_equal_devices(3, 4)
    renaming = [2, 0, 1, 3]
    assert relabelled(placement, range(12), renaming).seconds == placement.seconds
    problem, policy = problem_features(placement), POLICY
    episodes = sampled(problem, policy, 1)
    assignment = episodes.assignments[0].tolist()
    assert len(set(assignment) - {3}) > 1
    first, second = (
        gradients(problem, policy, repeat(problem, episodes.orders[0].tolist(), each), np.ones(1))
        for each in (assignment, [renaming[device] for device in assignment])
    )
    for name, gradient in first.items():
        assert second[name] == pytest.approx(gradient, rel=1e-9, abs=1e-9), name
