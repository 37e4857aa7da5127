"""The request to every transformer planner, and the plan made from a planner's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import predict, prompt_seconds
from coordinator.plan.transformer.ring import best_ring
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
