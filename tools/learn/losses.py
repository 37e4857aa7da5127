"""Losses of the dual policy, summed over steps and averaged over episodes. Shape letters as in `scoring`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tools.learn.episodes import Trace
from tools.learn.instance import Floats, Mask
from tools.learn.scoring import Rules, StepProbabilities


def imitation_loss(part: StepProbabilities, trace: Trace, rules: Rules) -> Tensor:
    """Minus the log-probability of the teacher's choices: the sum over those that tie."""
    loss = torch.zeros(())
    if rules.learns_operators:
        loss = loss - _of_any(part.operators_TBN, trace.taught_operators_TBN[part.steps]).sum()
    if rules.learns_devices:
        loss = loss - _of_any(part.devices_TBK, trace.taught_devices_TBK[part.steps]).sum()
    return loss / len(trace.fits_B)


def reinforcement_loss(
    part: StepProbabilities, trace: Trace, advantages_B: Floats, entropy_weight: float, rules: Rules
) -> Tensor:
    """REINFORCE: minus the log-probability of each episode times its advantage, minus weighted entropy."""
    weights_B = torch.from_numpy(advantages_B.astype(np.float32))
    loss = torch.zeros(())
    for learns, log_TBX, chosen_TB in (
        (rules.learns_operators, part.operators_TBN, trace.operators_TB),
        (rules.learns_devices, part.devices_TBK, trace.devices_TB),
    ):
        if learns:
            chosen = torch.from_numpy(chosen_TB[part.steps])[..., None]
            loss = (
                loss - (log_TBX.gather(-1, chosen)[..., 0] * weights_B).sum() - entropy_weight * entropy(log_TBX).sum()
            )
    return loss / len(weights_B)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy along the last axis; choices with probability 0 add nothing."""
    finite = log_probabilities.masked_fill(log_probabilities.isinf(), 0.0)
    return -(log_probabilities.exp() * finite).sum(-1)


def _of_any(log_probabilities: Tensor, choices: Mask) -> Tensor:
    return log_probabilities.masked_fill(~torch.from_numpy(choices), -torch.inf).logsumexp(-1)
