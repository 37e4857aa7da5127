"""Predicted time of decoding one token. Pure.

While a token is decoded, no transfer overlaps a computation: every exchange waits for what comes before it. So a step is
evaluated phase by phase rather than as a graph of tasks. The resources are the same: each rank's compute, and both sides
of its network interface.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from coordinator.models.checkpoint.chunk_layout import num_chunk_weights
from coordinator.plan.transformer.cost.layout import PlanLayout
from hearth.plan.common import BYTES_PER_VALUE, ValueFormatName
from hearth.plan.geometry import COLUMN_GRAIN
from hearth.plan.model_spec import KvFormat, ModelSpec
from hearth.plan.profile import BlockProfile

# Values in a message of candidates or a step order. Any small number will do: their cost is per message, not per byte.
SMALL_MESSAGE_VALUES = 16
# Fixed cost of a step (step order, word embedding row, sampling, answer), in units of the fixed time of one layer: with 330
# million int4 weights on one loaded core of an AMD EPYC, 1.7 to 2.5 of a token's 14 ms, where a layer has 0.4 ms.
STEP_OVERHEAD_LAYERS = 4
# Bytes of weights that are read in the time in which a token attends to one cached value, for profiles that did not measure it.
# float32 and bfloat16 are read where they are, and int8 is converted to float32 first. With 4 and 16 KV heads of 64 values, 512
# and 4096 tokens, on one core of a Xeon, bfloat16 takes 0.58 and 0.88 of float32's time per token, int8 1.5 and 3.1 to 4.3
# times as long.
_CACHED_VALUE_BYTES: dict[KvFormat, float] = {"float32": 4.0, "bfloat16": 3.0, "int8": 9.0}


def attention_bytes(spec: ModelSpec, heads: int, num_tokens: float, blocks: BlockProfile | None = None) -> float:
    """Bytes that a rank reads for one token in one layer's attention: the weights of its heads, their keys and values.

    A value of the KV cache counts by its time on a device with the profile `blocks` (None: by `_CACHED_VALUE_BYTES`), in bytes
    of weights.
    """
    value_bytes = _CACHED_VALUE_BYTES[spec.kv_cache]
    if blocks is not None and blocks.decode_seconds_per_cached_value and blocks.decode_seconds_per_byte:
        value_bytes = blocks.decode_seconds_per_cached_value / blocks.decode_seconds_per_byte
    weights = heads // spec.group_size * _group_bytes(spec)
    return weights + 2 * spec.kv_width(heads) * num_tokens * value_bytes


def mlp_bytes(spec: ModelSpec, columns: int) -> float:
    """Bytes that a rank reads for one token in one layer's MLP: the weights of its columns."""
    return columns * _column_bytes(spec)


def head_bytes(spec: ModelSpec, vocabulary: int) -> float:
    """Bytes of the output head, which is read once per token, for a share of the vocabulary."""
    return vocabulary * spec.hidden_size * spec.head_bytes


@lru_cache(maxsize=256)
def _group_bytes(spec: ModelSpec) -> float:
    return (num_chunk_weights(spec, "qkv") + num_chunk_weights(spec, "out")) * spec.matrix_bytes


@lru_cache(maxsize=256)
def _column_bytes(spec: ModelSpec) -> float:
    return num_chunk_weights(spec, "mlp") * spec.matrix_bytes / min(COLUMN_GRAIN, spec.ffn_size)


def token_layer_seconds(spec: ModelSpec, blocks: BlockProfile, num_tokens: float) -> float:
    """Seconds of one whole layer for one token, when the KV cache holds `num_tokens`."""
    num_bytes = attention_bytes(spec, spec.num_heads, num_tokens, blocks) + mlp_bytes(spec, spec.ffn_size)
    return blocks.decode_seconds_per_byte * num_bytes + blocks.decode_layer_seconds


def token_head_seconds(spec: ModelSpec, blocks: BlockProfile) -> float:
    """Seconds that the first stage spends once per token: step order, word embedding row, output head and sampling."""
    head = blocks.decode_seconds_per_byte * head_bytes(spec, spec.vocab_size)
    return head + STEP_OVERHEAD_LAYERS * blocks.decode_layer_seconds


def simulate_exchange(
    layout: PlanLayout,
    ready: Sequence[float],
    num_values: int,
    sources: Collection[int],
    targets: Collection[int],
    exact: bool = False,
) -> list[float]:
    """Simulate one exchange: every source sends `num_values` to every target except itself, one after the other.

    `ready` is the time at which each rank begins, in seconds. Returns the time at which each rank is done.
    `exact`: the values are sent exactly, whatever the plan's wire format.
    """
    busy, sending, receiving = list(ready), list(ready), [0.0] * len(ready)
    medium_free = [0.0] * len(layout.cluster.media)
    arriving: list[list[tuple[float, float]]] = [[] for _ in ready]  # arrival time, and CPU seconds of receiving
    for offset in range(1, len(ready)):
        for source in sources:
            target = (source + offset) % len(ready)
            if target not in targets:
                continue
            link = layout.links[source, target]
            format_: ValueFormatName = "exact" if exact else layout.formats[source, target]
            busy[source] += layout.wire_seconds(source, num_values, format_)
            crossed = layout.media[source, target]
            start = max(busy[source], sending[source], receiving[target], *(medium_free[each] for each in crossed))
            end = start + num_values * BYTES_PER_VALUE[format_] / link.bytes_per_second
            sending[source] = receiving[target] = end
            for each in crossed:
                medium_free[each] = end
            cost = layout.wire_seconds(target, num_values, format_)
            arriving[target].append((end + link.round_trip_seconds / 2, cost))
    for rank, messages in enumerate(arriving):
        for arrival, cost in sorted(messages):
            busy[rank] = max(busy[rank], arrival) + cost
    return busy
