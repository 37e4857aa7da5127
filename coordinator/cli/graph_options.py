"""Options of `plan` and `serve` that are for graphs of operators, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from coordinator.models.graph_file import parse_dims
from coordinator.plan.graph.request import DEFAULT_SECONDS, LATENCY, THROUGHPUT, check_strategy
from coordinator.plan.limits import parse_limit
from coordinator.serve.state import GraphGoal
from hearth.errors import BadSetting
from hearth.plan.value_formats import VALUE_NAMES

ObjectiveOption = Annotated[
    Optional[str],  # noqa: UP045 (typer reads the annotation on Python 3.10)
    typer.Option(
        "--objective",
        help=f"Of a graph: latency of one request (default; strategies {', '.join(LATENCY)}) or throughput of many "
        f"({', '.join(THROUGHPUT)}).",
        metavar="WHAT",
    ),
]
Dims = Annotated[
    list[str],
    typer.Option(
        "--dim", help="Of a graph: a dynamic dimension's size, as in batch=1; may be repeated.", metavar="NAME=N"
    ),
]
TimeLimit = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        help=f"Of a graph: seconds that a search for the best plan may take (default {DEFAULT_SECONDS:g}).",
        min=0.1,
        max=86400,
        metavar="SECONDS",
    ),
]
NoCongestion = Annotated[
    bool,
    typer.Option("--no-congestion", help="Of a graph: plan as if transfers of one device did not share its link."),
]


def graph_goal_of(
    model: Path,
    strategy: str,
    objective: str | None,
    dims: Sequence[str],
    time_limit: float | None,
    no_congestion: bool,
    wire: str,
    lz4: str,
    exclude: Sequence[str],
    limit: Sequence[str],
) -> GraphGoal:
    """The user's wishes, checked. Raises BadSetting."""
    check_strategy(strategy, objective or "latency")
    for option, value, allowed in (
        ("--wire", wire, VALUE_NAMES),
        ("--lz4", lz4, ("auto", "on", "off")),
    ):
        if value not in allowed:
            raise BadSetting(setting=option, reason=f"'{value}' is none of {', '.join(allowed)}")
    return GraphGoal.model_validate(
        {
            "kind": "graph",
            "model_file": str(model.resolve()),
            "dims": parse_dims(dims),
            "objective": objective or "latency",
            "strategy": strategy,
            "congestion": not no_congestion,
            "time_limit_seconds": time_limit or DEFAULT_SECONDS,
            "wire": {"values": wire, "lz4": lz4},
            "exclude": tuple(exclude),
            "limits": tuple(parse_limit(each) for each in limit),
        }
    )


def refuse(given: Mapping[str, object], reason: str) -> None:
    """Raise BadSetting for the first option that was given though it does not go with this model."""
    for option, value in given.items():
        if value:
            raise BadSetting(setting=option, reason=reason)
