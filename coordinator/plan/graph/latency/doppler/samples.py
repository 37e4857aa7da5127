"""Schedules sampled from Doppler's policies, each priced by the simulator. Pure."""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng

from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.rollout import Rollouts, draw_noise, orders_by_start, roll_out
from coordinator.plan.graph.latency.doppler.starts import Start, best_starts
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from hearth.errors import NoPlacement

NUM_SAMPLES, NUM_ROUNDS = 64, 3
# Of the one round of a search that is short: a tenth of a second on a graph of 229 operators. Larger graphs get fewer samples.
_SHORT_NUM_SAMPLES, _SHORT_NUM_PLACEMENTS = 12, 4000
_NUM_KEPT = 4


def policy_samples(
    problem: PlacementProblem,
    policy: Policy,
    incumbent: Schedule,
    seed: int,
    num_samples: int = NUM_SAMPLES,
    num_rounds: int = NUM_ROUNDS,
) -> list[Start]:
    """The best four of all rounds, each of a greedy episode and sampled ones: different assignments, by increasing makespan.

    The first round improves `incumbent`, each other one the best of the rounds before. A start proposes devices with PLC's
    probabilities in its episode. Empty if no episode finds room for all operators.
    """
    rng, evaluator = default_rng(seed), Evaluator(problem)
    features = problem_features(problem, policy.features)
    found: list[Start] = []
    for _ in range(num_rounds):
        try:
            episodes = roll_out(features.with_incumbent(incumbent), policy, draw_noise(problem, num_samples, rng))
        except NoPlacement:
            break
        found = best_starts([*found, *_best(problem, evaluator, episodes)])[:_NUM_KEPT]
        incumbent = min(incumbent, found[0].schedule, key=lambda each: each.makespan)
    return found


def few_samples(problem: PlacementProblem, policy: Policy, incumbent: Schedule, seed: int) -> list[Start]:
    """`policy_samples` for a search of less than a second: one round of few episodes, none on a very large graph."""
    num_samples = min(_SHORT_NUM_SAMPLES, _SHORT_NUM_PLACEMENTS // problem.num_operators - 1)
    return policy_samples(problem, policy, incumbent, seed, num_samples, 1) if num_samples >= 0 else []


def _best(problem: PlacementProblem, evaluator: Evaluator, episodes: Rollouts) -> list[Start]:
    """The best four complete episodes with different assignments."""
    assignments, orders = episodes.assignments.tolist(), orders_by_start(episodes).tolist()
    complete = np.flatnonzero(episodes.complete).tolist()
    best: dict[tuple[int, ...], int] = {}  # by assignment, its best episode
    for b in sorted(complete, key=lambda b: evaluator.makespan(assignments[b], orders[b])):
        best.setdefault(tuple(assignments[b]), b)
    return [
        Start(best_schedule(problem, assignment, orders[b]), episodes.probabilities[b].tolist())
        for assignment, b in list(best.items())[:_NUM_KEPT]
    ]
