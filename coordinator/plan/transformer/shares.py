"""Shares in whole grains of heads, columns and vocabulary, their bytes and seconds, and plans that split only rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from coordinator.models.checkpoint.chunk_layout import num_chunk_weights
from coordinator.plan.transformer.cost import memory
from coordinator.plan.transformer.cost.decode import attention_bytes, mlp_bytes
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, missing_bytes, with_ring_order
from coordinator.plan.transformer.strategies import rank_memory
from hearth.errors import ModelDoesNotFit
from hearth.plan.geometry import (
    COLUMN_GRAIN,
    ROW_GRAIN,
    VOCABULARY_GRAIN,
    grains_to_items,
    largest_remainder,
    num_grains,
)
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import BlockProfile, DeviceProfile
from hearth.plan.transformer import ShareStrategy, TensorParallel

# Largest ratio of speeds at which rows are shared equally: a split by speed would gain next to nothing.
EQUAL_SPEED_RATIO = 1.05
_MIN_LAYER_SECONDS = 1e-9  # avoids a division by zero where a profile has no times


def body_from_grains(
    request: PlanRequest,
    strategy: ShareStrategy,
    groups: Sequence[int],
    columns: Sequence[int],
    vocabulary: Sequence[int],
    row_weights: Sequence[float] | None = None,
) -> TensorParallel:
    """A plan of shares in grains: KV groups, MLP column grains, vocabulary grains. Without row weights, equal rows."""
    spec = request.spec
    return TensorParallel(
        strategy=strategy,
        seq_len=request.seq_len,
        generation=request.limits,
        heads=tuple(share * spec.group_size for share in groups),
        columns=grains_to_items(columns, spec.ffn_size, COLUMN_GRAIN),
        row_weights=tuple(row_weights or (1.0,) * len(groups)),
        vocabulary=grains_to_items(vocabulary, spec.vocab_size, VOCABULARY_GRAIN),
    )


class LayerTimes:
    """Seconds of shares of one layer: for one step, or, for a decoder, for the expected request (prompt and answer)."""

    def __init__(self, request: PlanRequest) -> None:
        self._spec = spec = request.spec
        limits = request.limits
        self._steps = limits.prompt_tokens / request.seq_len if limits else 1.0
        self._tokens = limits.new_tokens if limits else 0
        self._num_cached_tokens = request.num_cached_tokens
        self._bytes_per_column = mlp_bytes(spec, 1)

    def attention(self, blocks: BlockProfile, heads: int) -> float:
        """L(MHA, a, d): seconds of attention with `heads` heads."""
        group = self._spec.group_size
        num_bytes = attention_bytes(self._spec, group, self._num_cached_tokens, blocks) * heads / group
        return self._seconds(blocks, blocks.attention(heads), num_bytes)

    def mlp(self, blocks: BlockProfile, columns: int) -> float:
        """L(MLP, b, d): seconds of the MLP with `columns` columns."""
        return self._seconds(blocks, blocks.mlp(columns), columns * self._bytes_per_column)

    def layer(self, blocks: BlockProfile) -> float:
        """Seconds of a whole layer on one device."""
        return self.attention(blocks, self._spec.num_heads) + self.mlp(blocks, self._spec.ffn_size)

    def _seconds(self, blocks: BlockProfile, step_seconds: float, num_bytes: float) -> float:
        return step_seconds * self._steps + self._tokens * num_bytes * blocks.decode_seconds_per_byte


def device_capacity(request: PlanRequest, blocks: BlockProfile) -> float:
    """V_d of Galaxy's Algorithm 1: the inverse of the time for a whole MHA and a whole MLP block on device d."""
    return 1.0 / max(LayerTimes(request).layer(blocks), _MIN_LAYER_SECONDS)


def row_capacity(request: PlanRequest, blocks: BlockProfile) -> float:
    """V_d for splitting rows: prefill only, since a decoded token has a single row."""
    seconds = blocks.attention(request.spec.num_heads) + blocks.mlp(request.spec.ffn_size)
    return 1.0 / max(seconds, _MIN_LAYER_SECONDS)


def balanced_rows(request: PlanRequest) -> tuple[float, ...]:
    """Row weights with which the device that takes longest for its rows of a layer takes as little as possible.

    They follow the steps of the kernels' times: a split by speed may give a device a few rows more than a group of them.
    """
    num_rows, blocks = request.seq_len, [device.blocks for device in request.cluster.devices]
    counts = [min(grains * ROW_GRAIN, num_rows) for grains in range(num_grains(num_rows, ROW_GRAIN) + 1)]
    speeds = [row_capacity(request, each) for each in blocks]
    seconds = [  # by device and count, in an arbitrary unit
        [each.tile_factor(count) * count / speed for count in counts]
        for each, speed in zip(blocks, speeds, strict=True)
    ]

    def most_grains(limit: float) -> list[int]:
        return [max(index for index, each in enumerate(own) if each <= limit) for own in seconds]

    limits = sorted({each for own in seconds for each in own})
    enough = bisect_left(limits, True, key=lambda limit: sum(most_grains(limit)) >= len(counts) - 1)
    grains = most_grains(limits[enough])
    while sum(grains) > len(counts) - 1:  # take them where they save most
        saved = [
            own[count] - own[count - 1] if count else -math.inf for own, count in zip(seconds, grains, strict=True)
        ]
        grains[saved.index(max(saved))] -= 1
    return tuple(max(counts[count] / num_rows, least_row_weight(request)) for count in grains)


