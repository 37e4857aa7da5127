"""Every planner and strategy by name, for both kinds of model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from coordinator.plan.graph.methods import GRAPH_METHODS
from coordinator.plan.methods import Methods
from coordinator.plan.transformer.methods import TRANSFORMER_METHODS

Kind = Literal["transformer", "graph"]

REGISTRY: Mapping[Kind, Methods] = {"transformer": TRANSFORMER_METHODS, "graph": GRAPH_METHODS}
