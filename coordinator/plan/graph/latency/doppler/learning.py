"""Learning on one graph and home: Doppler's stage II for the heads of the policy, with expert iteration. Pure.

Each batch of sampled episodes is priced by the simulator, and the heads take one step: policy gradient on the batch, with
advantages relative to its mean, and imitation of the best plans found so far. Search improves those plans now and then.

A plan is imitated in the states that it passes through. Renaming equal devices in it changes nothing, since the policy
knows devices by their features only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from coordinator.plan.graph.latency.annealing import improve
from coordinator.plan.graph.latency.doppler.features import Floats, ProblemFeatures
from coordinator.plan.graph.latency.doppler.gradients import Adam, HeadGradients, advantages, head_weights
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.rollout import Rollouts, orders_by_start, repeat, roll_out, sampling_noise
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from hearth.errors import NoPlacement

BATCH = 16
NUM_BATCHES = 250  # 4,000 episodes, as many as Doppler's authors give each stage
_FIRST_RATE, _LAST_RATE = 1e-3, 1e-4  # learning rate; it falls linearly over all batches
_FIRST_ENTROPY_WEIGHT = 1e-2  # falls linearly to 0
_ELITE_WEIGHT = 0.3  # of the imitation of one plan, where an episode of the batch counts as much as its advantage
_NUM_ELITES = 4
_SEARCH_BATCHES = 50  # batches between two searches
_SEARCH_MOVES = 4000  # of each elite in each search


class Learnt(NamedTuple):
    """A policy with learnt heads, and the best plans of all episodes, searches and starts, by increasing makespan."""

    policy: Policy
    elites: tuple[Schedule, ...]
    num_episodes: int


def learn(
    problem: ProblemFeatures,
    policy: Policy,
    starts: Sequence[Schedule],
    rng: Generator,
    clock: Callable[[], float],
    deadline: float,
    num_batches: int = NUM_BATCHES,
) -> Learnt:
    """Learn from `num_batches` batches, or until `clock()` reaches `deadline`, but from one at least. `policy` stays as it is.

    `starts` must fit the memory. Two runs with the same generator and number of batches give the same result.
    """
    learning = _Learning(problem, policy, starts, rng)
    batch = 0
    while batch == 0 or (batch < num_batches and clock() < deadline):
        left = 1 - batch / num_batches
        learning.step(_LAST_RATE + (_FIRST_RATE - _LAST_RATE) * left, _FIRST_ENTROPY_WEIGHT * left)
        batch += 1
        if batch % _SEARCH_BATCHES == 0:
            learning.search(clock, deadline)
    return Learnt(learning.policy, tuple(each.schedule for each in learning.elites), batch * BATCH)


@dataclass(frozen=True)
class _Elite:
    schedule: Schedule
    episode: Rollouts  # the one that places its operators in the order of their starts


class _Learning:
    def __init__(self, problem: ProblemFeatures, policy: Policy, starts: Sequence[Schedule], rng: Generator) -> None:
        self.policy = Policy({name: each.copy() for name, each in policy.weights.items()})
        self.elites: list[_Elite] = []  # with different assignments, by increasing makespan
        self._problem, self._rng = problem, rng
        self._embedded = policy.embed(problem)
        self._gradients = HeadGradients(problem, self.policy, self._embedded)
        self._adam = Adam(head_weights(self.policy))
        self._evaluator = Evaluator(problem.problem)
        self._probabilities: Floats | None = None  # PLC's, the mean over the last batch
        for each in starts:
            self._keep(each)

    def step(self, rate: float, entropy_weight: float) -> None:
        """One batch, and one step of Adam."""
        total = {name: np.zeros_like(weight) for name, weight in head_weights(self.policy).items()}
        for episodes, weights, entropy in (*self._sampled(entropy_weight), *self._imitated()):
            for name, each in self._gradients.of(episodes, weights, entropy).items():
                total[name] += each
        self._adam.update(total, rate)

    def search(self, clock: Callable[[], float], deadline: float) -> None:
        """Improve the elites; devices are proposed as the policy would choose them."""
        proposals = None if self._probabilities is None else self._probabilities.tolist()
        for elite in list(self.elites):
            rng = Random(int(self._rng.integers(1 << 32)))
            moves = _SEARCH_MOVES
            self._keep(improve(self._problem.problem, elite.schedule, rng, moves, clock, deadline, proposals))

    def _sampled(self, entropy_weight: float) -> list[tuple[Rollouts, Floats, float]]:
        """A batch, priced by the simulator, with its share of the loss. Episodes without room for an operator are left out."""
        noise = sampling_noise(self._problem.problem, BATCH, self._rng)
        try:
            episodes = roll_out(self._problem, self.policy, noise, self._embedded)
        except NoPlacement:
            return []
        complete = np.flatnonzero(episodes.complete)
        orders, assignments = orders_by_start(episodes).tolist(), episodes.assignments.tolist()
        makespans = np.array([self._evaluator.in_order(assignments[b], orders[b]) for b in complete])
        weights = np.zeros(BATCH)
        weights[complete] = advantages(makespans) / len(complete)
        best = int(complete[makespans.argmin()])
        if self._is_better(makespans.min()):
            self._keep(best_schedule(self._problem.problem, assignments[best], orders[best]))
        self._probabilities = episodes.probabilities[complete].mean(axis=0)
        return [(episodes, weights, entropy_weight / len(complete))]

    def _imitated(self) -> list[tuple[Rollouts, Floats, float]]:
        weights = np.array([_ELITE_WEIGHT / max(len(self.elites), 1)])
        return [(elite.episode, weights, 0.0) for elite in self.elites]

    def _is_better(self, makespan: float) -> bool:
        return len(self.elites) < _NUM_ELITES or makespan < self.elites[-1].schedule.makespan

    def _keep(self, found: Schedule) -> None:
        """Add a plan to the elites if it is among the best."""
        same = next((each for each in self.elites if each.schedule.assignment == found.assignment), None)
        if same is not None:
            if same.schedule.makespan <= found.makespan:
                return
            self.elites.remove(same)
        elif not self._is_better(found.makespan):
            return
        self.elites.append(_Elite(found, repeat(self._problem, found.operator_order, found.assignment)))
        self.elites = sorted(self.elites, key=lambda each: each.schedule.makespan)[:_NUM_ELITES]
