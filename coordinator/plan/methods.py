"""Planners and strategies by name: what `--strategy` may name for one kind of model. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from hearth.errors import BadSetting
from hearth.plan.graph import Objective


class Method(NamedTuple):
    """`solve` takes a `PlanRequest` and gives a plan (Transformers); or takes a problem and `SearchOptions`, and gives a
    `Solution` (graphs). Raises ModelDoesNotFit, NoPlacement."""

    name: str
    objective: Objective
    summary: str  # one line for people
    solve: Callable[..., Any]
    in_auto: bool = True  # `auto` asks it
    rebalances: bool = False  # graphs: on live devices, cuts are moved for costs that its search does not see


class Methods(tuple[Method, ...]):
    """All of one kind of model, in the order in which `auto` asks them."""

    def names(self, objective: Objective | None = None) -> tuple[str, ...]:
        """The names that `--strategy` takes besides auto."""
        return tuple(dict.fromkeys(each.name for each in self if objective in (None, each.objective)))

    def asked(self, name: str, objective: Objective) -> list[Method]:
        """One method, or those that `auto` asks. Raises BadSetting."""
        self.check(name, objective)
        of_objective = (each for each in self if each.objective == objective)
        return [each for each in of_objective if each.name == name or (name == "auto" and each.in_auto)]

    def check(self, name: str, objective: str) -> None:
        """Raises BadSetting for a name that does not exist, or is not for this objective."""
        objectives = [each for each in get_args(Objective) if self.names(each)]
        if objective not in objectives:
            raise BadSetting(setting="--objective", reason=f"'{objective}' is none of {', '.join(objectives)}")
        allowed = self.names(objective)  # type: ignore[arg-type]  # checked
        if name not in ("auto", *self.names()):
            raise BadSetting(setting="--strategy", reason=f"'{name}' is none of auto, {', '.join(self.names())}")
        if name not in ("auto", *allowed):
            raise BadSetting(
                setting="--strategy", reason=f"{name} is not for {objective}; that takes auto, {', '.join(allowed)}"
            )
