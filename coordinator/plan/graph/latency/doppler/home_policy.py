"""The policy that plans a graph for a home: schedules sampled from it, and learning before it plans. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.random import default_rng

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.learning import learn
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.rollout import Rollouts, draw_noise, orders_by_start, roll_out
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from coordinator.plan.graph.latency.search import Start, best_starts, is_short_search, solve_doppler
from coordinator.plan.solution import SearchOptions, Solution
from hearth.errors import NoPlacement

NUM_SAMPLES, NUM_ROUNDS = 64, 3
# Of the one round of a search that is short: a tenth of a second on a graph of 229 operators. Larger graphs get fewer samples.
_SHORT_NUM_SAMPLES, _SHORT_NUM_PLACEMENTS = 12, 4000
_NUM_KEPT = 4


class HomePolicy:
    """The policy of one run of the planner.

    It learns on the first problem that it plans, for `learn_seconds` (0: not at all), but from one batch of episodes at least.
    """

    def __init__(self, policy: Policy | None, learn_seconds: float = 0.0) -> None:
        self.policy = policy  # None: the planner does without
        self.num_episodes = 0  # of what it has learnt
        self._learn_seconds = learn_seconds if policy else 0.0

    def solve(
        self, problem: PlacementProblem, options: SearchOptions, starts: Sequence[Start] = ()
    ) -> Solution[Schedule]:
        """As `solve_doppler`, from starts of the policy. The time limit begins after learning.

        Raises ModelDoesNotFit, NoPlacement.
        """
        learnt = self._learn(problem, options) if self._learn_seconds else ()
        draw = few_samples if is_short_search(options) else policy_samples
        sample = partial(draw, problem, self.policy, seed=options.seed) if self.policy else None
        return solve_doppler(problem, options, [*starts, *map(Start, learnt)], sample)

    def _learn(self, problem: PlacementProblem, options: SearchOptions) -> Sequence[Schedule]:
        """Replace the policy by what it learns; return the best schedules of lists, of the old policy and of learning.

        The time to learn begins once the schedules of lists and of the old policy are made.
        """
        assert self.policy is not None
        known = best_starts(list(map(Start, list_schedules(problem, options.time_limit_seconds, "doppler"))))
        known = best_starts([*known, *policy_samples(problem, self.policy, known[0].schedule, options.seed)])
        starts = [each.schedule for each in known]
        features, rng = problem_features(problem), default_rng(options.seed)
        deadline = options.clock() + self._learn_seconds
        self._learn_seconds = 0.0
        self.policy, elites, self.num_episodes = learn(
            features.with_incumbent(starts[0]), self.policy, starts, rng, options.clock, deadline
        )
        return elites


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
    features = problem_features(problem)
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
    for b in sorted(complete, key=lambda b: evaluator.in_order(assignments[b], orders[b])):
        best.setdefault(tuple(assignments[b]), b)
    return [
        Start(best_schedule(problem, assignment, orders[b]), episodes.probabilities[b].tolist())
        for assignment, b in list(best.items())[:_NUM_KEPT]
    ]
