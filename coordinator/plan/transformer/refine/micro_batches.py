"""Split a decoder's prefill into two concurrent micro-batches, if overlap gains more than smaller GEMMs cost."""

from __future__ import annotations

from dataclasses import replace

from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, on_subset
from hearth.plan.plan import TransformerPlan

# Required time as a fraction of that without micro-batches: thread switches have a cost that the simulator does not include.
_MAX_TIME_RATIO = 0.98


def split_into_micro_batches(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The same plan with two micro-batches in flight, if the simulator finds that faster; otherwise `plan` itself."""
    body = plan.body
    if request.generation is None or plan.num_ranks == 1 or not body.can_split_prefill:
        return plan
    subset = on_subset(request, tuple(device.device_id for device in plan.devices))
    cut = body.model_copy(update={"micro_batches": 2})
    better = build_plan(replace(subset, wire=plan.wire), cut, plan.planner, plan.alternatives)
    return better if request_seconds(better) < _MAX_TIME_RATIO * request_seconds(plan) else plan
