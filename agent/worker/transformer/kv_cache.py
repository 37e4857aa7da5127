"""KV cache of running sequences, for this rank's KV heads and layers."""

from __future__ import annotations

import torch
from torch import Tensor

from hearth.errors import StepFailed
from hearth.plan.geometry import Span
from hearth.plan.model_spec import ModelSpec
from hearth.wire.messages import NewSequence


class SequenceCache:
    """The KV cache and the tokens of one sequence. `length` of its `capacity` rows have been computed.

    One tensor holds all layers [layers, 2, kv heads, capacity, head_dim], so that the memory is freed at once.
    """

    def __init__(
        self, spec: ModelSpec, heads: int, new: NewSequence, device: torch.device, layers: Span | None = None
    ) -> None:
        """`heads` is the number of this rank's query heads; `layers` are its layers (None: all)."""
        layers = layers or Span(0, spec.num_layers)
        shape = (layers.size, 2, heads // spec.group_size, new.capacity, spec.head_dim)
        self._first_layer = layers.start
        self._store = torch.empty(shape, dtype=torch.float32, device=device)
        self.capacity = new.capacity
        self.sampling = new.sampling
        self.first_index = new.first_index
        self.length = 0
        self.tokens: list[int] = []
        self.num_prompt_tokens = new.num_prompt_tokens

    def extend(self, token_ids: tuple[int, ...]) -> None:
        """Append tokens, whose rows the next step computes. Raises StepFailed if the capacity is exceeded (a scheduler bug)."""
        if len(self.tokens) + len(token_ids) > self.capacity:
            raise StepFailed(
                device="this device",
                reason=f"{len(self.tokens) + len(token_ids)} tokens in a KV cache for {self.capacity}",
            )
        self.tokens.extend(token_ids)

    def store(self, layer: int, start: int, k_skd: Tensor, v_skd: Tensor) -> None:
        """Store the keys and values [s, kv heads, d] of rows from the position `start` on; `extend` has added their tokens."""
        rows = slice(start, start + k_skd.shape[0])
        layer -= self._first_layer
        self._store[layer, 0, :, rows] = k_skd.transpose(0, 1)
        self._store[layer, 1, :, rows] = v_skd.transpose(0, 1)

    def keys_and_values(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` rows: [kv heads, length, d] each."""
        layer -= self._first_layer
        return self._store[layer, 0, :, :length], self._store[layer, 1, :, :length]

    def advance(self) -> None:
        """Mark all rows as computed, at the end of a step."""
        self.length = len(self.tokens)
