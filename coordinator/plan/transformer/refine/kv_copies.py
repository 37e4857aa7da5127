"""Copies of KV caches on the next device, with which answers continue after a loss without computing them again. Pure."""

from __future__ import annotations

from coordinator.plan.transformer.request import PlanRequest
from coordinator.plan.transformer.strategies import rank_memory
from hearth.plan.plan import TransformerPlan


def add_kv_copies(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The same plan with copies of the KV caches, if the user does not refuse them and every device has room.

    A plan with attention by rows is returned as it is: it prefills whole prompts only, and could not use them.
    """
    body, limits = plan.body, plan.body.generation
    if limits is None or request.generation is None or not request.generation.kv_copies or plan.num_ranks == 1:
        return plan
    if any(body.mode(layer).attention == "rows" for layer in range(plan.model.num_layers)):
        return plan
    copying = body.model_copy(update={"generation": limits.model_copy(update={"kv_copies": True})})
    devices = tuple(
        device.model_copy(update={"memory": rank_memory(plan.model, copying, rank)})
        for rank, device in enumerate(plan.devices)
    )
    if any(device.memory.total > device.budget_bytes for device in devices):
        return plan
    return plan.model_copy(update={"body": copying, "devices": devices})
