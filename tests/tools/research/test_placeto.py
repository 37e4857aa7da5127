"""Placeto: a policy that learns, plans within memory and never worse than the first placement."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

pytest.importorskip("ortools")
pytest.importorskip("torch")

import torch
from support.placement_problems import random_problem
from support.schedule_checker import violations

from coordinator.plan.graph.latency.baselines import local
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem
from coordinator.plan.graph.latency.schedule import schedule
from tools.research.moirai import best_list_schedule
from tools.research.placeto import Placeto, PlacetoNetwork, PlacetoResult

EDGES = ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4))  # operator 5 has no neighbours
GB = 10**9


def make_problem(
    seconds: list[tuple[float, ...]],
    edges: tuple[tuple[int, int], ...] = (),
    transfer: float = 0.0,
    memory_bytes: int = 0,
    budget_bytes: tuple[int, ...] | None = None,
) -> PlacementProblem:
    n, k = len(seconds), len(seconds[0])
    ways = tuple(tuple(0.0 if a == b else transfer for b in range(k)) for a in range(k))
    return PlacementProblem(
        name="tiny",
        operators=tuple(f"op{i}" for i in range(n)),
        devices=tuple(f"device{d}" for d in range(k)),
        seconds=tuple(seconds),
        memory_bytes=(memory_bytes,) * n,
        budget_bytes=budget_bytes or (0,) * k,
        flows=tuple(Flow(a, (b,), ways) for a, b in edges),
        latency=((0.0,) * k,) * k,
    )


def problem_in_little_memory(seed: int) -> PlacementProblem:
    """Twelve operators on three devices, none of which holds all."""
    return random_problem(np.random.default_rng(seed), spare_memory=0.5)


def train(problem: PlacementProblem, num_episodes: int, seed: int = 0, from_local: bool = False) -> PlacetoResult:
    start = local(problem) if from_local else best_list_schedule(problem, 0.0)
    return Placeto(problem, start, np.random.default_rng(seed)).run(num_episodes)


def test_groups_are_ancestors_descendants_and_parallel_operators() -> None:
    problem = make_problem([(1.0,)] * 6, EDGES)
    groups = PlacetoNetwork(problem, 5)._pools.numpy()

    def reachable(edges: Iterable[tuple[int, int]], start: int) -> set[int]:
        found = {target for source, target in edges if source == start}
        return found.union(*(reachable(edges, each) for each in found))

    backwards = [(target, source) for source, target in EDGES]
    for current in range(6):
        ancestors, descendants = reachable(backwards, current), reachable(EDGES, current)
        for group, members in enumerate((ancestors, descendants, set(range(6)) - ancestors - descendants - {current})):
            expected = [1 / len(members) if each in members else 0.0 for each in range(6)]
            assert groups[group, current] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_plan_fits_and_is_never_worse_than_its_start(seed: int) -> None:
    problem = problem_in_little_memory(seed)
    start, found = best_list_schedule(problem, 0.0), train(problem, num_episodes=8)
    assert found.num_episodes == 8
    assert found.best.makespan <= start.makespan
    assert problem.overflow_bytes(found.best.assignment) == 0
    assert violations(problem, found.best) == []


def test_placements_that_exceed_memory_are_no_plans() -> None:
    # The second device is faster, but holds one operator.
    problem = make_problem([(2.0, 1.0)] * 4, memory_bytes=1, budget_bytes=(4, 1))
    found = train(problem, num_episodes=30, from_local=True)
    assert problem.overflow_bytes(found.best.assignment) == 0
    assert found.best.makespan == 6.0


def test_same_seed_gives_the_same_plan() -> None:
    problem = problem_in_little_memory(9)
    start = schedule(problem, [i % 3 for i in range(12)], range(12))
    results = [Placeto(problem, start, np.random.default_rng(seed)).run(12) for seed in (1, 1, 2)]
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_policy_learns_the_optimum() -> None:
    # The long operator belongs on the faster device, the short ones on the other.
    problem = make_problem([(8.0, 4.0), (2.0, 1.0), (2.0, 1.0)])
    untrained, trained = (train(problem, num_episodes, seed=0, from_local=True) for num_episodes in (0, 300))
    assert untrained.greedy is not None
    assert untrained.greedy.makespan > 4.0
    assert trained.greedy is not None
    assert trained.greedy.makespan == trained.best.makespan == 4.0


@pytest.mark.thorough
def test_policy_learns_to_stay_within_memory() -> None:
    # The second device is three times as fast, but holds two of the four operators.
    seconds, budget_bytes = [(3.0, 1.0)] * 4, (4 * GB, 2 * GB)
    free = train(make_problem(seconds), num_episodes=200, from_local=True).greedy
    problem = make_problem(seconds, memory_bytes=GB, budget_bytes=budget_bytes)
    start = schedule(problem, (0, 0, 0, 0), range(4))
    limited = Placeto(problem, start, np.random.default_rng(0)).run(200).greedy
    assert free is not None
    assert problem.overflow_bytes(free.assignment) > 0
    assert limited is not None
    assert problem.overflow_bytes(limited.assignment) == 0


def test_no_episode_of_training_begins_after_the_time_limit() -> None:
    problem = problem_in_little_memory(0)
    limit = iter([False, False, True])
    found = Placeto(problem, best_list_schedule(problem, 0.0), np.random.default_rng(0)).run(9, lambda: next(limit))
    assert found.num_episodes == 2


def test_messages_are_means_over_the_senders_of_each_direction() -> None:
    problem = make_problem([(1.0, 1.0)] * 6, EDGES)
    torch.manual_seed(0)
    network = PlacetoNetwork(problem, 5)
    features, current = torch.randn(1, 6, 5), torch.tensor([3])
    with torch.no_grad():
        nodes = network.node(network.embed(features[0]).relu())
        ways = []
        for direction, senders in enumerate((problem.predecessors, problem.successors)):
            states = nodes
            for _ in range(8):
                messages = network.send[direction](states).relu()
                states = torch.stack([
                    nodes[i] + network.receive[direction](messages[list(senders[i])].mean(0)).relu() if senders[i] else nodes[i]
                    for i in range(6)
                ])  # fmt: skip
            ways.append(states)
        both = torch.cat(ways, dim=-1)
        groups = [[0, 1, 2], [], [4, 5]]  # of operator 3: ancestors, descendants and parallel operators
        pooled = [
            network.group[g](network.member[g](both[members]).relu().mean(0) if members else torch.zeros(10)).relu()
            for g, members in enumerate(groups)
        ]
        expected = network.output(network.hidden(torch.cat([*pooled, both[3]])).relu())
        torch.testing.assert_close(network(features, current)[0], expected)


def test_best_list_schedule_keeps_memory() -> None:
    problem = problem_in_little_memory(5)
    found = best_list_schedule(problem, 0.0)
    assert problem.overflow_bytes(found.assignment) == 0
    assert schedule(problem, found.assignment, found.order, in_order=True).makespan >= found.makespan
