"""The chunks that each device of a transformer plan stores. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.models.checkpoint.chunk_layout import chunk_keys_for_rank, num_chunk_bytes
from coordinator.plan.stores import Stored, room_after
from coordinator.plan.transformer.request import PlanRequest, on_subset
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile


def stored_chunks(plan: TransformerPlan | None) -> Stored:
    """The bytes of the chunks that each device stores, by `(kind, layer, grain)`; nothing without a plan."""
    if plan is None:
        return {}
    return {
        device.device_id: {
            (kind, layer, grain): num_chunk_bytes(plan.model, kind, grain)
            for kind, layer, grain in chunk_keys_for_rank(plan, rank)
        }
        for rank, device in enumerate(plan.devices)
    }


def with_stored(cluster: ClusterProfile, stored: Stored) -> ClusterProfile:
    """The cluster once a plan with these chunks is deployed: its stores have room for less."""
    rooms = room_after(cluster.devices, stored)
    devices = (device.model_copy(update={"store_room_bytes": rooms[device.device_id]}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})


def restricted(request: PlanRequest, budgets: Mapping[str, int | None]) -> PlanRequest:
    """The same request with these budgets in bytes, by device id; without the devices that have None."""
    devices = tuple(
        device.model_copy(update={"budget_bytes": budget})
        for device in request.cluster.devices
        if (budget := budgets[device.device_id]) is not None
    )
    request = on_subset(request, tuple(device.device_id for device in devices))
    return replace(request, cluster=request.cluster.model_copy(update={"devices": devices}))
