"""What one token costs a decoder: tensor parallel on all ranks, every partial sum straight to every peer; or through the
stages of a pipeline. Pure.

No transfer runs beside a computation here: every exchange waits for what comes before it. So a step is evaluated phase
by phase rather than as a graph of tasks; what is busy is the same: each rank's compute, and both sides of its network.

H hidden. Ranks are the cluster's devices in order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from coordinator.models.checkpoint.chunk_layout import chunk_weights
from coordinator.plan.transformer.cost.memory import COMPUTE_BYTES
from coordinator.plan.transformer.cost.step_graph import wire_seconds
from hearth.plan.geometry import COLUMN_GRAIN
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import WireFormat
from hearth.plan.profile import BlockProfile, ClusterProfile
from hearth.plan.transformer import Pipeline, TransformerBody
from hearth.plan.value_formats import BYTES_PER_VALUE, Values

_FEW_VALUES = 16  # of candidates, or of an order: the message costs, not its bytes
_EVALUATED_LAYERS = 2  # each further one takes as long as the last of them
# What a step does once (its order, the word row, sampling, the answer) takes about as long as the calls of so many layers
# (measured: 0.8 ms, where a layer's take 0.2 ms).
_STEP_LAYERS = 4


def attention_bytes(spec: ModelSpec, heads: int, num_tokens: float) -> float:
    """What a rank reads of one layer for one token: the weights of its heads, and their keys and values."""
    weights = heads // spec.group_size * _group_bytes(spec)
    return weights + 2 * spec.kv_width(heads) * num_tokens * COMPUTE_BYTES


def mlp_bytes(spec: ModelSpec, columns: int) -> float:
    return columns * _column_bytes(spec)


def head_bytes(spec: ModelSpec, vocabulary: int) -> float:
    """The output head is read once for a token, not once a layer."""
    return vocabulary * spec.hidden_size * spec.head_bytes


@lru_cache(maxsize=256)
def _group_bytes(spec: ModelSpec) -> float:
    return (chunk_weights(spec, "qkv") + chunk_weights(spec, "out")) * spec.matrix_bytes


@lru_cache(maxsize=256)
def _column_bytes(spec: ModelSpec) -> float:
    return chunk_weights(spec, "mlp") * spec.matrix_bytes / min(COLUMN_GRAIN, spec.ffn_size)


def decode_seconds(
    spec: ModelSpec, body: TransformerBody, cluster: ClusterProfile, wire: WireFormat, num_tokens: float
) -> float:
    """From one token of one sequence to the next, where its KV cache holds `num_tokens`.

    From the moment when every rank has the token's word row: all layers, the output head, the candidates to rank 0, its
    order to all, and the next word row from its owner (the slowest counts) to all. In a pipeline, from the moment when
    the first stage has chosen the token.
    """
    if isinstance(body, Pipeline):
        return _pipelined_seconds(spec, body, cluster, wire, num_tokens)
    exchanges = _Exchanges(body, cluster, wire)
    blocks = [device.blocks for device in cluster.devices]
    everyone = range(len(blocks))
    attention = [
        b.decode_seconds_per_byte * attention_bytes(spec, heads, num_tokens) + b.decode_layer_seconds / 2
        for b, heads in zip(blocks, body.heads, strict=True)
    ]
    mlp = [
        b.decode_seconds_per_byte * mlp_bytes(spec, columns) + b.decode_layer_seconds / 2
        for b, columns in zip(blocks, body.columns, strict=True)
    ]
    head = [
        b.decode_seconds_per_byte * head_bytes(spec, vocabulary) + _STEP_LAYERS * b.decode_layer_seconds
        for b, vocabulary in zip(blocks, body.vocabulary, strict=True)
    ]
    with_heads = [rank for rank in everyone if body.heads[rank]]
    with_columns = [rank for rank in everyone if body.columns[rank]]
    owners = [rank for rank in everyone if body.vocabulary[rank]]
    H = spec.hidden_size

    ready = [0.0 for _ in everyone]
    ends = []
    for _ in range(min(spec.num_layers, _EVALUATED_LAYERS)):
        ready = exchanges.run(_later(ready, attention), H, with_heads, everyone)
        ready = exchanges.run(_later(ready, mlp), H, with_columns, everyone)
        ends.append(max(ready))
    further = max(spec.num_layers - _EVALUATED_LAYERS, 0) * (ends[-1] - (ends[-2] if len(ends) > 1 else 0.0))
    ready = [seconds + further for seconds in ready]
    ready = exchanges.run(_later(ready, head), _FEW_VALUES, owners, [0], verbatim=True)
    ready = exchanges.run(ready, _FEW_VALUES, [0], everyone, verbatim=True)
    return max(max(exchanges.run(ready, H, [owner], everyone)) for owner in owners)


def token_layer_seconds(spec: ModelSpec, blocks: BlockProfile, num_tokens: float) -> float:
    """One layer for one token, where its KV cache holds `num_tokens`."""
    num_bytes = attention_bytes(spec, spec.num_heads, num_tokens) + mlp_bytes(spec, spec.ffn_size)
    return blocks.decode_seconds_per_byte * num_bytes + blocks.decode_layer_seconds


def token_head_seconds(spec: ModelSpec, blocks: BlockProfile) -> float:
    """What the first stage does once for a token: its order, the word row, the output head, and the choice."""
    head = blocks.decode_seconds_per_byte * head_bytes(spec, spec.vocab_size)
    return head + _STEP_LAYERS * blocks.decode_layer_seconds


def _pipelined_seconds(
    spec: ModelSpec, body: Pipeline, cluster: ClusterProfile, wire: WireFormat, num_tokens: float
) -> float:
    """From one token of one sequence to the next: its order to all, stage after stage, and its row back to the first."""
    exchanges = _Exchanges(body, cluster, wire)
    blocks = [device.blocks for device in cluster.devices]
    ranks = range(len(blocks))
    ready = exchanges.run([0.0 for _ in ranks], _FEW_VALUES, [0], ranks, verbatim=True)
    for rank in ranks:
        ready[rank] += body.layers[rank] * token_layer_seconds(spec, blocks[rank], num_tokens)
        following = (rank + 1) % len(blocks)
        if following != rank:
            ready = exchanges.run(ready, spec.hidden_size, [rank], [following])
    return ready[0] + token_head_seconds(spec, blocks[0])


def _later(ready: Sequence[float], seconds: Sequence[float]) -> list[float]:
    return [start + more for start, more in zip(ready, seconds, strict=True)]


class _Exchanges:
    """Messages of one hop, each rank's one after the other."""

    def __init__(self, body: TransformerBody, cluster: ClusterProfile, wire: WireFormat) -> None:
        ids = [device.device_id for device in cluster.devices]
        links = {(link.source, link.target): link for link in cluster.links}
        self._num_ranks = len(ids)
        self._costs = [device.blocks.wire for device in cluster.devices]
        pairs = [(a, b) for a in range(len(ids)) for b in range(len(ids)) if a != b]
        self._links = {(a, b): links[ids[a], ids[b]] for a, b in pairs}
        self._formats = {(a, b): body.values_on(a, b, wire.values) for a, b in pairs}

    def run(
        self,
        ready: Sequence[float],
        num_values: int,
        sources: Collection[int],
        targets: Collection[int],
        verbatim: bool = False,
    ) -> list[float]:
        """Every source sends `num_values` to every target but itself; when each rank is done with its part.

        `verbatim`: in no plan's format.
        """
        busy, sending, receiving = list(ready), list(ready), [0.0] * self._num_ranks
        arriving: list[list[tuple[float, float]]] = [[] for _ in ready]  # when, and what receiving it costs
        for offset in range(1, self._num_ranks):
            for source in sources:
                target = (source + offset) % self._num_ranks
                if target not in targets:
                    continue
                link = self._links[source, target]
                format_: Values = "exact" if verbatim else self._formats[source, target]
                busy[source] += wire_seconds(self._costs[source], num_values, format_)
                start = max(busy[source], sending[source], receiving[target])
                end = start + num_values * BYTES_PER_VALUE[format_] / link.bytes_per_second
                sending[source] = receiving[target] = end
                cost = wire_seconds(self._costs[target], num_values, format_)
                arriving[target].append((end + link.round_trip_seconds / 2, cost))
        for rank, messages in enumerate(arriving):
            for arrival, cost in sorted(messages):
                busy[rank] = max(busy[rank], arrival) + cost
        return busy
