"""Schedules sampled from Doppler's policies, each priced by the simulator. Pure."""

from __future__ import annotations

import numpy as np
from numpy.random import default_rng

from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.rollout import draw_noise, orders_by_start, roll_out
from coordinator.plan.graph.latency.doppler.starts import Start
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule
from hearth.errors import NoPlacement

NUM_SAMPLES = 64
_NUM_KEPT = 4


def policy_samples(problem: PlacementProblem, policy: Policy, seed: int, num_samples: int = NUM_SAMPLES) -> list[Start]:
    """The best four of a greedy episode and `num_samples` sampled ones: different assignments, by increasing makespan.

    A start proposes devices with PLC's probabilities in its episode. Empty if no episode finds room for all operators.
    Takes 0.4 s for 64 samples at 229 operators.
    """
    rng = default_rng(seed)
    try:
        found = roll_out(problem_features(problem, policy.features), policy, draw_noise(problem, num_samples, rng))
    except NoPlacement:
        return []
    evaluator, assignments, orders = Evaluator(problem), found.assignments.tolist(), orders_by_start(found).tolist()
    complete = np.flatnonzero(found.complete).tolist()
    best: dict[tuple[int, ...], int] = {}  # by assignment, its best episode
    for b in sorted(complete, key=lambda b: evaluator.makespan(assignments[b], orders[b])):
        best.setdefault(tuple(assignments[b]), b)
    samples = [
        Start(best_schedule(problem, assignment, orders[b]), found.probabilities[b].tolist())
        for assignment, b in list(best.items())[:_NUM_KEPT]
    ]
    return sorted(samples, key=lambda each: each.makespan)
