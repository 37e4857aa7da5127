"""Plans for strategies that split only rows: all weights on one device (`local`), or on every device (`sp`). Pure."""

from __future__ import annotations

from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, missing_bytes, with_ring_order
from coordinator.plan.transformer.shares import EQUAL_SPEED_RATIO, balanced_rows, body_from_grains, row_capacity
from hearth.errors import ModelDoesNotFit
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, largest_remainder, num_grains
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import ShareStrategy, TensorParallel


def plan_rows(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """The fastest way to split the rows, as simulated. Raises ModelDoesNotFit."""
    request = with_ring_order(request)
    bodies = [_body(request, strategy, rows) for rows in _row_splits(request)]
    missing = [missing_bytes(request, body) for body in bodies]
    if min(missing):
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=min(missing))
    fitting = (body for body, missing_of_body in zip(bodies, missing, strict=True) if not missing_of_body)
    return min((build_plan(request, body, "rows") for body in fitting), key=request_seconds)


def _body(request: PlanRequest, strategy: ShareStrategy, rows: tuple[float, ...]) -> TensorParallel:
    """The plan with these row weights. An encoder's vocabulary is split into equal parts.

    For decoding, every device uses a share of the weights and caches the keys and values of its heads; shares, including
    the vocabulary's, are proportional to the speed at which devices read memory.
    """
    spec, num_ranks = request.spec, len(request.cluster.devices)
    weight_shares, vocabulary_shares = [1.0, *[0.0] * (num_ranks - 1)], [1.0] * num_ranks
    if request.generation is not None:
        rates = [device.blocks.decode_seconds_per_byte for device in request.cluster.devices]
        weight_shares = vocabulary_shares = [1.0 / rate for rate in rates] if min(rates) > 0 else vocabulary_shares
    groups = largest_remainder(weight_shares, spec.num_kv_heads)
    columns = largest_remainder(weight_shares, num_grains(spec.ffn_size, COLUMN_GRAIN))
    vocabulary = largest_remainder(vocabulary_shares, num_grains(spec.vocab_size, VOCABULARY_GRAIN))
    body = body_from_grains(request, strategy, groups, columns, vocabulary, rows)
    return body.model_copy(update={"overlap": body.mode(0).attention == "heads"})


def _row_splits(request: PlanRequest) -> list[tuple[float, ...]]:
    """Row weights to try: equal parts, and by speed and by the steps of the kernels if the devices' speeds differ enough."""
    speeds = [row_capacity(request, device.blocks) for device in request.cluster.devices]
    equal = (1.0,) * len(speeds)
    if max(speeds) <= EQUAL_SPEED_RATIO * min(speeds):
        return [equal]
    return [equal, tuple(speed / sum(speeds) for speed in speeds), balanced_rows(request)]
