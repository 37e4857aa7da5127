"""What every planner takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from coordinator.costs import predict
from coordinator.memory import memory_use
from hearth.model.spec import ModelSpec
from hearth.plan import Alternative, Plan, PlannedDevice, Strategy, TransformerPlan, WireFormat
from hearth.profile import ClusterProfile


@dataclass(frozen=True)
class PlanRequest:
    """A model, the devices it may use (in ring order), and what the user fixed.

    `spare_accuracy`: the wire format was chosen for the user, and is to be kept to the links where it saves time.
    """

    spec: ModelSpec
    cluster: ClusterProfile
    seq_len: int
    wire: WireFormat = field(default_factory=WireFormat)
    strategy: Strategy | Literal["auto"] = "auto"
    spare_accuracy: bool = False


class Planner(Protocol):
    """Finds a plan. Raises ModelDoesNotFit that says how many bytes are missing."""

    name: str

    def plan(self, request: PlanRequest) -> Plan: ...


def on_subset(request: PlanRequest, device_ids: tuple[str, ...]) -> PlanRequest:
    """The same request for some of the devices."""
    return replace(request, cluster=request.cluster.subset(device_ids))


def price(
    request: PlanRequest,
    cluster: ClusterProfile,
    body: TransformerPlan,
    planner: str,
    alternatives: Sequence[Alternative] = (),
) -> Plan:
    """A finished plan: memory of every rank, and the simulator's prediction."""
    predicted, busy = predict(request.spec, body, cluster, request.seq_len, request.wire)
    devices = tuple(
        PlannedDevice(
            device_id=device.device_id,
            name=device.name,
            memory=memory_use(request.spec, body, rank, request.seq_len),
            budget_bytes=device.budget_bytes,
            compute_seconds=busy[rank],
        )
        for rank, device in enumerate(cluster.devices)
    )
    return Plan(
        model=request.spec,
        planner=planner,
        seq_len=request.seq_len,
        devices=devices,
        body=body,
        wire=request.wire,
        predicted=predicted,
        alternatives=tuple(alternatives),
    )


def missing_bytes(request: PlanRequest, cluster: ClusterProfile, body: TransformerPlan) -> int:
    """How many bytes all devices together lack for this plan; 0 when it fits."""
    return sum(
        max(memory_use(request.spec, body, rank, request.seq_len).total - device.budget_bytes, 0)
        for rank, device in enumerate(cluster.devices)
    )
