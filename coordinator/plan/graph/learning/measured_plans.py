"""Measured times of plans, from which the planner's policy learns: each relative to the first deployed plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from coordinator.plan.graph.learning.elites import devices_of_operators, placement_key
from hearth.plan.plan import GraphPlan

MAX_PLANS = 16  # the plans of two searches: those measured before say little of devices that change


class MeasuredPlan(BaseModel):
    """Where a plan runs each operator, and how long its requests take."""

    model_config = ConfigDict(frozen=True)

    key: str  # of the placement
    device_ids: tuple[str, ...]
    devices: tuple[Annotated[int, Field(ge=0)], ...]  # of each operator, an index of `device_ids`
    relative_seconds: float = Field(gt=0, allow_inf_nan=False)  # of a request


class MeasuredPlacement(NamedTuple):
    """The device of each operator of a placement problem, and how long requests take."""

    devices: tuple[int, ...]
    relative_seconds: float


def add_trials(
    known: Iterable[MeasuredPlan], incumbent: GraphPlan, trials: Iterable[tuple[GraphPlan, float]]
) -> tuple[MeasuredPlan, ...]:
    """The plans known with those tried against the deployed one; with each, the share of its seconds that it saved.

    If the deployed plan was not measured before, nothing relates the others to it, and all of them are dropped.
    """
    plans = {each.key: each for each in known}
    before = plans.pop(placement_key(incumbent), None)
    if before is None:
        plans, before = {}, _measured(incumbent, 1.0)
    plans[before.key] = before
    for plan, gain in trials:
        measured = _measured(plan, before.relative_seconds * (1 - gain))
        plans.pop(measured.key, None)
        plans[measured.key] = measured
    return tuple(plans.values())[-MAX_PLANS:]


def measured_placements(
    measured: Iterable[MeasuredPlan], device_ids: Sequence[str], groups: Iterable[Sequence[int]]
) -> list[MeasuredPlacement]:
    """The plans that use these devices only, as placements of groups of operators that they do not divide."""
    index, groups = {device_id: index for index, device_id in enumerate(device_ids)}, list(groups)
    found = []
    for each in measured:
        devices = [index.get(each.device_ids[device], -1) for device in each.devices]
        placed = [{devices[operator] for operator in group} for group in groups]
        if -1 not in devices and all(len(own) == 1 for own in placed):
            found.append(MeasuredPlacement(tuple(device for own in placed for device in own), each.relative_seconds))
    return found


def _measured(plan: GraphPlan, relative_seconds: float) -> MeasuredPlan:
    of_operators = devices_of_operators(plan)
    device_ids = tuple(device.device_id for device in plan.devices)
    devices = tuple(device_ids.index(of_operators[operator]) for operator in range(len(of_operators)))
    return MeasuredPlan(
        key=placement_key(plan), device_ids=device_ids, devices=devices, relative_seconds=relative_seconds
    )
