"""Planners and strategies by name: the values of `--strategy` for one kind of model. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

from hearth.errors import BadSetting
from hearth.plan.graph import Objective


class Method(NamedTuple):
    """One planner or strategy."""

    name: str
    objective: Objective
    summary: str  # one line for users
    in_auto: bool = True  # `auto` tries it
    rebalances: bool = False  # graphs: on live devices, cuts are moved afterwards for costs outside its search
    # Of the time limit, the most that `auto` gives it; nothing if a method before it has proven its plan to be optimal.
    auto_seconds: float = math.inf
    recovers: bool = False  # `auto` asks it first, and others only if it finds no plan, when requests wait for the plan


class Methods(tuple[Method, ...]):
    """All methods for one kind of model, in the order in which `auto` tries them."""

    def names(self, objective: str | None = None) -> tuple[str, ...]:
        """The values of `--strategy` besides auto; with an objective, only those for it."""
        return tuple(dict.fromkeys(each.name for each in self if objective in (None, each.objective)))

    def select(self, name: str, objective: Objective) -> list[Method]:
        """The method of this name, or all methods that `auto` tries. Raises BadSetting."""
        self.check(name, objective)
        of_objective = (each for each in self if each.objective == objective)
        return [each for each in of_objective if each.name == name or (name == "auto" and each.in_auto)]

    def check(self, name: str, objective: str) -> None:
        """Raise BadSetting if the name does not exist or is not for this objective."""
        objectives = [each for each in get_args(Objective) if self.names(each)]
        if objective not in objectives:
            raise BadSetting(setting="--objective", reason=f"'{objective}' is none of {', '.join(objectives)}")
        allowed, known = self.names(objective), self.names()
        if name not in ("auto", *known):
            raise BadSetting(setting="--strategy", reason=f"'{name}' is none of auto, {', '.join(known)}")
        if name not in ("auto", *allowed):
            reason = f"{name} is not for {objective}; that takes auto, {', '.join(allowed)}"
            raise BadSetting(setting="--strategy", reason=reason)
