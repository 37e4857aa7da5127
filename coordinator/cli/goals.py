"""The goal that the options of `plan` and `serve` describe, for both kinds of model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from coordinator.models.graph_file import Kind, parse_dims
from coordinator.plan.graph.request import DEFAULT_SECONDS
from coordinator.plan.limits import parse_limit
from coordinator.plan.registry import REGISTRY
from coordinator.serve.state import Goal, GraphGoal, TransformerGoal
from hearth.errors import BadSetting
from hearth.plan.model_spec import WeightFormat
from hearth.plan.value_formats import VALUE_NAMES


def goal_of(kind: Kind, model: Path, options: Mapping[str, Any]) -> Goal:
    """`options` by parameter name, as `typer.Context.params` has them. Raises BadSetting."""
    if kind == "transformer":
        return transformer_goal(model, options)
    return graph_goal(model, options)


def transformer_goal(model: Path, options: Mapping[str, Any]) -> TransformerGoal:
    """Raises BadSetting."""
    REGISTRY["transformer"].check(options["strategy"], "latency")
    common = _common(options)
    _check_choice("--weights", options["weights"], get_args(WeightFormat))
    budget = options.get("accuracy_budget")
    if budget is not None:
        _check_budget(budget, options["wire"])
    same = ("strategy", "seq_len", "context", "sequences", "weights")
    return TransformerGoal(
        model_dir=str(model.resolve()),
        accuracy_budget=budget,
        **{name: options[name] for name in same},
        **common,
    )


def graph_goal(model: Path, options: Mapping[str, Any]) -> GraphGoal:
    """Raises BadSetting."""
    objective = options["objective"] or "latency"
    REGISTRY["graph"].check(options["strategy"], objective)
    return GraphGoal(
        model_file=str(model.resolve()),
        dims=parse_dims(options["dim"]),
        objective=objective,
        strategy=options["strategy"],
        congestion=not options["no_congestion"],
        time_limit_seconds=options["time_limit"] or DEFAULT_SECONDS,
        **_common(options),
    )


def _common(options: Mapping[str, Any]) -> dict[str, Any]:
    """What goals of every kind have."""
    _check_choice("--wire", options["wire"], VALUE_NAMES)
    _check_choice("--lz4", options["lz4"], ("auto", "on", "off"))
    return {
        "wire": {"values": options["wire"], "lz4": options["lz4"]},
        "exclude": tuple(options["exclude"]),
        "limits": tuple(parse_limit(each) for each in options["limit"]),
        "keep_plan": options.get("plan") is not None,
    }


def _check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise BadSetting(setting=option, reason=f"'{value}' is none of {', '.join(allowed)}")


def _check_budget(budget: float, wire: str) -> None:
    if not 0 < budget < math.inf:
        raise BadSetting(setting="--accuracy-budget", reason="a relative error is above 0, such as 0.01")
    if wire != "exact":
        raise BadSetting(setting="--accuracy-budget", reason="it chooses the format itself; leave --wire out")
