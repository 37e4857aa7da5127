"""What planners count in: whole grains of heads, columns and vocabulary, and the bytes that devices have for them."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.memory import COMPUTE_BYTES, memory_use
from coordinator.planners.base import PlanRequest
from hearth.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_to_items
from hearth.model.sharding import chunk_weights
from hearth.plan import Strategy, TransformerPlan


def body_of(
    request: PlanRequest,
    strategy: Strategy,
    groups: Sequence[int],
    columns: Sequence[int],
    vocabulary: Sequence[int],
    row_weights: Sequence[float] | None = None,
) -> TransformerPlan:
    """A plan of shares in grains: KV groups, MLP column grains, vocabulary grains. Without row weights, equal rows."""
    spec = request.spec
    group = spec.num_heads // spec.num_kv_heads
    return TransformerPlan(
        strategy=strategy,
        heads=tuple(share * group for share in groups),
        columns=grains_to_items(columns, spec.ffn_size, COLUMN_GRAIN),
        row_weights=tuple(row_weights or (1.0,) * len(groups)),
        vocabulary=grains_to_items(vocabulary, spec.vocab_size, VOCABULARY_GRAIN),
    )


class Budget:
    """Bytes that a device has for shares, in the linear form that the algorithm needs; never less than the truth."""

    def __init__(self, request: PlanRequest, strategy: Strategy) -> None:
        spec, seq_len = request.spec, request.seq_len
        num_ranks = len(request.cluster.devices)
        empty = TransformerPlan(
            strategy=strategy,
            heads=(0,) * num_ranks,
            columns=(0,) * num_ranks,
            row_weights=(1.0,) * num_ranks,
            vocabulary=(0,) * num_ranks,
        )
        self._left = [
            device.budget_bytes - memory_use(spec, empty, rank, seq_len).total
            for rank, device in enumerate(request.cluster.devices)
        ]
        group = spec.num_heads // spec.num_kv_heads
        head_activations = group * (4 * seq_len * spec.head_dim + seq_len * seq_len)
        head_weights = chunk_weights(spec, "qkv") + chunk_weights(spec, "out")
        self.head_grain = (spec.num_layers * head_weights + head_activations) * COMPUTE_BYTES
        column_activations = 2 * seq_len * min(COLUMN_GRAIN, spec.ffn_size)
        self.column_grain = (spec.num_layers * chunk_weights(spec, "mlp") + column_activations) * COMPUTE_BYTES
        self.vocabulary_grain = chunk_weights(spec, "vocabulary") * COMPUTE_BYTES

    def left(self, device: int, a: float = 0.0, b: float = 0.0, v: float = 0.0) -> float:
        used = a * self.head_grain + b * self.column_grain + v * self.vocabulary_grain
        return max(self._left[device] - used, 0.0)

    def total(self, device: int) -> int:
        """Bytes of a device for shares of all kinds."""
        return max(self._left[device], 0)

    def missing(self, groups: int, columns: int, vocabulary: int) -> int:
        """How many bytes all devices together lack for the whole model; at least one, since grains may not fit either."""
        wanted = groups * self.head_grain + columns * self.column_grain + vocabulary * self.vocabulary_grain
        return max(wanted - sum(self.total(device) for device in range(len(self._left))), 1)
