"""Training of Doppler's dual policy on one graph: imitation (stage I), and policy gradient on simulated times (stage II).

A batch shares one run of message passing and one gradient step; the paper takes one of each for every episode. Samples
come from the softmax, without uniform exploration; returns are not discounted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from coordinator.plan.graph.latency.doppler.gradients import advantages
from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.problem import PlacementProblem
from tools.research.episodes import Floats, Instance, Placement, Trace, make_instance, run_episodes
from tools.research.networks import DualPolicy, Encoding, PolicyChooser, Rules, Shape, graph_tensors, log_probabilities

IMITATION_RATE = 2e-3
FIRST_RATE, LAST_RATE = 1e-3, 1e-4  # of stage II; linear
FIRST_ENTROPY = 1e-2  # weight in the loss; falls to 0, linear
_NO_ROOM_FACTOR = 2.0  # multiplies the price of a placement that exceeds a device's memory


@dataclass(frozen=True)
class Found:
    """The best placement of training, and the number of episodes of the policy until then."""

    seconds: float
    placement: Placement
    episode: int


@dataclass
class Trainer:
    """Trains a policy on one instance. Two runs with the same seed and counts give the same weights."""

    instance: Instance
    policy: DualPolicy
    rng: np.random.Generator
    rules: Rules = field(default_factory=Rules)
    batch: int = 16
    best: Found | None = None  # of priced episodes that fit into memory
    num_episodes: int = 0

    def __post_init__(self) -> None:
        self._graph, self._evaluator = graph_tensors(self.instance), Evaluator(self.instance.problem)
        self._optimizers = [
            torch.optim.Adam(network.parameters(), fused=True) for network in (self.policy.select, self.policy.place)
        ]

    def imitate(self, num_episodes: int) -> float:
        """Stage I: in the states that the policy reaches, raise the probability of Critical Path's choices.

        Choices that tie count as one. Returns the loss of the last batch, per step.
        """
        loss = 0.0
        for done in range(0, num_episodes, self.batch):
            trace, encoding = self._sample(min(self.batch, num_episodes - done))
            logs = log_probabilities(self.policy, encoding, trace)
            loss = self._descend(imitation_loss(logs, trace, self.rules), IMITATION_RATE)
        return loss / self.instance.problem.num_operators

    def reinforce(self, num_episodes: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Stage II: policy gradient on makespans in Hearth's simulator. Ends early with `stop()`."""
        for done in range(0, num_episodes, self.batch):
            trace, encoding = self._sample(min(self.batch, num_episodes - done))
            seconds_B = self._prices(trace)
            left = 1 - done / num_episodes
            rate, entropy_weight = LAST_RATE + (FIRST_RATE - LAST_RATE) * left, FIRST_ENTROPY * left
            logs = log_probabilities(self.policy, encoding, trace)
            self._descend(reinforcement_loss(logs, trace, advantages(seconds_B), entropy_weight, self.rules), rate)
            if stop():
                return

    def greedy(self) -> Trace:
        """The episode of the most probable choices."""
        chooser = PolicyChooser(self.policy, self.policy.encode(self._graph), None, self.rules)
        return run_episodes(self.instance, chooser, 1)

    def _sample(self, num_episodes: int) -> tuple[Trace, Encoding]:
        encoding = self.policy.encode(self._graph)
        chooser = PolicyChooser(self.policy, encoding, self.rng, self.rules)
        self.num_episodes += num_episodes
        return run_episodes(self.instance, chooser, num_episodes), encoding

    def _prices(self, trace: Trace) -> Floats:
        placements = trace.placements()
        # The order of placing decides between ready items.
        seconds_B = np.array([self._evaluator.work_conserving(*each) for each in placements], np.float64)
        for placement, seconds, fits in zip(placements, seconds_B.tolist(), trace.fits_B.tolist(), strict=True):
            if fits and (self.best is None or seconds < self.best.seconds):
                self.best = Found(seconds, placement, self.num_episodes)
        return np.where(trace.fits_B, seconds_B, _NO_ROOM_FACTOR * seconds_B)

    def _descend(self, loss: Tensor, rate: float) -> float:
        """One step of Adam for each policy; returns the loss."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach())


def make_trainer(problem: PlacementProblem, seed: int = 0, rules: Rules | None = None, batch: int = 16) -> Trainer:
    """A trainer of a new policy; `seed`: of its weights and samples. Torch computes with one thread from now on."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return Trainer(make_instance(problem), DualPolicy(Shape()), np.random.default_rng(seed), rules or Rules(), batch)


def imitation_loss(logs: tuple[Tensor, Tensor], trace: Trace, rules: Rules) -> Tensor:
    """Minus the log-probability of the teacher's choices: the sum over those that tie; mean over episodes."""
    loss = torch.zeros(())
    for learns, log_TBX, taught_TBX in (
        (rules.learns_operators, logs[0], trace.taught_operators_TBN),
        (rules.learns_devices, logs[1], trace.taught_devices_TBK),
    ):
        if learns:
            loss = loss - log_TBX.masked_fill(~torch.from_numpy(taught_TBX), -torch.inf).logsumexp(-1).sum()
    return loss / len(trace.fits_B)


def reinforcement_loss(
    logs: tuple[Tensor, Tensor], trace: Trace, advantages_B: Floats, entropy_weight: float, rules: Rules
) -> Tensor:
    """REINFORCE: minus the log-probability of each episode times its advantage, minus weighted entropy; mean over episodes."""
    weights_B = torch.from_numpy(advantages_B.astype(np.float32))
    loss = torch.zeros(())
    for learns, log_TBX, chosen_TB in (
        (rules.learns_operators, logs[0], trace.operators_TB),
        (rules.learns_devices, logs[1], trace.devices_TB),
    ):
        if learns:
            chosen = torch.from_numpy(chosen_TB)[..., None]
            loss = loss - (log_TBX.gather(-1, chosen)[..., 0] * weights_B).sum()
            loss = loss - entropy_weight * entropy(log_TBX).sum()
    return loss / len(weights_B)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy along the last axis; choices with probability 0 add nothing."""
    finite = log_probabilities.masked_fill(log_probabilities.isinf(), 0.0)
    return -(log_probabilities.exp() * finite).sum(-1)
