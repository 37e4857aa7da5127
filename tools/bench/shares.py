"""Plans with given shares, built without a planner, for checks that must not depend on a planner's choice."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.transformer.strategies import rank_memory
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_to_items, largest_remainder, num_grains
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import PlannedDevice, Prediction, WireFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, LayerMode, Pipeline, Strategy, TensorParallel, TransformerBody

_UNLIMITED_BYTES = 1 << 40  # memory budget of a device
_STEP_SECONDS = 6.0  # nominal prediction of a step, large enough for long peer timeouts


def shared_plan(
    spec: ModelSpec,
    strategy: Strategy,
    weights: Sequence[float],
    generation: GenerationLimits,
    names: Sequence[str] = (),
    modes: Sequence[LayerMode] = (),
) -> TransformerPlan:
    """Split heads, columns, vocabulary and rows (in a pipeline: layers) in proportion to `weights`, one per device.

    `names`: device ids. Under `sp` every rank has rows, because all ranks hold all weights.
    """
    body = _body(spec, strategy, weights, generation, modes)
    ids = names or [f"device{rank}" for rank in range(len(weights))]
    devices = tuple(
        PlannedDevice(
            device_id=device,
            name=device,
            memory=rank_memory(spec, body, rank),
            budget_bytes=_UNLIMITED_BYTES,
            compute_seconds=0.0,
        )
        for rank, device in enumerate(ids)
    )
    return TransformerPlan(
        epoch=1,
        model=spec,
        planner="bench",
        devices=devices,
        body=body,
        wire=WireFormat(lz4="off"),
        predicted=Prediction(
            latency_seconds=_STEP_SECONDS,
            compute_seconds=_STEP_SECONDS,
            transfer_seconds=0.0,
            bottleneck_seconds=_STEP_SECONDS,
        ),
    )


def _body(
    spec: ModelSpec,
    strategy: Strategy,
    weights: Sequence[float],
    generation: GenerationLimits,
    modes: Sequence[LayerMode],
) -> TransformerBody:
    seq_len = generation.prefill_rows
    if strategy == "pipeline":
        stages = Pipeline.of(spec, largest_remainder(weights, spec.num_layers), seq_len)
        return stages.model_copy(update={"generation": generation})
    columns = largest_remainder(weights, num_grains(spec.ffn_size, COLUMN_GRAIN))
    vocabulary = largest_remainder(weights, num_grains(spec.vocab_size, VOCABULARY_GRAIN))
    everywhere = strategy == "sp" or bool(modes)
    return TensorParallel(
        strategy=strategy,
        seq_len=seq_len,
        generation=generation,
        heads=tuple(share * spec.group_size for share in largest_remainder(weights, spec.num_kv_heads)),
        columns=grains_to_items(columns, spec.ffn_size, COLUMN_GRAIN),
        row_weights=tuple(max(weight, 0.5) if everywhere else weight for weight in weights),
        vocabulary=grains_to_items(vocabulary, spec.vocab_size, VOCABULARY_GRAIN),
        modes=tuple(modes),
    )
