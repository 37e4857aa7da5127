"""What is done to the plan that was chosen: each pass takes a plan and returns a better one, or the same. Pure.

`keep_in_place`: the order of ranks in which devices load the fewest weights that they do not hold already. Spans of heads,
columns and layers follow the order of ranks, so after the loss of a device, or when one joins, the order decides how much
of its new share each device holds from the plan before.
`add_exact_links`: exact activations on links where a lossy wire format saves no time.
`add_draft`: the draft model on the plan's fastest device that has room for it, which becomes the first rank.
`add_kv_copies`: copies of KV caches on the next device, with which answers continue after a loss.
`split_into_micro_batches` refines a candidate: two parts of a decoder's prompt in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from coordinator.models.checkpoint.chunk_layout import num_chunk_weights
from coordinator.plan.transformer.cost.decode import token_head_seconds, token_layer_seconds
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, missing_bytes, on_subset, restricted
from coordinator.plan.transformer.strategies import draft_bytes, rank_memory
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grains_of, grains_to_items, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import DRAFT_RANK, TransformerPlan
from hearth.plan.profile import DeviceProfile
from hearth.plan.transformer import LayerShare, Pipeline, TransformerBody

_TOLERANCE = 1.02  # a plan that is predicted to be this much slower still counts as equally fast: the error is larger
_MAX_EXHAUSTIVE_RANKS = 6  # 720 orders; of more ranks, each is tried at every place of the order
_NUM_ORDER_TRIALS = 4  # orders that are priced, those with the fewest weights first; each costs a simulation
_MAX_EXACT_TIME_RATIO = 1.005  # a more exact output may cost 0.5 % of the time, which no user notices
# Links with rates within this ratio are decided together: the difference is measurement noise.
_SIMILAR_RATE_RATIO = 1.25
_MAX_LINK_TRIALS = 8  # sets of links tried; each is a simulation, and homes have few classes of links
_MAX_DRAFT_TRIALS = 3  # devices on which room is made for the draft model: each costs a search
# Required time as a fraction of that without micro-batches: thread switches have a cost that the simulator does not include.
_MAX_MICRO_BATCH_TIME_RATIO = 0.98


# ---- order of ranks --------------------------------------------------------------------------------------------------


def keep_in_place(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan with its ranks in the order in which devices load least, if it is about as fast then.

    `request.held` is the plan whose weights the devices hold; without it, and for a body with exact links, the plan stays.
    """
    held = request.held
    if held is None or plan.num_ranks < 2 or plan.body.exact_links or held.model != plan.model:
        return plan
    loads = _Loads(plan, held)
    identity = tuple(range(plan.num_ranks))
    current, seconds = loads.total(identity), request_seconds(plan)
    better = sorted((total, order) for order in _orders(loads, identity) if (total := loads.total(order)) < current)
    for _, order in better[:_NUM_ORDER_TRIALS]:
        ordered = on_subset(request, tuple(plan.devices[rank].device_id for rank in order))
        body = reordered(plan.model, plan.body, order)
        if missing_bytes(ordered, body):
            continue
        changed = build_plan(ordered, body, plan.planner, plan.alternatives)
        if request_seconds(changed) <= _TOLERANCE * seconds:
            return changed
    return plan


def loaded_weights(plan: TransformerPlan, held: TransformerPlan) -> int:
    """Number of weights that the devices of a plan need and do not hold from the plan before."""
    return round(_Loads(plan, held).total(tuple(range(plan.num_ranks))))


def reordered(spec: ModelSpec, body: TransformerBody, order: Sequence[int]) -> TransformerBody:
    """The body whose rank r has the share of rank `order[r]` of this one; of a pipeline, its number of layers."""
    if isinstance(body, Pipeline):
        stages = Pipeline.of(spec, [body.layers[rank] for rank in order], body.seq_len)
        changes = {"layers": stages.layers, "row_weights": stages.row_weights, "vocabulary": stages.vocabulary}
        return body.model_copy(update=changes)
    columns = _reordered_items(body.columns, spec.ffn_size, COLUMN_GRAIN, order)
    vocabulary = _reordered_items(body.vocabulary, spec.vocab_size, VOCABULARY_GRAIN, order)
    heads, weights = (tuple(shares[rank] for rank in order) for shares in (body.heads, body.row_weights))
    return body.model_copy(
        update={"heads": heads, "columns": columns, "vocabulary": vocabulary, "row_weights": weights}
    )


