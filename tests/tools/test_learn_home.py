"""Training of the policy for a home: the network in torch, replayed episodes, instances, and that something is learnt."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from support.placement_problems import random_problem

from coordinator.plan.graph.latency.doppler.features import ProblemFeatures, problem_features
from coordinator.plan.graph.latency.doppler.policy import Policy, random_policy
from coordinator.plan.graph.latency.doppler.rollout import draw_noise, roll_out
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule
from tools.learn.home import instances, training
from tools.learn.home.network import HomeNetwork, graph_tensors
from tools.learn.home.replay import decisions, episodes_of, taught_episodes
from tools.learn.home.teacher import taught_schedules
from tools.learn.home.training import Lesson, Trainer


def shaken_policy(seed: int = 5) -> Policy:
    """Random weights whose biases and normalisations are random too."""
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    weights = {name: each + rng.normal(0, 0.1, each.shape).astype(np.float32) for name, each in policy.weights.items()}
    return Policy(policy.features, weights)


def features(seed: int = 2) -> ProblemFeatures:
    return problem_features(random_problem(np.random.default_rng(seed), spare_memory=0.3))


def test_probabilities_are_those_of_the_planners_network() -> None:
    problem, policy = features(), shaken_policy()
    network, graph = HomeNetwork(policy), graph_tensors(problem)
    logits = network.encode(graph).select_logits_n.detach().numpy()
    assert logits == pytest.approx(policy.encode(problem).select_logits, abs=1e-5)
    rollouts = roll_out(problem, policy, draw_noise(problem.problem, 7, np.random.default_rng(0)))
    episodes = episodes_of(problem.problem, rollouts)
    found = decisions(network, graph, episodes).devices_BTK.exp().detach().numpy()
    kept = rollouts.complete
    assert 0 < len(found) == kept.sum()
    rows = np.arange(len(found))[:, None]
    assert found == pytest.approx(rollouts.probabilities[kept][rows, rollouts.orders[kept]], abs=1e-5)


def test_operators_are_drawn_from_the_softmax_over_candidates() -> None:
    problem, network = features(), HomeNetwork(shaken_policy())
    placement = problem.problem
    rollouts = roll_out(problem, network.policy, draw_noise(placement, 3, np.random.default_rng(1)))
    found = decisions(network, graph_tensors(problem), episodes_of(placement, rollouts)).operators_BTn.exp()
    shares = np.exp(network.policy.encode(problem).select_logits.astype(float))
    for b, order in enumerate(rollouts.orders[rollouts.complete].tolist()):
        for step in range(len(order)):
            placed = set(order[:step])
            ready = [v not in placed and placed.issuperset(before) for v, before in enumerate(placement.predecessors)]
            assert found[b, step].detach().numpy() == pytest.approx(shares * ready / (shares @ ready), abs=1e-5)


def test_repeated_schedules_keep_their_devices_and_order() -> None:
    problem = features()
    taught = taught_schedules(problem.problem, seed=0, moves=200)
    assert 2 <= len(taught) <= 4
    episodes = taught_episodes(problem, taught)
    for b, each in enumerate(taught):
        order = [item for item in each.order if isinstance(item, int)]
        assert episodes.operators_BT[b].tolist() == order
        assert episodes.devices_BT[b].tolist() == [each.assignment[i] for i in order]


def test_gradients_reach_every_weight() -> None:
    problem, network = features(), HomeNetwork(shaken_policy())
    rollouts = roll_out(problem, network.policy, draw_noise(problem.problem, 7, np.random.default_rng(0)))
    episodes = episodes_of(problem.problem, rollouts)
    decisions(network, graph_tensors(problem), episodes).of(episodes)[0].backward()
    assert [name for name, weight in network.weights.items() if weight.grad is None or not weight.grad.any()] == []


def small_problem() -> PlacementProblem:
    return random_problem(np.random.default_rng(1), num_operators=7, num_devices=2)


def trainer(seed: int = 0) -> Trainer:
    problem = small_problem()
    worst = best_schedule(problem, [0] * problem.num_operators, range(problem.num_operators))
    rng = np.random.default_rng(seed)
    return Trainer(random_policy(rng), [Lesson.of(problem, [worst])], rng)


def test_policy_gradient_shortens_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "RATES", (3e-3, 3e-4))
    found = trainer()
    makespans = []
    for relative in found.reinforce(40):
        makespans.append(relative * found.lessons[0].best_makespan)
    assert np.mean(makespans[-10:]) < 0.95 * np.mean(makespans[:10])


def test_makespans_are_relative_to_the_shortest_known() -> None:
    found = trainer()
    (lesson,) = found.lessons
    before = lesson.best_makespan
    first = next(found.reinforce(1))
    assert lesson.best_makespan < before
    assert first >= 1


def test_batches_go_on_from_the_best_sample_until_a_teacher_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_RESTART_SHARE", 0.0)
    found = trainer()
    (lesson,) = found.lessons
    deque(found.reinforce(5))
    assert lesson.incumbent.makespan == pytest.approx(lesson.best_makespan)
    assert lesson.best_makespan < lesson.teachers[0].makespan
    monkeypatch.setattr(training, "_RESTART_SHARE", 1.0)
    next(found.reinforce(1))
    assert lesson.incumbent is lesson.teachers[0]


def test_the_best_samples_weigh_most() -> None:
    weights = training.risk_seeking(np.array([-1.0, -0.5, 1.5]))
    assert weights.sum() == pytest.approx(0)
    assert weights[2] > -1.5 * weights[0] > 0  # 1.5 times as much as in the mean
    assert training.risk_seeking(np.zeros(3)).tolist() == [0, 0, 0]


def test_batches_without_room_are_skipped() -> None:
    problem = small_problem()
    lesson = trainer().lessons[0]
    lesson.features = problem_features(replace(problem, budget_bytes=(1,) * problem.num_devices))
    rng = np.random.default_rng(0)
    assert list(Trainer(random_policy(rng), [lesson], rng).reinforce(3)) == []


def test_imitation_makes_the_teachers_schedule_the_greedy_one() -> None:
    found = trainer()
    deque(found.imitate(40))
    problem = found.lessons[0].features
    greedy = roll_out(problem, found.network.policy, draw_noise(problem.problem, 0, np.random.default_rng(0)))
    assert greedy.orders[0].tolist() == found.lessons[0].taught.operators_BT[0].tolist()
    assert greedy.assignments[0].tolist() == [0] * problem.problem.num_operators


def test_sharpening_doubles_the_log_odds_of_choices() -> None:
    found = trainer()
    (lesson,) = found.lessons

    def device_odds() -> torch.Tensor:
        logs = decisions(found.network, lesson.graph, lesson.taught).devices_BTK
        return logs[..., 1] - logs[..., 0]

    before = device_odds()
    found.sharpen()
    torch.testing.assert_close(device_odds(), 2 * before)


def test_same_seed_gives_the_same_weights() -> None:
    def run(seed: int) -> torch.Tensor:
        found = trainer(seed)
        deque(found.imitate(3))
        deque(found.reinforce(3))
        return found.network.weights["place.hidden.weight"]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize("kind", instances.KINDS)
def test_random_graphs_vary_and_are_planned(kind: str) -> None:
    rng = np.random.default_rng(0)
    sizes = set()
    for _ in range(5):
        graph = instances.KINDS[kind](rng)
        problem = instances.random_home(rng, graph)
        sizes.add((problem.num_operators, problem.num_devices))
        assert 2 <= problem.num_devices <= 6
    assert len(sizes) > 2


def test_random_instances_keep_to_their_limits() -> None:
    rng = np.random.default_rng(3)
    for _ in range(8):
        assert instances.MIN_OPERATORS <= instances.random_instance(rng).num_operators <= instances.MAX_OPERATORS
