"""The weights that each device of a graph plan stores. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.stores import Stored, room_after
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan

# Of the ONNX model of a segment, for each of its operators: the node, its tensors' names, and weights that are too small to be
# chunks of their own. More than models from PyTorch need.
_BYTES_PER_OPERATOR = 1024


def stored_weights(spec: GraphSpec, plan: GraphPlan | None) -> Stored:
    """The bytes of what each device stores: its weights by name, and its operators by number. Nothing without a plan."""
    if plan is None:
        return {}
    by_device: dict[str, dict[Hashable, int]] = {}
    for rank, device in enumerate(plan.devices):
        operators = {each for segment in plan.body.segments_of(rank) for each in segment.operators}
        weights = {index for each in operators for index in spec.operators[each].parameters}
        by_device[device.device_id] = {
            **{spec.parameters[index].name: spec.parameters[index].num_bytes for index in weights},
            **dict.fromkeys(operators, _BYTES_PER_OPERATOR),
        }
    return by_device


def held_devices(request: GraphRequest) -> dict[int, int]:
    """By operator, the index in the cluster of the device that runs it in the deployed plan, if that is still there."""
    if request.held is None:
        return {}
    index = {device.device_id: index for index, device in enumerate(request.cluster.devices)}
    ranks = [index.get(device.device_id) for device in request.held.devices]
    found = {operator: ranks[rank] for operator, rank in request.held.body.ranks_of_operators().items()}
    return {operator: device for operator, device in found.items() if device is not None}


def with_stored(cluster: GraphCluster, stored: Stored) -> GraphCluster:
    """The cluster once a plan with these weights is deployed: its stores have room for less."""
    rooms = room_after(cluster.devices, stored)
    return replace(
        cluster, devices=tuple(replace(each, store_room_bytes=rooms[each.device_id]) for each in cluster.devices)
    )


def restricted(request: GraphRequest, budgets: Mapping[str, int | None]) -> GraphRequest:
    """The same request with these budgets in bytes, by device id; without the devices that have None."""
    left = request.cluster.subset([each for each in budgets if budgets[each] is not None])
    devices = tuple(replace(device, budget_bytes=budgets[device.device_id] or 0) for device in left.devices)
    return replace(request, cluster=replace(left, devices=devices))