def least_row_weight(request: PlanRequest) -> float:
    """The least row weight of a rank: more than 0 for decoders, since a rank without rows holds no replicated weights.

    It needs them to decode with its heads.
    """
    return 1e-4 if request.spec.causal else 0.0


def devices_by_capacity(request: PlanRequest) -> list[DeviceProfile]:
    """The devices, the fastest first."""
    return sorted(request.cluster.devices, key=lambda device: -device_capacity(request, device.blocks))


class ShareBudget:
    """Memory of devices for shares, as linear costs per grain, which the algorithms need. Never an underestimate."""

    def __init__(self, request: PlanRequest, strategy: ShareStrategy) -> None:
        spec, seq_len, limits, devices = request.spec, request.seq_len, request.limits, request.cluster.devices
        no_grains = (0,) * len(devices)
        empty = body_from_grains(request, strategy, no_grains, no_grains, no_grains)
        self._free_bytes = [
            device.budget_bytes - rank_memory(spec, empty, rank).total for rank, device in enumerate(devices)
        ]
        group, columns = spec.group_size, min(COLUMN_GRAIN, spec.ffn_size)
        head_weights = num_chunk_weights(spec, "qkv") + num_chunk_weights(spec, "out")
        # The part of attention that does not depend on heads is in `empty` already.
        head_values = memory.attention_values(spec, group, seq_len, limits)
        head_values -= memory.attention_values(spec, 0, seq_len, limits)
        self.bytes_per_head_grain = math.ceil(spec.num_layers * spec.matrix_bytes * head_weights)
        self.bytes_per_head_grain += head_values * memory.COMPUTE_BYTES
        if limits is not None:
            self.bytes_per_head_grain += memory.kv_bytes(spec, group, limits)
        self.bytes_per_column_grain = math.ceil(spec.num_layers * spec.matrix_bytes * num_chunk_weights(spec, "mlp"))
        self.bytes_per_column_grain += memory.mlp_values(spec, columns, seq_len, limits) * memory.COMPUTE_BYTES
        self.bytes_per_vocabulary_grain = num_chunk_weights(spec, "vocabulary") * spec.word_bytes
        if spec.has_separate_head:
            self.bytes_per_vocabulary_grain += math.ceil(num_chunk_weights(spec, "head") * spec.matrix_bytes)
        logits = memory.logit_values(min(VOCABULARY_GRAIN, spec.vocab_size), limits)
        self.bytes_per_vocabulary_grain += logits * memory.COMPUTE_BYTES

    def remaining_bytes(self, device: int, a: float = 0.0, b: float = 0.0, v: float = 0.0) -> float:
        used = a * self.bytes_per_head_grain + b * self.bytes_per_column_grain + v * self.bytes_per_vocabulary_grain
        return max(self._free_bytes[device] - used, 0.0)

    def share_bytes(self, device: int) -> int:
        """Bytes of a device available for shares of all kinds."""
        return max(self._free_bytes[device], 0)

    def missing_bytes(self, groups: int, columns: int, vocabulary: int) -> int:
        """Bytes that all devices together lack for the whole model; at least 1, since whole grains may not fit either."""
        needed = (
            groups * self.bytes_per_head_grain
            + columns * self.bytes_per_column_grain
            + vocabulary * self.bytes_per_vocabulary_grain
        )
        return max(needed - sum(self.share_bytes(device) for device in range(len(self._free_bytes))), 1)


# ---- strategies that split only rows: all weights on one device (`local`), or on every device (`sp`) -----------------


def plan_rows(request: PlanRequest, strategy: ShareStrategy) -> TransformerPlan:
    """The fastest way to split the rows, as simulated. Raises ModelDoesNotFit."""
    request = with_ring_order(request)
    bodies = [_rows_body(request, strategy, rows) for rows in _row_splits(request)]
    missing = [missing_bytes(request, body) for body in bodies]
    if min(missing):
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=min(missing))
    fitting = (body for body, missing_of_body in zip(bodies, missing, strict=True) if not missing_of_body)
    return min((build_plan(request, body, "rows") for body in fitting), key=request_seconds)


def _rows_body(request: PlanRequest, strategy: ShareStrategy, rows: tuple[float, ...]) -> TensorParallel:
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
