"""Training of the dual policy on one graph: imitation (stage I), policy gradient on prices (II) and measured times (III).

A batch shares one run of message passing and one gradient step; the paper takes one of each for every episode. Samples
come from the softmax, without uniform exploration; returns are not discounted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from coordinator.plan.graph.latency.policy_gradient import advantages
from tools.learn.episodes import Placement, Repeat, Trace, run_episodes
from tools.learn.instance import Floats, Instance
from tools.learn.losses import imitation_loss, reinforcement_loss
from tools.learn.networks import DualPolicy, graph_tensors
from tools.learn.scoring import Encoding, PolicyChooser, Rules, StepProbabilities, encode, log_probabilities

# Times of placements: from a simulator, or measured on devices.
Price = Callable[[Sequence[Placement]], Sequence[float]]

IMITATION_RATE = 2e-3
FIRST_RATE, LAST_RATE = 1e-3, 1e-4  # of stages II and III; linear
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
        self._graph = graph_tensors(self.instance)
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
            loss = self._descend(
                trace, encoding, partial(imitation_loss, trace=trace, rules=self.rules), IMITATION_RATE
            )
        return loss / self.instance.problem.num_operators

    def reinforce(
        self, num_episodes: int, price: Price, report: Callable[[Floats], None] = lambda seconds_B: None
    ) -> None:
        """Stage II with a simulator's prices, stage III with measured times. Reports the times of each batch."""
        for done in range(0, num_episodes, self.batch):
            trace, encoding = self._sample(min(self.batch, num_episodes - done))
            seconds_B = self._prices(trace, price)
            left = 1 - done / num_episodes
            rate, entropy_weight = LAST_RATE + (FIRST_RATE - LAST_RATE) * left, FIRST_ENTROPY * left
            self._learn(trace, encoding, seconds_B, rate, entropy_weight)
            report(seconds_B)

    def learn_measured(
        self, placements: Sequence[Placement], seconds: Sequence[float], rate: float = LAST_RATE
    ) -> None:
        """One gradient step of stage III, from placements that were measured elsewhere.

        Raises ValueError for an order that places an operator before its inputs.
        """
        trace = run_episodes(self.instance, Repeat(placements), len(placements), self.policy.shape.per_step)
        self._learn(trace, self._encode(), np.array(seconds, np.float64), rate, 0.0)

    def greedy(self) -> Trace:
        """The episode of the most probable choices."""
        encoding = self._encode()
        chooser = PolicyChooser(self.policy, self._graph, encoding and encoding.detach(), None, self.rules)
        return run_episodes(self.instance, chooser, 1, self.policy.shape.per_step)

    def _encode(self) -> Encoding | None:
        return None if self.policy.shape.per_step else encode(self.policy, self._graph)

    def _sample(self, num_episodes: int) -> tuple[Trace, Encoding | None]:
        encoding = self._encode()
        chooser = PolicyChooser(self.policy, self._graph, encoding and encoding.detach(), self.rng, self.rules)
        self.num_episodes += num_episodes
        return run_episodes(self.instance, chooser, num_episodes, self.policy.shape.per_step), encoding

    def _prices(self, trace: Trace, price: Price) -> Floats:
        placements = trace.placements()
        seconds_B = np.array(price(placements), np.float64)
        for placement, seconds, fits in zip(placements, seconds_B.tolist(), trace.fits_B.tolist(), strict=True):
            if fits and (self.best is None or seconds < self.best.seconds):
                self.best = Found(seconds, placement, self.num_episodes)
        return np.where(trace.fits_B, seconds_B, _NO_ROOM_FACTOR * seconds_B)

    def _learn(
        self, trace: Trace, encoding: Encoding | None, seconds_B: Floats, rate: float, entropy_weight: float
    ) -> None:
        advantages_B = advantages(seconds_B)
        self._descend(
            trace,
            encoding,
            partial(
                reinforcement_loss, trace=trace, advantages_B=advantages_B, entropy_weight=entropy_weight,
                rules=self.rules,
            ),
            rate,
        )  # fmt: skip

    def _descend(
        self, trace: Trace, encoding: Encoding | None, loss_of: Callable[[StepProbabilities], torch.Tensor], rate: float
    ) -> float:
        """One step of Adam for each policy; returns the loss."""
        total = 0.0
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate
        for part in log_probabilities(self.policy, self._graph, encoding, trace):
            loss = loss_of(part)
            loss.backward()
            total += loss.item()
        for optimizer in self._optimizers:
            optimizer.step()
        return total
