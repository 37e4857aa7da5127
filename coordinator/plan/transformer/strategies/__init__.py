"""The strategies by name: the ways to divide a transformer among devices, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.plan.transformer.strategies.base import TransformerStrategy
from coordinator.plan.transformer.strategies.hybrid import HMP, LOCAL, MEGATRON, SP
from coordinator.plan.transformer.strategies.pipeline import PIPELINE
from hearth.plan.common import MemoryUse
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import DRAFT_RANK, draft_body
from hearth.plan.transformer import GenerationLimits, TransformerBody

# In the order in which planners try them; among equal plans, the first is taken.
STRATEGIES: Mapping[str, TransformerStrategy[Any]] = {each.name: each for each in (LOCAL, HMP, SP, MEGATRON, PIPELINE)}


def strategy_of_body(body: TransformerBody) -> TransformerStrategy[Any]:
    """The strategy that made a plan's body."""
    return STRATEGIES[body.strategy]


def rank_memory(spec: ModelSpec, body: TransformerBody, rank: int) -> MemoryUse:
    """The memory of a rank, in bytes."""
    use: MemoryUse = strategy_of_body(body).rank_memory(spec, body, rank)
    if rank == DRAFT_RANK and body.generation is not None and body.generation.draft is not None:
        return use.model_copy(update={"draft": draft_bytes(body.generation.draft, body.generation)})
    return use


def draft_bytes(draft: ModelSpec, limits: GenerationLimits) -> int:
    """The memory of a draft model, in bytes; the worker process that runs it has its workspace already."""
    alone = LOCAL.rank_memory(draft, draft_body(draft, limits), 0)
    return alone.total - alone.workspace
