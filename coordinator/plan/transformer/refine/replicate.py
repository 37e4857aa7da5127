"""Which weight groups of which layers every device holds whole: spare memory buys less traffic (ALGORITHMS.md section 5).

Layers are alike, so a group is replicated in as many layers as memory allows. Greedy, the best gain per byte under the
simulator first, until nothing helps. Where computing follows rows (replicated groups), rows follow speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.request import PlanRequest, over_budget, price
from coordinator.plan.transformer.shares import row_capacity
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import SEQUENCE, LayerMode, TransformerBody

_WORTH = 0.995  # a replicated group must save at least this much: equal plans keep to the smaller memory
_MOVES: tuple[dict[str, str], ...] = (
    {"mlp": "replicated"},
    {"qkv": "replicated", "out": "replicated"},
    {"qkv": "replicated", "out": "replicated", "mlp": "replicated"},
    {"out": "replicated"},
    {"qkv": "replicated"},
    {"qkv": "replicated", "out": "replicated", "attention": "rows"},
    SEQUENCE.model_dump(),
)


def replicate(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan with the replication that the simulator finds fastest; the same plan where none helps or fits."""
    best = plan
    while request.may_replicate:
        candidates = [price(request, body, f"{plan.planner}, replicating") for body in _next(request, best.body)]
        faster = [c for c in candidates if seconds_of(c) < _WORTH * seconds_of(best)]
        if not faster:
            return best
        now, held = seconds_of(best), _weights(best)
        best = max(faster, key=lambda c: (now - seconds_of(c)) / max(_weights(c) - held, 1))
        # What is fastest outright is taken where it fits as well: gain per byte matters only between those that do not.
        quickest = min(faster, key=seconds_of)
        if len(set(quickest.body.modes)) == 1:
            best = quickest
    return best


def rough_seconds(request: PlanRequest, plan: TransformerPlan) -> float:
    """About what `replicate` makes of the plan, for one simulation: with all groups of as many layers as fit, or none."""
    if not request.may_replicate:
        return seconds_of(plan)
    modes = [plan.body.mode(layer) for layer in range(request.spec.num_layers)]
    whole = [LayerMode(qkv="replicated", out="replicated", mlp="replicated")] * len(modes)
    count = _most_layers(request, plan.body, modes, whole)
    body = plan.body.model_copy(update={"modes": (*whole[:count], *modes[count:])})
    return min(seconds_of(plan), seconds_of(price(request, body, plan.planner)))


def _next(request: PlanRequest, body: TransformerBody) -> Iterator[TransformerBody]:
    """Every plan with one more kind of group replicated, in as many layers as fit, for each way of splitting the rows."""
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
            count = _most_layers(request, split, modes, moved)
            if count:
                yield split.model_copy(update={"modes": (*moved[:count], *modes[count:])})


def _row_weights(request: PlanRequest, body: TransformerBody) -> list[tuple[float, ...]]:
    speeds = [row_capacity(request, device.blocks) for device in request.cluster.devices]
    # Who has no rows holds no replicated weights, and could not decode with its heads.
    least = 1e-4 if request.spec.causal else 0.0
    by_speed = tuple(max(round(speed / sum(speeds), 4), least) for speed in speeds)
    if max(speeds) <= 1.05 * min(speeds):
        return [body.row_weights]
    between = tuple(round((speed + 1 / len(speeds)) / 2, 4) for speed in by_speed)
    return list(dict.fromkeys([body.row_weights, by_speed, between]))


def _most_layers(
    request: PlanRequest, body: TransformerBody, modes: Sequence[LayerMode], moved: Sequence[LayerMode]
) -> int:
    """In how many layers, from the first on, the move fits on every device. Bytes grow with each, so bisect."""

    def fits(count: int) -> bool:
        candidate = body.model_copy(update={"modes": (*moved[:count], *modes[count:])})
        return all(over_budget(request, candidate, rank) <= 0 for rank in range(len(request.cluster.devices)))

    num_layers = len(modes)
    if fits(num_layers):
        return num_layers
    return bisect_left(range(1, num_layers), True, key=lambda count: not fits(count))


def _weights(plan: TransformerPlan) -> int:
    return sum(device.memory.weights for device in plan.devices)
