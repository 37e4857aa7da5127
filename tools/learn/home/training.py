"""Training of the policy for a home on many instances: imitation of searched schedules (stage I), policy gradient (II).

The policy improves an incumbent: stage II gives each batch a teacher's schedule, or the best sample of the batch before.

Stage II alone gives the better policy. Measured without incumbents: after stage I for 16 seconds, the best of 64 samples is
1.014 of the best list schedule (40 instances), after stage II for 150 seconds 0.964. An imitator that strays once spoils the
rest of its episode, most of all where links are slow.

Identical devices, and tiles that nothing tells apart, have equal logits: a teacher's choice among them changes the loss by a
constant and its gradient not at all, so teachers' devices need no renaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from coordinator.plan.graph.latency.doppler.features import ProblemFeatures, problem_features
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.rollout import orders_by_start, roll_out, sampling_noise
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.policy_gradient import advantages
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule, best_schedule
from hearth.errors import NoPlacement
from tools.learn.home.instances import random_instance
from tools.learn.home.network import GraphTensors, HomeNetwork, graph_tensors
from tools.learn.home.replay import Episodes, decisions, episodes_of, taught_episodes
from tools.learn.home.teacher import taught_schedules

BATCH = 16  # episodes of one gradient step
IMITATION_RATES = (2e-3, 2e-4)  # first and last; linear
# Of the policy gradient. Without incumbents, means of samples are 4.6 % shorter after 1,760 steps than at first; from 1.5e-3,
# 1.4 %. With 48 episodes in a batch a step gains hardly more, and with imitation of the teachers in every step less.
RATES = (3e-4, 3e-5)
_SHARPENING = 2.0
_RESTART_SHARE = 0.5  # of batches that are followed by one from a teacher's schedule
_MOST_GRADIENT = 1.0  # greater norms are scaled down


@dataclass
class Lesson:
    """One instance, with its teachers' episodes."""

    features: ProblemFeatures
    graph: GraphTensors
    evaluator: Evaluator
    teachers: Sequence[Schedule]
    taught: Episodes
    incumbent: Schedule  # the one that the next batch improves
    best_makespan: float  # of the teachers and of all samples

    @classmethod
    def of(cls, problem: PlacementProblem, taught: Sequence[Schedule]) -> Lesson:
        features = problem_features(problem)
        episodes = taught_episodes(features, taught)
        graph, best = graph_tensors(features), taught[0]
        return cls(features, graph, Evaluator(problem), taught, episodes, best, best.makespan)


def make_lessons(rng: Generator, count: int, moves: int) -> list[Lesson]:
    """Random instances with teachers that anneal the best lists by `moves` moves."""
    found: list[Lesson] = []
    while len(found) < count:
        problem = random_instance(rng)
        if taught := taught_schedules(problem, len(found), moves):
            found.append(Lesson.of(problem, taught))
    return found


class Trainer:
    """Trains a policy. Equal seeds and counts give equal weights on one machine."""

    def __init__(self, policy: Policy, lessons: Sequence[Lesson], rng: Generator) -> None:
        self.network = HomeNetwork(policy)
        self.lessons, self._rng = lessons, rng
        self._adam = torch.optim.Adam(self.network.weights.values(), fused=True)

    def imitate(self, num_steps: int) -> Iterator[float]:
        """Stage I: raise the probabilities of the teachers' schedules. Yields the loss of each step, per operator."""
        for step, lesson in self._shuffled(num_steps):
            yield self._descend(self._imitation(lesson), _between(IMITATION_RATES, step / num_steps))

    def reinforce(self, num_steps: int) -> Iterator[float]:
        """Stage II: policy gradient on simulated makespans, with a batch of one instance in each step.

        Yields the mean makespan of each batch, relative to the shortest schedule that the instance is known to have.
        """
        for step, lesson in self._shuffled(num_steps):
            with suppress(NoPlacement):  # no episode of the batch found room for all operators
                yield self._reinforce(lesson, step / num_steps)

    def sharpen(self) -> None:
        """Multiply all logits, after imitation: one stray choice of an imitator spoils what follows in its episode.

        After 6,000 steps, the best of 32 samples is 1.13 of the best list without, and 1.07 with this factor (seven of the
        paper's graphs on homes).
        """
        with torch.no_grad():
            for name in ("select.output.weight", "place.output.weight"):
                self.network.weights[name].mul_(_SHARPENING)

    def _reinforce(self, lesson: Lesson, done: float) -> float:
        features = lesson.features.with_incumbent(lesson.incumbent)
        graph = replace(lesson.graph, vertices_nV=torch.from_numpy(features.vertices))
        problem = features.problem
        rollouts = roll_out(features, self.network.policy, sampling_noise(problem, BATCH, self._rng))
        kept = rollouts.complete
        pairs = zip(rollouts.assignments[kept].tolist(), orders_by_start(rollouts)[kept].tolist(), strict=True)
        priced = [(lesson.evaluator.makespan(*pair), *pair) for pair in pairs]
        self._take_turns(lesson, *min(priced))
        makespans_B = np.array([makespan for makespan, *_ in priced])
        episodes = episodes_of(problem, rollouts)
        gain_B = torch.from_numpy(risk_seeking(advantages(makespans_B)).astype(np.float32))
        logs_B = decisions(self.network, graph, episodes).of(episodes)
        self._descend(-(gain_B * logs_B).mean() / problem.num_operators, _between(RATES, done))
        return float(makespans_B.mean()) / lesson.best_makespan

    def _take_turns(self, lesson: Lesson, makespan: float, assignment: Sequence[int], order: Sequence[int]) -> None:
        """Go on from the best sample of a batch, or begin again from a teacher: as often as each other."""
        lesson.best_makespan = min(lesson.best_makespan, makespan)
        if self._rng.random() < _RESTART_SHARE:
            lesson.incumbent = lesson.teachers[int(self._rng.integers(len(lesson.teachers)))]
        elif makespan < lesson.incumbent.makespan:
            lesson.incumbent = best_schedule(lesson.features.problem, assignment, order)

    def _imitation(self, lesson: Lesson) -> Tensor:
        found = decisions(self.network, lesson.graph, lesson.taught).of(lesson.taught)
        return -found.mean() / lesson.features.problem.num_operators

    def _descend(self, loss: Tensor, rate: float) -> float:
        """One step of Adam; returns the loss."""
        self._adam.zero_grad()
        self._adam.param_groups[0]["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.weights.values(), _MOST_GRADIENT)
        self._adam.step()
        return float(loss.detach())

    def _shuffled(self, num_steps: int) -> Iterator[tuple[int, Lesson]]:
        """All instances in random order, again and again."""
        for step in range(num_steps):
            if step % len(self.lessons) == 0:
                order = self._rng.permutation(len(self.lessons))
            yield step, self.lessons[order[step % len(self.lessons)]]


def risk_seeking(advantages_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of the gradient of log E[e^advantage], whose mean is 0: of many samples the planner keeps the best."""
    utilities = np.exp(advantages_B)
    weights: NDArray[np.float64] = utilities / utilities.mean() - 1
    return weights


def _between(limits: tuple[float, float], done: float) -> float:
    first, last = limits
    return first + (last - first) * done
