"""Parts of a plan that every kind of model has: devices, memory, the wire format, the prediction. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from hearth.plan.value_formats import Values

# A wait for a peer may take this many times the predicted duration of the whole step or request ...
_TIMEOUT_FACTOR = 20.0
# ... and at least this long: the prediction knows nothing of background load, and heartbeats detect lost devices.
_MIN_TIMEOUT_SECONDS = 5.0


def timeout_seconds(predicted_seconds: float) -> float:
    """Timeout of a wait for a peer during an operation with this predicted duration."""
    return max(_MIN_TIMEOUT_SECONDS, _TIMEOUT_FACTOR * predicted_seconds)


class WireFormat(BaseModel, frozen=True):
    """How activations travel: the value format, and whether lz4 (after a byte shuffle) is applied."""

    values: Values = "exact"
    lz4: Literal["off", "on", "auto"] = "auto"


class MemoryUse(BaseModel, frozen=True):
    """Bytes that one device will hold, by kind."""

    weights: int = Field(ge=0)
    embeddings: int = Field(ge=0)
    activations: int = Field(ge=0)
    workspace: int = Field(ge=0)  # the process itself, torch and its GEMM buffers, one chunk while loading
    kv_cache: int = Field(default=0, ge=0)  # of all sequences that the plan has room for at once

    @property
    def total(self) -> int:
        return self.weights + self.embeddings + self.activations + self.workspace + self.kv_cache


class PlannedDevice(BaseModel, frozen=True):
    device_id: str
    name: str
    memory: MemoryUse
    budget_bytes: int = Field(ge=0)
    compute_seconds: float = Field(ge=0)  # busy time of this device in one step or request, under the simulator


class Prediction(BaseModel, frozen=True):
    """Seconds under the simulator: of one Transformer step of `seq_len` rows, or of one request to a graph."""

    latency_seconds: float = Field(ge=0)  # of one step or request alone
    compute_seconds: float = Field(ge=0)  # the busiest device
    transfer_seconds: float = Field(ge=0)  # the busiest side of a link
    bottleneck_seconds: float = Field(ge=0)  # per request of a full pipeline: the busiest device or side of a link
    decode_seconds: float = Field(default=0.0, ge=0)  # one token of one sequence of a decoder
    bound_seconds: float | None = Field(default=None, ge=0)  # no plan is better in the planner's objective, where known
    proven_optimal: bool = False


class Alternative(BaseModel, frozen=True):
    """A candidate that the planner priced or ruled out, and why it was not chosen."""

    strategy: str
    predicted_seconds: float | None
    reason: str
