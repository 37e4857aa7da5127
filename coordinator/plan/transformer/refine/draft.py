"""Where a draft model runs: on the plan's fastest device that has room for it, which becomes the first rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from coordinator.plan.solution import PlanningResult
from coordinator.plan.transformer.cost.decode import token_head_seconds, token_layer_seconds
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.refine.keep_in_place import reordered
from coordinator.plan.transformer.request import PlanRequest, build_plan, missing_bytes, on_subset
from coordinator.plan.transformer.stored import restricted
from coordinator.plan.transformer.strategies import draft_bytes
from hearth.errors import HearthError
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import DRAFT_RANK, TransformerPlan
from hearth.plan.profile import DeviceProfile

_TOLERANCE = 1.02  # a plan that is predicted to be this much slower still counts as equally fast: the error is larger
_MAX_TRIALS = 3  # devices on which room is made for the draft model: each costs a search

Planned = PlanningResult[TransformerPlan]


def add_draft(request: PlanRequest, planned: Planned, plan_again: Callable[[PlanRequest], Planned]) -> Planned:
    """The plan with the draft model on a device; unchanged if none has room.

    If the devices of the plan are full, room is made: the fastest device gets less of the model.
    """
    assert request.generation is not None
    draft = request.generation.draft
    assert draft is not None
    if (found := _with_draft(request, planned.plan, draft)) is not None:
        return _replaced(planned, found)
    devices = sorted(request.cluster.devices, key=lambda device: guess_seconds(request, draft, device))
    num_bytes = draft_bytes(draft, request.generation.limits(request.seq_len))
    budgets: dict[str, int | None] = {device.device_id: device.budget_bytes for device in devices}
    for device in devices[:_MAX_TRIALS]:
        if device.budget_bytes <= num_bytes:
            continue
        try:
            tighter = plan_again(restricted(request, {**budgets, device.device_id: device.budget_bytes - num_bytes}))
        except HearthError:
            continue
        if (found := _with_draft(request, tighter.plan, draft)) is not None:
            return _replaced(tighter, found)
    return planned


def guess_seconds(request: PlanRequest, draft: ModelSpec, device: DeviceProfile) -> float:
    """Predicted seconds of one token of the draft model."""
    layer = token_layer_seconds(draft, device.blocks, request.num_cached_tokens)
    return draft.num_layers * layer + token_head_seconds(draft, device.blocks)


def _replaced(planned: Planned, plan: TransformerPlan) -> Planned:
    return replace(planned, chosen=replace(planned.chosen, plan=plan, seconds=request_seconds(plan)))


def _with_draft(request: PlanRequest, plan: TransformerPlan, draft: ModelSpec) -> TransformerPlan | None:
    """The plan with its ranks turned so that the fastest device with room comes first; None if no device has room.

    A plan that follows another one keeps its ranks if the first has room: their weights are in place.
    """
    limits = plan.body.generation
    if limits is None:
        return None
    with_draft = {"generation": limits.model_copy(update={"draft": draft})}
    profiles = {device.device_id: device for device in request.cluster.devices}

    def moves_and_seconds(order: tuple[int, ...]) -> tuple[bool, float]:
        moves = request.held is not None and order[DRAFT_RANK] != DRAFT_RANK
        return moves, guess_seconds(request, draft, profiles[plan.devices[order[DRAFT_RANK]].device_id])

    for order in sorted(_turns(plan), key=moves_and_seconds):
        ordered = on_subset(request, tuple(plan.devices[rank].device_id for rank in order))
        body = reordered(plan.model, plan.body, order).model_copy(update=with_draft)
        if missing_bytes(ordered, body):
            continue
        found = build_plan(ordered, body, plan.planner, plan.alternatives)
        if request_seconds(found) <= _TOLERANCE * request_seconds(plan):
            return found
    return None


def _turns(plan: TransformerPlan) -> Iterator[tuple[int, ...]]:
    """The orders in which each device comes first, and the neighbours of the ring stay; only the plan's with exact links."""
    num_turns = 1 if plan.body.exact_links else plan.num_ranks
    for first in range(num_turns):
        yield tuple((first + rank) % plan.num_ranks for rank in range(plan.num_ranks))
