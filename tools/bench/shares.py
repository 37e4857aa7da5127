"""Plans with equal shares, built without a planner, for checks that must not depend on a planner's choice."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.transformer.strategies import rank_memory
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_to_items, largest_remainder, num_grains
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import PlannedDevice, Prediction, WireFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, Strategy, TensorParallel

_UNLIMITED_BYTES = 1 << 40  # memory budget of a device; more than any has
_STEP_SECONDS = 6.0  # nominal prediction of a step, large enough for long peer timeouts
_LIMITS = GenerationLimits(kv_tokens=512, max_sequences=4, prefill_rows=128, context=128)  # small beside the weights


def equal_plan(spec: ModelSpec, strategy: Strategy, device_ids: Sequence[str]) -> TransformerPlan:
    """Split heads, columns, vocabulary and rows equally between the devices."""
    equal = (1.0,) * len(device_ids)

    def shares(total: int, grain: int) -> tuple[int, ...]:
        return grains_to_items(largest_remainder(equal, num_grains(total, grain)), total, grain)

    body = TensorParallel(
        strategy=strategy, seq_len=_LIMITS.prefill_rows, generation=_LIMITS, row_weights=equal,
        heads=shares(spec.num_heads, spec.group_size), columns=shares(spec.ffn_size, COLUMN_GRAIN),
        vocabulary=shares(spec.vocab_size, VOCABULARY_GRAIN),
    )  # fmt: skip
    devices = tuple(
        PlannedDevice(device_id=device, name=device, memory=rank_memory(spec, body, rank), budget_bytes=_UNLIMITED_BYTES,
                      compute_seconds=0.0)
        for rank, device in enumerate(device_ids)
    )  # fmt: skip
    predicted = Prediction(latency_seconds=_STEP_SECONDS, compute_seconds=_STEP_SECONDS, transfer_seconds=0.0,
                           bottleneck_seconds=_STEP_SECONDS)  # fmt: skip
    return TransformerPlan(epoch=1, model=spec, planner="bench", devices=devices, body=body, wire=WireFormat(lz4="off"),
                           predicted=predicted)  # fmt: skip
