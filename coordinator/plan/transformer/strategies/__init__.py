"""The strategies by name: the ways to divide a transformer among devices, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.plan.transformer.strategies.base import TransformerStrategy
from coordinator.plan.transformer.strategies.hybrid import HMP, LOCAL, SP
from coordinator.plan.transformer.strategies.megatron import MEGATRON
from coordinator.plan.transformer.strategies.pipeline import PIPELINE
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import MemoryUse
from hearth.plan.transformer import TransformerBody

# In the order in which planners try them; among equal plans, the first is taken.
STRATEGIES: Mapping[str, TransformerStrategy[Any]] = {each.name: each for each in (LOCAL, HMP, SP, MEGATRON, PIPELINE)}


def strategy_of_body(body: TransformerBody) -> TransformerStrategy[Any]:
    """The strategy that made a plan's body."""
    return STRATEGIES[body.strategy]


def rank_memory(spec: ModelSpec, body: TransformerBody, rank: int) -> MemoryUse:
    """The memory of a rank, in bytes."""
    return strategy_of_body(body).rank_memory(spec, body, rank)
