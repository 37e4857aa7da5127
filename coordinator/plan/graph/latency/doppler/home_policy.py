"""The policy that plans a graph for a home, and that may learn there before it plans. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from numpy.random import default_rng

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.doppler.features import problem_features
from coordinator.plan.graph.latency.doppler.learning import learn
from coordinator.plan.graph.latency.doppler.planner import is_short_search, solve_doppler
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.samples import few_samples, policy_samples
from coordinator.plan.graph.latency.doppler.starts import Start, best_starts
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.solution import SearchOptions, Solution


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
        features, rng = problem_features(problem, self.policy.features), default_rng(options.seed)
        deadline = options.clock() + self._learn_seconds
        self._learn_seconds = 0.0
        self.policy, elites, self.num_episodes = learn(
            features.with_incumbent(starts[0]), self.policy, starts, rng, options.clock, deadline
        )
        return elites
