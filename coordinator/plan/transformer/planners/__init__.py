"""Searches for the shares of each device: one file each, by the name in `TransformerStrategy.search`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.plan.transformer.planners.best_shares import plan_shares
from coordinator.plan.transformer.planners.pipeline import plan_stages
from coordinator.plan.transformer.planners.rows import plan_rows
from coordinator.plan.transformer.request import PlanRequest, on_subset
from coordinator.plan.transformer.shares import devices_by_capacity
from coordinator.plan.transformer.strategies.base import TransformerStrategy
from hearth.plan.plan import TransformerPlan

_SHARE_PLANNERS: Mapping[str, Callable[[PlanRequest, Any], TransformerPlan]] = {
    "rows": plan_rows,
    "shares": plan_shares,
}


def plan_on_all(request: PlanRequest, strategy: TransformerStrategy[Any]) -> TransformerPlan:
    """The plan over all devices of the request; a pipeline uses at most one device per layer.

    Raises ModelDoesNotFit with the number of missing bytes.
    """
    if strategy.search == "stages":
        return plan_stages(request, min(len(request.cluster.devices), request.spec.num_layers))
    return _SHARE_PLANNERS[strategy.search](request, strategy.name)


def plan_on_some(request: PlanRequest, strategy: TransformerStrategy[Any], num_devices: int) -> TransformerPlan:
    """The plan over `num_devices` devices: the fastest ones, or for a pipeline those that its search chooses.

    Raises ModelDoesNotFit.
    """
    if strategy.search == "stages":
        return plan_stages(request, num_devices)
    fastest = {device.device_id for device in devices_by_capacity(request)[:num_devices]}
    ids = tuple(each.device_id for each in request.cluster.devices if each.device_id in fastest)
    return plan_on_all(on_subset(request, ids), strategy)
