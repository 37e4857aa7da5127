"""The request to every transformer planner, and the plan made from a planner's result. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations

from coordinator.models.checkpoint.chunk_layout import chunk_keys_for_rank, num_chunk_bytes
from coordinator.plan.stores import Stored, room_after
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import predict, prompt_seconds
from coordinator.plan.transformer.strategies import rank_memory, strategy_of_body
from hearth.plan.common import Alternative, PlannedDevice, WireFormat
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import GenerationLimits, TransformerBody

# Concurrent sequences of full context length; each more takes memory for keys and values on every device.
DEFAULT_SEQUENCES = 4
DEFAULT_NEW_TOKENS = 128  # expected length of an answer: a paragraph
# Sequences that may run at once, per one of full length, as far as the KV cache has room: most are shorter than the context.
_RUNNING_PER_SEQUENCE = 4
_MIN_RUNNING, _MAX_RUNNING = 16, 4096
# If the rates of all links differ by at most 10 %, the order is kept: a new one would follow the noise of the measurements.
_SIMILAR_RATE_TOLERANCE = 0.10
_MAX_EXHAUSTIVE_DEVICES = 8  # (8-1)! = 5040 orders; beyond, improve by swaps


@dataclass(frozen=True)
class GenerationRequest:
    """The capacity that the user wants of a decoder, and the expected request by which its plans are compared."""

    context: int  # tokens of one sequence: prompt and answer
    sequences: int = DEFAULT_SEQUENCES  # concurrent sequences of that length in the KV cache
    prompt_tokens: int | None = None  # expected; None: as many as one step takes
    new_tokens: int = DEFAULT_NEW_TOKENS  # expected
    kv_copies: bool = True  # whether devices with room keep copies of each other's KV caches
    draft: ModelSpec | None = None  # guesses tokens, if a device has room for it

    def limits(self, seq_len: int) -> GenerationLimits:
        return GenerationLimits(
            kv_tokens=self.context * self.sequences,
            max_sequences=min(max(_RUNNING_PER_SEQUENCE * self.sequences, _MIN_RUNNING), _MAX_RUNNING),
            prefill_rows=seq_len,
            context=self.context,
            prompt_tokens=min(self.prompt_tokens or seq_len, self.context),
            new_tokens=min(self.new_tokens, self.context),
        )

    def matches(self, body: TransformerBody, seq_len: int) -> bool:
        """Whether a plan was made for this request.

        A pipeline prefills in smaller chunks, and not all plans have KV copies, or room for the draft model.
        """
        if (found := body.generation) is None:
            return False
        expected, copies = self.limits(seq_len), self.kv_copies and found.kv_copies
        rows = min(expected.prefill_rows, body.max_step_rows)
        draft = self.draft if found.draft is not None else None
        return found == expected.model_copy(update={"prefill_rows": rows, "kv_copies": copies, "draft": draft})


@dataclass(frozen=True)
class PlanRequest:
    """A model, the devices it may use (in ring order), and the settings that the user fixed.

    `spare_accuracy`: the user did not choose the wire format, so it is used only on links where it saves time.
    `generation` is for decoders; without it, a decoder's plan is for prefill only. `held`: the deployed plan, whose weights
    its devices need not load again.
    """

    spec: ModelSpec
    cluster: ClusterProfile
    seq_len: int
    wire: WireFormat = field(default_factory=WireFormat)
    strategy: str = "auto"  # a name in the registry
    spare_accuracy: bool = False
    generation: GenerationRequest | None = None
    held: TransformerPlan | None = None

    @property
    def limits(self) -> GenerationLimits | None:
        return self.generation.limits(self.seq_len) if self.generation else None

    @property
    def draft(self) -> ModelSpec | None:
        return self.generation.draft if self.generation else None

    @property
    def num_cached_tokens(self) -> float:
        """Average number of tokens in the KV cache while the expected request decodes."""
        limits = self.limits
        return limits.prompt_tokens + limits.new_tokens / 2 if limits else 0.0

    @property
    def attention_by_rows(self) -> bool:
        """Whether attention may be split by rows.

        The whole context must be prefilled in one step: a rank caches the keys and values of its own heads only, so a later
        chunk of a prompt could not attend with the other heads.
        """
        return self.may_replicate and (self.generation is None or self.generation.context <= self.seq_len)

    @property
    def may_replicate(self) -> bool:
        """Whether a rank may hold more of a matrix than it decodes with.

        Not for int4, whose packed matrices are used whole, nor for int8, whose kernel cannot use part of a matrix's inputs
        (converting the part per token would be slower).
        """
        return self.generation is None or self.spec.weights not in ("int8", "int4")

    @property
    def why_not_by_rows(self) -> str:
        if not self.may_replicate:
            return f"needs whole matrices everywhere, and {self.spec.weights} does not decode with a part of one"
        context = self.generation.context if self.generation else 0
        return f"needs a context ({context} tokens) that is prefilled in one step (of {self.seq_len} rows)"


def on_subset(request: PlanRequest, device_ids: tuple[str, ...]) -> PlanRequest:
    """The same request for some of the devices, in this order."""
    return replace(request, cluster=request.cluster.subset(device_ids))


def with_ring_order(request: PlanRequest) -> PlanRequest:
    """The same request with its devices in the best order for a ring."""
    return replace(request, cluster=best_ring(request.cluster))


def restricted(request: PlanRequest, budgets: Mapping[str, int | None]) -> PlanRequest:
    """The same request with these budgets in bytes, by device id; without the devices that have None."""
    devices = tuple(
        device.model_copy(update={"budget_bytes": budget})
        for device in request.cluster.devices
        if (budget := budgets[device.device_id]) is not None
    )
    request = on_subset(request, tuple(device.device_id for device in devices))
    return replace(request, cluster=request.cluster.model_copy(update={"devices": devices}))


def best_ring(cluster: ClusterProfile) -> ClusterProfile:
    """The same devices in the order whose slowest hop is fastest; among equals, the order with the least total time.

    Every rank sends about the same bytes per collective, so the slowest hop sets the pace of the ring. Exhaustive up to 8
    devices; beyond that, swaps of two devices until none helps.
    """
    ids = tuple(device.device_id for device in cluster.devices)
    cost = {(link.source, link.target): 1.0 / link.bytes_per_second for link in cluster.links}
    costs = [cost[a, b] for a in ids for b in ids if a != b]
    if len(ids) < 3 or max(costs) <= (1 + _SIMILAR_RATE_TOLERANCE) * min(costs):
        return cluster

    def hop_cost(order: tuple[str, ...]) -> tuple[float, float]:
        hops = [cost[a, b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
        return max(hops), sum(hops)

    best = ids
    if len(ids) <= _MAX_EXHAUSTIVE_DEVICES:
        best = min(((ids[0], *rest) for rest in permutations(ids[1:])), key=hop_cost)
    improved = len(ids) > _MAX_EXHAUSTIVE_DEVICES
    while improved:
        improved = False
        for i, j in combinations(range(1, len(best)), 2):
            swapped = (*best[:i], best[j], *best[i + 1 : j], best[i], *best[j + 1 :])
            if hop_cost(swapped) < hop_cost(best):
                best, improved = swapped, True
    return cluster.subset(best) if hop_cost(best) < hop_cost(ids) else cluster


def build_plan(
    request: PlanRequest, body: TransformerBody, planner: str, alternatives: Sequence[Alternative] = ()
) -> TransformerPlan:
    """The finished plan with the memory of every rank and the simulator's prediction. Rank r is the request's device r."""
    layout = PlanLayout(request.spec, body, request.cluster, request.wire)
    predicted, busy = predict(layout)
    if request.generation is not None:
        seconds = strategy_of_body(body).decode_seconds(layout, request.num_cached_tokens)
        prompt = prompt_seconds(layout, predicted.latency_seconds)
        predicted = predicted.model_copy(update={"prompt_seconds": prompt, "decode_seconds": seconds})
    devices = tuple(
        PlannedDevice(
            device_id=device.device_id,
            name=device.name,
            memory=rank_memory(request.spec, body, rank),
            budget_bytes=device.budget_bytes,
            compute_seconds=busy[rank],
        )
        for rank, device in enumerate(request.cluster.devices)
    )
    return TransformerPlan(
        model=request.spec,
        planner=planner,
        devices=devices,
        body=body,
        wire=request.wire,
        predicted=predicted,
        alternatives=tuple(alternatives),
    )


def excess_bytes(request: PlanRequest, body: TransformerBody, rank: int) -> int:
    """Bytes by which a device exceeds its budget; negative if it has room left."""
    return rank_memory(request.spec, body, rank).total - request.cluster.devices[rank].budget_bytes


def missing_bytes(request: PlanRequest, body: TransformerBody) -> int:
    """Bytes that all devices together lack for this plan; 0 when it fits."""
    return sum(max(excess_bytes(request, body, rank), 0) for rank in range(len(request.cluster.devices)))


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
