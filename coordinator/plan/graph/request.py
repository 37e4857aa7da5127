"""The request to a planner of graphs, and the weights that its devices hold. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.stores import Stored, room_after
from hearth.plan.common import WireFormat
from hearth.plan.graph import CutOperator, Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan

DEFAULT_TIME_LIMIT_SECONDS = 30.0  # of a search: as long as a user will wait for a plan that is used for days
POLICIES_FOLDER = "policies"  # of the coordinator's state: policies learnt for a graph and devices
# Of the ONNX model of a segment, for each of its operators: the node, its tensors' names, and weights that are too small to be
# chunks of their own. More than models from PyTorch need.
_BYTES_PER_OPERATOR = 1024


@dataclass(frozen=True)
class GraphRequest:
    """A graph, the devices it may use, and what the user fixed."""

    spec: GraphSpec
    cluster: GraphCluster
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS
    wire: WireFormat = field(default_factory=WireFormat)
    model_hash: str = ""
    tiles: tuple[CutOperator, ...] = ()  # that `spec` has; the plan says so, so that they can be made again
    learn_seconds: float = 0.0  # for the policy of `doppler`, before the search: it learns on this graph and devices
    policies_dir: str = ""  # of policies that have learnt; empty: they are not kept
    held: GraphPlan | None = None  # the deployed plan, whose weights its devices need not get again
    recovering: bool = False  # requests wait for the plan, since the deployed one has lost a device


def objective_seconds(plan: GraphPlan) -> float:
    """The seconds by which plans are compared: the latency of one request, or the bottleneck of a full pipeline."""
    predicted = plan.predicted
    return predicted.latency_seconds if plan.body.objective == "latency" else predicted.bottleneck_seconds


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
