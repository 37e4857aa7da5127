"""Doppler and its ablations (arXiv 2505.23131, section 6): which decisions are learnt, and how often messages are passed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np
import torch

from tools.learn.instance import Instance
from tools.learn.networks import DualPolicy, Shape
from tools.learn.scoring import Rules
from tools.learn.training import Trainer


class Ablation(str, Enum):
    """The paper's ablations."""

    NONE = "none"
    SEL_ONLY = "sel-only"
    PLC_ONLY = "plc-only"
    PER_STEP = "per-step"


RULES: Mapping[Ablation, Rules] = {
    Ablation.NONE: Rules(),
    Ablation.SEL_ONLY: Rules(learns_devices=False),
    Ablation.PLC_ONLY: Rules(learns_operators=False),
    Ablation.PER_STEP: Rules(),
}


def make_trainer(instance: Instance, ablation: Ablation, seed: int, batch: int) -> Trainer:
    """A trainer of a new policy; `seed`: of its weights and samples. Torch computes with one thread from now on."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy = DualPolicy(Shape(per_step=ablation is Ablation.PER_STEP))
    return Trainer(instance, policy, np.random.default_rng(seed), RULES[ablation], batch)
