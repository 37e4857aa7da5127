"""Every planner and strategy by name, for both kinds of model: the values of `--strategy`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

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


Kind = Literal["transformer", "graph"]

LOCAL = "local"  # the whole model on one device

TRANSFORMER_METHODS = Methods(
    (
        Method(LOCAL, "latency", "the whole model on one device"),
        Method(
            "hmp", "latency", "hybrid model parallelism (Galaxy): heads and columns shared inside a layer, rows between"
        ),
        Method("sp", "latency", "sequence parallelism: all weights on every device, rows shared"),
        Method(
            "megatron-tp", "latency", "tensor parallelism (Megatron): heads and columns shared, every row everywhere"
        ),
        Method("pipeline", "latency", "whole layers on each device, one device after the other"),
        Method("galaxy", "latency", "hmp with the shares of Galaxy's Algorithm 1", in_auto=False),
        Method("exact", "latency", "hmp with the shares that are best for compute alone", in_auto=False),
    )
)

GRAPH_METHODS = Methods(
    (
        Method("moirai", "latency", "integer programming with contention (Moirai), with a bound"),
        Method("heft", "latency", "heterogeneous earliest finish time"),
        Method(
            "critical-path", "latency", "the ready operator with the longest path to the end, where it starts first"
        ),
        Method("enumerative", "latency", "tiles of an operator spread evenly, close to their inputs", in_auto=False),
        Method(
            "doppler",
            "latency",
            "list schedules improved by annealing and integer programming; a policy only after --learn",
            auto_seconds=5.0,
            recovers=True,
        ),
        Method(LOCAL, "latency", "the whole graph on one device"),
        Method("pipeline-exact", "throughput", "the lowest bottleneck, proven where time allows", rebalances=True),
        Method("pipeline", "throughput", "partitions first, then paths of devices for them, as published"),
        Method(LOCAL, "throughput", "the whole graph on one device"),
    )
)

REGISTRY: Mapping[Kind, Methods] = {"transformer": TRANSFORMER_METHODS, "graph": GRAPH_METHODS}
