"""Rollouts: valid placements, exact memory masks, and the same episodes under other labels, units and batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.placement_problems import in_other_unit, random_problem, relabelled
from support.policies import random_policy
from support.schedule_checker import violations

from coordinator.models.ordering import topological_order
from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.rollout import Noise, Rollouts, draw_noise, roll_out
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule
from hearth.errors import NoPlacement


def rollouts(problem: PlacementProblem, noise: Noise) -> Rollouts:
    return roll_out(problem_features(problem), random_policy(np.random.default_rng(1)), noise)


def some_noise(problem: PlacementProblem, num_sampled: int = 5, seed: int = 0) -> Noise:
    return draw_noise(problem, num_sampled, np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(10))
def test_random_policies_give_valid_schedules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(3, 30)), int(rng.integers(1, 5)), congestion=bool(seed % 2))
    found = rollouts(problem, some_noise(problem))
    assert found.complete.all()
    for b, (assignment, order) in enumerate(zip(found.assignments.tolist(), found.orders.tolist(), strict=True)):
        assert sorted(order) == list(range(problem.num_operators))
        assert violations(problem, best_schedule(problem, assignment, order)) == []
        ends = [start + problem.seconds[i][assignment[i]] for i, start in enumerate(found.starts[b])]
        assert max(ends) == pytest.approx(found.makespans[b], rel=1e-5)
        for i, predecessors in enumerate(problem.predecessors):
            assert all(found.starts[b, i] >= ends[u] - 1e-5 for u in predecessors)


@pytest.mark.parametrize("seed", range(6))
def test_memory_masks_are_exact(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), 14, 3, spare_memory=0.25)
    try:
        found = rollouts(problem, some_noise(problem, 12))
    except NoPlacement:
        pytest.fail("every episode ran out of memory: the test needs an easier problem")
    masked = 0
    for b in range(len(found.orders)):
        assignment = [-1] * problem.num_operators
        for i in found.orders[b].tolist():
            if i < 0:
                break
            fits = []
            for device in range(problem.num_devices):
                tried = [*assignment[:i], device, *assignment[i + 1 :]]
                fits.append(used_bytes(problem, tried)[device] <= problem.budget_bytes[device])
            assert found.allowed[b, i].tolist() == fits
            assert (found.probabilities[b, i] > 0).tolist() == fits
            masked += not all(fits)
            assignment[i] = int(found.assignments[b, i])
        if found.complete[b]:
            assert problem.overflow_bytes(assignment) == 0
        else:
            assert -1 in found.assignments[b]
    assert masked


def used_bytes(problem: PlacementProblem, assignment: list[int]) -> list[int]:
    """Bytes on each device; operators on device -1 are not placed yet."""
    used = [sum(problem.memory_bytes[i] for i, k in enumerate(assignment) if k == device) for device in range(3)]
    for group in problem.shared:
        for device in {assignment[i] for i in group.operators} - {-1}:
            used[device] += group.num_bytes
    return used


def two_of_six_bytes(budgets: tuple[int, int]) -> PlacementProblem:
    zero = ((0.0, 0.0), (0.0, 0.0))
    return PlacementProblem("two", ("a", "b"), ("x", "y"), ((1.0, 1.0),) * 2, (6, 4), budgets, (), zero)


def test_an_episode_without_room_ends_alone() -> None:
    problem = two_of_six_bytes((7, 4))  # the second operator blocks the first if it goes to the first device
    found = rollouts(problem, some_noise(problem, 30))
    assert found.complete.any()
    assert not found.complete.all()
    assert (found.assignments[found.complete] == [0, 1]).all()
    assert (found.assignments[~found.complete] == [-1, 0]).all()
    assert (found.makespans[~found.complete] == 0).all()


def test_no_room_at_all_is_an_error() -> None:
    problem = two_of_six_bytes((5, 5))
    with pytest.raises(NoPlacement):
        rollouts(problem, some_noise(problem))


def test_episodes_in_lockstep_equal_single_ones() -> None:
    problem = random_problem(np.random.default_rng(3), 20, 4, spare_memory=0.5)
    noise = some_noise(problem, 6)
    together = rollouts(problem, noise)
    for b in range(7):
        try:
            alone = rollouts(problem, noise.episode(b))
        except NoPlacement:
            assert not together.complete[b]
            continue
        assert together.complete[b]
        assert np.array_equal(alone.orders[0], together.orders[b])
        assert np.array_equal(alone.assignments[0], together.assignments[b])
        assert np.array_equal(alone.starts[0], together.starts[b])
        assert alone.probabilities[0] == pytest.approx(together.probabilities[b], abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_other_labels_of_operators_and_devices_change_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 18, 4, spare_memory=1.0)
    noise = some_noise(problem)
    priorities = rng.random(18)
    operators = topological_order(problem.predecessors, lambda i: float(priorities[i]))
    devices = rng.permutation(4).tolist()
    renamed = rollouts(
        relabelled(problem, operators, devices),
        Noise(noise.clocks[:, operators], noise.gumbel[:, operators][:, :, devices], noise.greedy),
    )
    found = rollouts(problem, noise)
    assert operators != sorted(operators)
    assert np.array_equal(np.array(operators)[renamed.orders], found.orders)
    assert np.array_equal(np.array(devices)[renamed.assignments], found.assignments[:, operators])
    assert renamed.starts == pytest.approx(found.starts[:, operators], rel=1e-5)


def test_another_unit_of_time_changes_nothing_else() -> None:
    problem = random_problem(np.random.default_rng(8), 18, 4)
    found, scaled = (rollouts(each, some_noise(problem)) for each in (problem, in_other_unit(problem, 1000)))
    assert np.array_equal(found.orders, scaled.orders)
    assert np.array_equal(found.assignments, scaled.assignments)
    assert scaled.makespans == pytest.approx(1000 * found.makespans, rel=1e-9)


def test_the_generator_decides_the_samples_and_not_the_greedy_episode() -> None:
    problem = random_problem(np.random.default_rng(4), 18, 4)
    first, again, other = (rollouts(problem, some_noise(problem, seed=seed)) for seed in (0, 0, 1))
    assert np.array_equal(first.assignments, again.assignments)
    assert np.array_equal(first.orders, again.orders)
    assert np.array_equal(first.assignments[0], other.assignments[0])
    assert np.array_equal(first.orders[0], other.orders[0])
    assert not np.array_equal(first.assignments[1:], other.assignments[1:])
    assert not np.array_equal(first.orders[1:], other.orders[1:])


def test_the_greedy_episode_takes_the_most_probable_choices() -> None:
    problem = random_problem(np.random.default_rng(4), 18, 4)
    features, policy = problem_features(problem), random_policy(np.random.default_rng(1))
    found, logits = roll_out(features, policy, some_noise(problem)), policy.encode(features).select_logits
    assert np.array_equal(found.probabilities[0].argmax(axis=1), found.assignments[0])
    placed: set[int] = set()
    for i in found.orders[0].tolist():
        candidates = [j for j in range(18) if j not in placed and placed.issuperset(problem.predecessors[j])]
        assert i == max(candidates, key=lambda j: logits[j])
        placed.add(i)


def test_selection_is_sampled_from_the_softmax_over_candidates() -> None:
    flow = Flow(0, (2,), ((0.0,),))  # 2 becomes a candidate after 0; 1 is one from the start
    problem = PlacementProblem(
        "three", ("a", "b", "c"), ("d",), ((1.0,), (2.0,), (5.0,)), (0, 0, 0), (0,), (flow,), ((0.0,),)
    )
    features, policy = problem_features(problem), random_policy(np.random.default_rng(3))
    e = np.exp(policy.encode(features).select_logits.astype(float))
    chance = {(1, 0, 2): e[1] / (e[0] + e[1])}
    chance[0, 1, 2] = (1 - chance[1, 0, 2]) * e[1] / (e[1] + e[2])
    chance[0, 2, 1] = (1 - chance[1, 0, 2]) * e[2] / (e[1] + e[2])
    B = 4000
    orders = roll_out(features, policy, some_noise(problem, B)).orders[1:]
    for order, probability in chance.items():
        share = (orders == order).all(axis=1).mean()
        assert share == pytest.approx(probability, abs=4 * np.sqrt(probability * (1 - probability) / B)), order


def test_devices_are_sampled_from_their_probabilities() -> None:
    problem = replace(two_of_six_bytes((20, 20)), seconds=((1.0, 2.0), (1.5, 1.0)))
    found = rollouts(problem, some_noise(problem, 4000))
    first = found.orders[1:, 0] == 0  # the state of the first placement is the same in all these episodes
    (probability,) = set(found.probabilities[1:][first][:, 0, 0].tolist())
    share = (found.assignments[1:][first][:, 0] == 0).mean()
    assert share == pytest.approx(probability, abs=4 * np.sqrt(probability * (1 - probability) / first.sum()))
