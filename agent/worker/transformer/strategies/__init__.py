"""Parallelism strategies: the forward pass on one rank, from common blocks and collectives.

Each module of this folder lists its strategies in `STRATEGIES`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agent.worker.transformer import blocks
from agent.worker.transformer.strategies.step import Step


def _strategies() -> Mapping[str, Callable[[Step], Tensor]]:
    """Collect the strategies of all modules of this folder, by name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {name: run for module in modules for name, run in getattr(module, "STRATEGIES", {}).items()}


STRATEGIES = _strategies()


def run(step: Step) -> Tensor:
    """Run the plan's strategy: the last hidden states of this rank's rows [s,H], for a decoder after the final norm."""
    with torch.inference_mode():
        x_sH = STRATEGIES[step.plan.body.strategy](step)
        if step.spec.causal and step.own_rows.size:
            x_sH = blocks.normalise(step.spec, x_sH, step.shard.embedding.norm)
        return x_sH
