"""Finished episodes as tensors: the probabilities of all their steps, with gradients.

Shape letters as in `network`. Arrays of steps follow the order in which an episode placed the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coordinator.plan.graph.latency.doppler.features import ProblemFeatures
from coordinator.plan.graph.latency.doppler.rollout import MAX_LOGIT_SPREAD, Rollouts, candidates_by_step, repeat
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from tools.learn.home.network import GraphTensors, HomeNetwork


class Episodes(NamedTuple):
    """Complete episodes of one problem."""

    operators_BT: Tensor
    devices_BT: Tensor
    candidates_BTn: Tensor
    allowed_BTK: Tensor
    features_BTKF: Tensor


class Decisions(NamedTuple):
    """Log-probabilities of all choices of each step: -inf for operators that are no candidates, devices without room."""

    operators_BTn: Tensor
    devices_BTK: Tensor

    def of(self, episodes: Episodes) -> Tensor:
        """The log-probability of each episode [B]."""
        operators_BT1 = self.operators_BTn.gather(2, episodes.operators_BT[..., None])
        devices_BT1 = self.devices_BTK.gather(2, episodes.devices_BT[..., None])
        return (operators_BT1 + devices_BT1).sum((1, 2))


def taught_episodes(problem: ProblemFeatures, schedules: Sequence[Schedule]) -> Episodes:
    """The episodes that place the operators of each schedule by their starts, on its devices."""
    repeated = (repeat(problem, taught.operator_order, taught.assignment) for taught in schedules)
    found = [episodes_of(problem.problem, each) for each in repeated]
    return Episodes(*map(torch.cat, zip(*found, strict=True)))


def episodes_of(problem: PlacementProblem, rollouts: Rollouts) -> Episodes:
    """The complete ones of some rollouts."""
    kept = rollouts.complete
    operators_BT = rollouts.orders[kept]
    rows = np.arange(len(operators_BT))[:, None]
    by_step = (each[kept][rows, operators_BT] for each in (rollouts.assignments, rollouts.allowed, rollouts.features))
    devices, allowed, features = map(torch.from_numpy, by_step)
    candidates = torch.from_numpy(candidates_by_step(problem, operators_BT))
    return Episodes(torch.from_numpy(operators_BT), devices, candidates, allowed, features)


def decisions(network: HomeNetwork, graph: GraphTensors, episodes: Episodes) -> Decisions:
    """The network's probabilities in every state of the episodes, with gradients."""
    encoding = network.encode(graph)
    K = episodes.allowed_BTK.shape[-1]
    is_on_BTK = functional.one_hot(episodes.devices_BT, K).float()
    added_BTKh = encoding.placed_nh[episodes.operators_BT][:, :, None] * is_on_BTK[..., None]
    counts_BTK1 = (is_on_BTK.cumsum(1) - is_on_BTK)[..., None]
    placed_BTKh = (added_BTKh.cumsum(1) - added_BTKh) / counts_BTK1.clamp(min=1)
    devices = network.place_logits(encoding.static_nh[episodes.operators_BT], placed_BTKh, episodes.features_BTKF)
    logits = encoding.select_logits_n
    logits = logits.clamp(min=logits.max().detach() - MAX_LOGIT_SPREAD)
    return Decisions(
        torch.where(episodes.candidates_BTn, logits, -torch.inf).log_softmax(-1),
        devices.masked_fill(~episodes.allowed_BTK, -torch.inf).log_softmax(-1),
    )
