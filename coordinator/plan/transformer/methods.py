"""The strategies for transformers, and the planners of their shares, by name. Pure."""

from __future__ import annotations

from coordinator.plan.methods import Method, Methods
from coordinator.plan.transformer.strategies import STRATEGIES

TRANSFORMER_METHODS = Methods(
    (
        *(Method(each.name, "latency", each.summary) for each in STRATEGIES.values()),
        Method("galaxy", "latency", "hmp with the shares of Galaxy's Algorithm 1", in_auto=False),
        Method("exact", "latency", "hmp with the shares that are best for compute alone", in_auto=False),
    )
)