def _reordered_items(shares: Sequence[int], total: int, grain: int, order: Sequence[int]) -> tuple[int, ...]:
    """Shares in items in another order. Whole grains move: the last grain of the model may be shorter."""
    grains = [len(grains_of(span, total, grain)) for span in spans(shares)]
    return grains_to_items([grains[rank] for rank in order], total, grain)


def _orders(loads: _Loads, identity: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The orders to compare: all of few ranks, or else those on the way of moving one rank after the other."""
    if len(identity) <= _MAX_EXHAUSTIVE_RANKS:
        yield from permutations(identity)
        return
    best = identity
    for rank in identity:
        others = [each for each in best if each != rank]
        best = min(((*others[:at], rank, *others[at:]) for at in range(len(identity))), key=loads.total)
        yield best


class _Loads:
    """Weights that devices must load for a plan whose ranks are reordered, if they hold the shares of `held`."""

    def __init__(self, plan: TransformerPlan, held: TransformerPlan) -> None:
        self._spec, self._body, self._held = plan.model, plan.body, held.body
        ranks = {device.device_id: rank for rank, device in enumerate(held.devices)}
        self._held_ranks = [ranks.get(device.device_id) for device in plan.devices]
        spec = plan.model
        self._per_head = [num_chunk_weights(spec, kind) / spec.group_size for kind in ("qkv", "out")]
        self._per_column = num_chunk_weights(spec, "mlp") / min(COLUMN_GRAIN, spec.ffn_size)
        self._connective = num_chunk_weights(spec, "connective")
        self._embedding = num_chunk_weights(spec, "embedding")
        rows = min(VOCABULARY_GRAIN, spec.vocab_size)
        self._per_word = num_chunk_weights(spec, "vocabulary") / rows
        self._per_logit = num_chunk_weights(spec, "head") / rows if spec.has_separate_head else 0.0
        # Layers that are divided alike in both plans count together.
        self._layers = Counter(
            layer if isinstance(self._body, Pipeline) or isinstance(self._held, Pipeline) else first
            for layer, first in enumerate(self._first_alike_layers())
        )

    def total(self, order: Sequence[int]) -> float:
        """Weights to be loaded by all devices, if rank r has the device and the share of rank `order[r]`."""
        body = reordered(self._spec, self._body, order)
        return sum(self._rank(body, rank, self._held_ranks[device]) for rank, device in enumerate(order))

    def _first_alike_layers(self) -> list[int]:
        """For each layer, the first one that has the same modes."""
        first: dict[object, int] = {}
        modes = [(self._body.mode(layer), self._held.mode(layer)) for layer in range(self._spec.num_layers)]
        return [first.setdefault(mode, layer) for layer, mode in enumerate(modes)]

    def _rank(self, body: TransformerBody, rank: int, held_rank: int | None) -> float:
        total = 0.0
        for layer, count in self._layers.items():
            held = self._held.layer_share(held_rank, layer) if held_rank is not None else _NO_SHARE
            total += count * self._layer(body.layer_share(rank, layer), held)
        words, logits = _NOTHING, _NOTHING
        if held_rank is not None:
            words, logits = self._held.word_rows(held_rank), spans(self._held.vocabulary)[held_rank]
        total += self._per_word * _new(body.word_rows(rank), words)
        total += self._per_logit * _new(spans(body.vocabulary)[rank], logits)
        has_embedding = held_rank is not None and self._held.needs_embedding(held_rank)
        return total + self._embedding * (body.needs_embedding(rank) and not has_embedding)

    def _layer(self, share: LayerShare, held: LayerShare) -> float:
        per_qkv, per_out = self._per_head
        return (
            per_qkv * _new(share.qkv, held.qkv)
            + per_out * _new(share.out, held.out)
            + self._per_column * _new(share.columns, held.columns)
            + self._connective * (share.connective and not held.connective)
        )


_NOTHING = Span(0, 0)
_NO_SHARE = LayerShare(_NOTHING, _NOTHING, _NOTHING, False)


def _new(span: Span, held: Span) -> int:
    """Items of a span that are not held."""
    return span.size - max(min(span.stop, held.stop) - max(span.start, held.start), 0)


# ---- exact links -----------------------------------------------------------------------------------------------------


def add_exact_links(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The same plan with exact activations on the fastest links, as many as cost no time according to the simulator.

    The request's cluster must contain the plan's devices. The plan itself if the user chose the format, or it is exact.
    """
    if not request.spare_accuracy or request.wire.values == "exact" or plan.num_ranks == 1:
        return plan
    ids = tuple(device.device_id for device in plan.devices)
    request = on_subset(request, ids)
    rates = {
        (a, b): request.cluster.link(ids[a], ids[b]).bytes_per_second for a, b in permutations(range(plan.num_ranks), 2)
    }
    best = plan
    for min_rate in _rate_classes(list(rates.values()))[:_MAX_LINK_TRIALS]:
        links = tuple(sorted(link for link, rate in rates.items() if rate >= min_rate))
        body = plan.body.model_copy(update={"exact_links": links})
        trial = build_plan(request, body, plan.planner, plan.alternatives)
        if request_seconds(trial) > _MAX_EXACT_TIME_RATIO * request_seconds(plan):
            break
        best = trial
    return best


def _rate_classes(rates: list[float]) -> list[float]:
    """The slowest rate of each class of similar rates, the fastest class first."""
    slowest: list[float] = []
    class_rate = 0.0
    for rate in sorted(rates, reverse=True):
        if slowest and class_rate <= _SIMILAR_RATE_RATIO * rate:
            slowest[-1] = rate
        else:
            slowest.append(rate)
            class_rate = rate
    return slowest


# ---- draft model -----------------------------------------------------------------------------------------------------


def add_draft(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The plan with its ranks turned so that the fastest device with room for the draft model comes first.

    The plan itself if no device has room. A plan that follows another one keeps its ranks if the first has room: their
    weights are in place.
    """
    draft, limits = request.draft, plan.body.generation
    if draft is None or limits is None:
        return plan
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
    return plan


def requests_with_room_for_draft(request: PlanRequest) -> Iterator[PlanRequest]:
    """Requests in which one of the fastest devices has less memory, by what the draft model takes."""
    assert request.draft is not None
    assert request.generation is not None
    draft, devices = request.draft, request.cluster.devices
    num_bytes = draft_bytes(draft, request.generation.limits(request.seq_len))
    budgets: dict[str, int | None] = {device.device_id: device.budget_bytes for device in devices}
    for device in sorted(devices, key=lambda device: guess_seconds(request, draft, device))[:_MAX_DRAFT_TRIALS]:
        if device.budget_bytes > num_bytes:
            yield restricted(request, {**budgets, device.device_id: device.budget_bytes - num_bytes})


def guess_seconds(request: PlanRequest, draft: ModelSpec, device: DeviceProfile) -> float:
    """Predicted seconds of one token of the draft model."""
    layer = token_layer_seconds(draft, device.blocks, request.num_cached_tokens)
    return draft.num_layers * layer + token_head_seconds(draft, device.blocks)


def _turns(plan: TransformerPlan) -> Iterator[tuple[int, ...]]:
    """The orders in which each device comes first, and the neighbours of the ring stay; only the plan's with exact links."""
    num_turns = 1 if plan.body.exact_links else plan.num_ranks
    for first in range(num_turns):
        yield tuple((first + rank) % plan.num_ranks for rank in range(plan.num_ranks))


# ---- KV copies and micro-batches -------------------------------------------------------------------------------------


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
    memory = [rank_memory(plan.model, copying, rank) for rank in range(plan.num_ranks)]
    devices = tuple(each.model_copy(update={"memory": own}) for each, own in zip(plan.devices, memory, strict=True))
    if any(device.memory.total > device.budget_bytes for device in devices):
        return plan
    return plan.model_copy(update={"body": copying, "devices": devices})


def split_into_micro_batches(request: PlanRequest, plan: TransformerPlan) -> TransformerPlan:
    """The same plan with two micro-batches in flight, if the simulator finds that faster; otherwise `plan` itself."""
    body = plan.body
    if request.generation is None or plan.num_ranks == 1 or not body.can_split_prefill:
        return plan
    subset = on_subset(request, tuple(device.device_id for device in plan.devices))
    cut = body.model_copy(update={"micro_batches": 2})
    better = build_plan(replace(subset, wire=plan.wire), cut, plan.planner, plan.alternatives)
    return better if request_seconds(better) < _MAX_MICRO_BATCH_TIME_RATIO * request_seconds(plan) else plan
