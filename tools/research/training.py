"""Training of Doppler's dual policy on one graph: imitation (stage I), and policy gradient on simulated times (stage II).

A batch shares one run of message passing and one gradient step; the paper takes one of each for every episode. Samples
come from the softmax, without uniform exploration; returns are not discounted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np
import torch
from torch import Tensor

from coordinator.plan.graph.latency.doppler.gradients import advantages
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import schedule
from tools.research.episodes import Floats, Placement, Rules, Trace, log_probabilities, make_instance, run_episodes
from tools.research.networks import DualPolicy, Encoding, Shape

BATCH = 16
IMITATION_RATE = 2e-3
FIRST_RATE, LAST_RATE = 1e-3, 1e-4  # of stage II; linear
FIRST_ENTROPY = 1e-2  # weight in the loss; falls to 0, linear
_NO_ROOM_FACTOR = 2.0  # multiplies the price of a placement that exceeds a device's memory


class Trainer:
    """Trains a new policy on one problem. Two runs with the same seed and counts give the same weights.

    `seed`: of its weights and samples. Torch computes with one thread from now on.
    """

    def __init__(self, problem: PlacementProblem, seed: int, rules: Rules, shape: Shape) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.policy, self.rules = DualPolicy(shape), rules
        self.best: Placement | None = None  # of priced episodes that fit into memory
        self.num_episodes = 0
        self._instance = make_instance(problem)
        self._rng, self._best_seconds = np.random.default_rng(seed), inf
        self._optimizers = [
            torch.optim.Adam(network.parameters(), fused=True) for network in (self.policy.select, self.policy.place)
        ]

    def imitate(self, num_episodes: int) -> None:
        """Stage I: in the states that the policy reaches, raise the probability of Critical Path's choices.

        Choices that tie count as one.
        """
        for _, trace, encoding in self._batches(num_episodes):
            logs = log_probabilities(self.policy, encoding, trace)
            self._descend(imitation_loss(logs, trace, self.rules), IMITATION_RATE)

    def reinforce(self, num_episodes: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Stage II: policy gradient on makespans in Hearth's simulator. Ends early with `stop()`."""
        for left, trace, encoding in self._batches(num_episodes):
            advantages_B = advantages(self._prices(trace))
            logs = log_probabilities(self.policy, encoding, trace)
            loss = reinforcement_loss(logs, trace, advantages_B, FIRST_ENTROPY * left, self.rules)
            self._descend(loss, LAST_RATE + (FIRST_RATE - LAST_RATE) * left)
            if stop():
                return

    def greedy(self) -> Trace:
        """The episode of the most probable choices."""
        encoding = self.policy.encode(self._instance.graph)
        trace: Trace = run_episodes(self._instance, self.policy, encoding, self.rules, 1, None)
        return trace

    def sample(self, num_episodes: int) -> tuple[Trace, Encoding]:
        """Episodes of choices with the policy's probabilities."""
        encoding = self.policy.encode(self._instance.graph)
        self.num_episodes += num_episodes
        return run_episodes(self._instance, self.policy, encoding, self.rules, num_episodes, self._rng), encoding

    def _batches(self, num_episodes: int) -> Iterator[tuple[float, Trace, Encoding]]:
        """Sampled episodes, with the share of all that were left before each batch."""
        for done in range(0, num_episodes, BATCH):
            yield 1 - done / num_episodes, *self.sample(min(BATCH, num_episodes - done))

    def _prices(self, trace: Trace) -> Floats:
        placements = trace.placements()
        # The order of placing decides between ready items.
        seconds_B = np.array([schedule(self._instance.problem, *each).makespan for each in placements], np.float64)
        for placement, seconds, fits in zip(placements, seconds_B.tolist(), trace.fits_B.tolist(), strict=True):
            if fits and seconds < self._best_seconds:
                self.best, self._best_seconds = placement, seconds
        return np.where(trace.fits_B, seconds_B, _NO_ROOM_FACTOR * seconds_B)

    def _descend(self, loss: Tensor, rate: float) -> None:
        """One step of Adam for each policy."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()


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
