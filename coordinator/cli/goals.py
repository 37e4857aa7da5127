"""Turns the options of `plan` and `serve` into a goal, for both kinds of model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from coordinator.cli.model_options import ServeOptions
from coordinator.models.graph_file import ModelFileKind, parse_dims
from coordinator.plan.graph.request import DEFAULT_TIME_LIMIT_SECONDS
from coordinator.plan.limits import parse_limit
from coordinator.plan.methods import REGISTRY
from coordinator.serve.state import DEFAULT_MAX_DRAFTED, MAX_TILES, Goal, GraphGoal, TransformerGoal
from hearth.errors import BadSetting
from hearth.plan.common import VALUE_FORMAT_NAMES
from hearth.plan.model_spec import KvFormat, WeightFormat
from hearth.platform.units import parse_seconds
from hearth.wire.messages import MAX_DRAFTED_TOKENS

_T = TypeVar("_T")

_CHOICES: Mapping[str, Sequence[str]] = {
    "wire": VALUE_FORMAT_NAMES,
    "lz4": ("auto", "on", "off"),
    "weights": get_args(WeightFormat),
    "kv_cache": get_args(KvFormat),
}

_TRANSFORMER_FIELDS = ("seq_len", "context", "sequences", "weights", "deterministic", "kv_cache")


def goal_from_options(kind: ModelFileKind, model: Path, options: ServeOptions) -> Goal:
    """The goal for MODEL. Raises BadSetting."""
    objective: Any = options.objective or "latency"
    REGISTRY["transformer" if kind == "transformer" else "graph"].check(options.strategy, objective)
    for name, allowed in _CHOICES.items():
        given = getattr(options, name)
        if given is not None and given not in allowed:
            raise BadSetting(setting=f"--{name.replace('_', '-')}", reason=f"'{given}' is none of {', '.join(allowed)}")
    common: dict[str, Any] = {
        "strategy": options.strategy,
        "wire": {"values": options.wire, "lz4": options.lz4},
        "exclude": tuple(options.exclude),
        "limits": tuple(parse_limit(each) for each in options.limit),
        "keep_plan": options.plan is not None,
        "pinned": options.pin,
        "keep_alive_seconds": _keep_alive_seconds(options),
    }
    if kind == "transformer":
        return TransformerGoal(
            model_dir=str(model.resolve()),
            accuracy_budget=_accuracy_budget(options),
            kv_copies=not options.no_kv_copies,
            shared_prefixes=options.shared_prefixes,
            special_contents=options.special_contents,
            max_drafted=_count("--speculate", options.speculate, MAX_DRAFTED_TOKENS, DEFAULT_MAX_DRAFTED, 0),
            draft_dir=str(options.draft.resolve()) if options.draft is not None else None,
            **{name: getattr(options, name) for name in _TRANSFORMER_FIELDS},
            **common,
        )
    return GraphGoal(
        model_file=str(model.resolve()),
        dims=parse_dims(options.dim),
        objective=objective,
        congestion=not options.no_congestion,
        tiles=_count("--tiles", options.tiles, MAX_TILES, "auto", 1),
        time_limit_seconds=options.time_limit or DEFAULT_TIME_LIMIT_SECONDS,
        learn=not options.no_learn,
        **common,
    )


def _count(option: str, text: str, most: int, auto: _T, off: int) -> _T | int:
    """The number that `text` means: `auto`, `off` or 1 to `most`. Raises BadSetting."""
    if text in ("auto", "off"):
        return auto if text == "auto" else off
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise BadSetting(setting=option, reason=f"'{text}' is not auto, off, or a number from 1 to {most}")
    return int(text)


def _seconds(option: str, text: str) -> float:
    """The time that `text` means. Raises BadSetting."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise BadSetting(setting=option, reason=str(error)) from None


def learn_seconds(text: str | None, strategy: str) -> float:
    """The seconds of `hearth plan --learn`; 0 without it. Raises BadSetting."""
    if text is None:
        return 0.0
    if strategy != "doppler":
        raise BadSetting(setting="--learn", reason="only the policy of --strategy doppler learns")
    seconds = _seconds("--learn", text)
    if not 0 < seconds <= 86400:
        raise BadSetting(setting="--learn", reason="it must be more than 0 and at most 24h")
    return seconds


def _keep_alive_seconds(options: ServeOptions) -> float | None:
    """The seconds of --keep-alive, if it was given. Raises BadSetting."""
    if options.keep_alive is None:
        return None
    if options.pin:
        raise BadSetting(setting="--keep-alive", reason="a pinned model stays loaded; omit --pin or --keep-alive")
    return _seconds("--keep-alive", options.keep_alive)


def _accuracy_budget(options: ServeOptions) -> float | None:
    """The validated accuracy budget, if one was given. Raises BadSetting."""
    budget = options.accuracy_budget
    if budget is None:
        return None
    if not 0 < budget < math.inf:
        raise BadSetting(setting="--accuracy-budget", reason="it must be a relative error above 0, such as 0.01")
    if options.wire != "exact":
        raise BadSetting(setting="--accuracy-budget", reason="it chooses the format itself; omit --wire")
    return budget
