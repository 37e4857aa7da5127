"""Replicate weight groups of layers, and the word embeddings, on all devices: use spare memory to reduce traffic.

Layers are alike, so a group is replicated in as many layers as memory allows. The search is greedy: it takes the move with
the best simulated gain per byte first, until no move helps; a move may also shard QKV again. A replicated group computes
on the rank's own rows, so rows may then be split by speed. Word embeddings are replicated whole, with what memory is left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, missing_bytes, on_subset
from coordinator.plan.transformer.shares import EQUAL_SPEED_RATIO, balanced_rows, least_row_weight, row_capacity
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import SEQUENCE, LayerMode, TensorParallel, TransformerBody

_MAX_TIME_RATIO = 0.995  # a move must reduce the time to this fraction; otherwise the plan with less memory is kept
# Of replicated word embeddings. They take more memory for less than the groups of layers; a decoder's could hold KV caches.
_MAX_EMBEDDING_TIME_RATIO = 0.99
_MOVES: tuple[dict[str, str], ...] = (
    {"mlp": "replicated"},
    {"qkv": "replicated", "out": "replicated"},
    {"qkv": "replicated", "out": "replicated", "mlp": "replicated"},
    {"out": "replicated"},
    {"qkv": "replicated"},
    {"qkv": "replicated", "out": "replicated", "attention": "rows"},
    SEQUENCE.model_dump(),
    # Takes QKV back after a move that replicated several groups. The others are not taken back: that sends more, and changes
    # the predicted time by less than 1 % in Galaxy A.
    {"qkv": "sharded", "attention": "heads"},
)


def replicate_embedding(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan with the word embeddings on every device; `plan` itself if they do not fit, or save no time."""
    if plan.num_ranks == 1 or not isinstance(plan.body, TensorParallel):
        return plan
    own = on_subset(request, tuple(device.device_id for device in plan.devices))
    body = plan.body.model_copy(update={"embedding": "replicated"})
    if missing_bytes(own, body):
        return plan
    better = build_plan(own, body, plan.planner, plan.alternatives)
    return better if request_seconds(better) < _MAX_EMBEDDING_TIME_RATIO * request_seconds(plan) else plan


def balance_rows(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan with rows that follow the steps of the kernels' times; `plan` itself if they do not fit, or save no time."""
    body = plan.body.model_copy(update={"row_weights": balanced_rows(request)})
    if missing_bytes(request, body):
        return plan
    better = build_plan(request, body, plan.planner)
    return better if request_seconds(better) < _MAX_TIME_RATIO * request_seconds(plan) else plan


def replicate(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan with the fastest replication found by the greedy search; `plan` itself if none helps or fits.

    Rows are balanced afterwards. Word embeddings, which `plan` may replicate, come last: the groups of layers may need their
    memory.
    """
    best = plan
    if plan.body.embedding == "replicated":
        best = build_plan(request, plan.body.model_copy(update={"embedding": "sharded"}), plan.planner)
    while request.may_replicate:
        candidates = [
            build_plan(request, body, f"{plan.planner}, replicating") for body in _moved_bodies(request, best.body)
        ]
        faster = [c for c in candidates if request_seconds(c) < _MAX_TIME_RATIO * request_seconds(best)]
        if not faster:
            break
        now, held = request_seconds(best), _weight_bytes(best)
        best = max(faster, key=lambda c: (now - request_seconds(c)) / max(_weight_bytes(c) - held, 1))
        # Take the fastest candidate if it fits in all layers: gain per byte matters only where memory is short.
        quickest = min(faster, key=request_seconds)
        if len(set(quickest.body.modes)) == 1:
            best = quickest
    best = replicate_embedding(request, balance_rows(request, best))
    return best if request_seconds(best) < request_seconds(plan) else plan


def estimate_replicated_seconds(request: PlanRequest, plan: TransformerPlan) -> float:
    """Estimate of the result of `replicate` with a single simulation: replicate all groups of as many layers as fit."""
    if not request.may_replicate:
        return request_seconds(plan)
    modes = [plan.body.mode(layer) for layer in range(request.spec.num_layers)]
    whole = [LayerMode(qkv="replicated", out="replicated", mlp="replicated")] * len(modes)
    count = _max_layers(request, plan.body, modes, whole)
    body = plan.body.model_copy(update={"modes": (*whole[:count], *modes[count:])})
    return min(request_seconds(plan), request_seconds(build_plan(request, body, plan.planner)))


def _moved_bodies(request: PlanRequest, body: TransformerBody) -> Iterator[TransformerBody]:
    """Every plan with one more move of `_MOVES` in as many layers as fit, for each split of the rows."""
    num_layers = request.spec.num_layers
    modes = [body.mode(layer) for layer in range(num_layers)]
    for rows in _row_weights(request, body):
        split = body.model_copy(update={"row_weights": rows})
        for move in _MOVES:
            if move.get("attention") == "rows" and not request.attention_by_rows:
                continue
            moved = [LayerMode.model_validate({**mode.model_dump(), **move}) for mode in modes]
            if moved == modes:
                continue
            count = _max_layers(request, split, modes, moved)
            if count:
                yield split.model_copy(update={"modes": (*moved[:count], *modes[count:])})


def _row_weights(request: PlanRequest, body: TransformerBody) -> list[tuple[float, ...]]:
    speeds = [row_capacity(request, device.blocks) for device in request.cluster.devices]
    by_speed = tuple(max(round(speed / sum(speeds), 4), least_row_weight(request)) for speed in speeds)
    if max(speeds) <= EQUAL_SPEED_RATIO * min(speeds):
        return [body.row_weights]
    mean_weights = tuple(round((speed + 1 / len(speeds)) / 2, 4) for speed in by_speed)
    return list(dict.fromkeys([body.row_weights, by_speed, mean_weights]))


def _max_layers(
    request: PlanRequest, body: TransformerBody, modes: Sequence[LayerMode], moved: Sequence[LayerMode]
) -> int:
    """The number of layers, from the first on, in which the move fits on every device. Memory grows with it: bisect."""

    def fits(count: int) -> bool:
        candidate = body.model_copy(update={"modes": (*moved[:count], *modes[count:])})
        return not missing_bytes(request, candidate)

    num_layers = len(modes)
    if fits(num_layers):
        return num_layers
    return bisect_left(range(1, num_layers), True, key=lambda count: not fits(count))


def _weight_bytes(plan: TransformerPlan) -> int:
    return sum(device.memory.weights for device in plan.devices)
