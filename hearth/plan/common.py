"""Parts of a plan that are common to all kinds of model: value formats, wire format, devices, memory, prediction. Pure.

A new value format of activations on the wire needs one `ValueFormat` here and its conversion in `hearth.wire.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from pydantic import BaseModel, Field

ValueFormatName = Literal["exact", "bf16", "fp16", "int8"]


class ValueFormat(NamedTuple):
    """Encoding of float32 values on the wire. `code` is part of the protocol."""

    name: ValueFormatName
    code: int
    bytes_per_value: int
    bytes_per_row: int = 0  # in addition to the values: the scale of a quantised row

    def num_bytes(self, num_values: int, num_rows: int) -> int:
        """Bytes of a float32 tensor of `num_rows` rows (all axes but the last) on the wire, before lz4."""
        return num_values * self.bytes_per_value + num_rows * self.bytes_per_row


EXACT = ValueFormat("exact", 0, 4)
BF16 = ValueFormat("bf16", 1, 2)
FP16 = ValueFormat("fp16", 2, 2)
INT8 = ValueFormat("int8", 3, 1, 4)

VALUE_FORMATS: Mapping[ValueFormatName, ValueFormat] = {each.name: each for each in (EXACT, BF16, FP16, INT8)}
VALUE_FORMAT_NAMES: tuple[ValueFormatName, ...] = get_args(ValueFormatName)
BYTES_PER_VALUE: Mapping[ValueFormatName, int] = {name: each.bytes_per_value for name, each in VALUE_FORMATS.items()}
_BY_CODE = {each.code: each for each in VALUE_FORMATS.values()}


def format_by_code(code: int) -> ValueFormat:
    """The format with this wire code. Raises KeyError."""
    return _BY_CODE[code]


class WireFormat(BaseModel, frozen=True):
    """Encoding of activations on the wire: the value format, and whether lz4 is applied after a byte shuffle."""

    values: ValueFormatName = "exact"
    lz4: Literal["off", "on", "auto"] = "auto"


# Timeout of a wait for a peer, as a multiple of the predicted duration of the whole step or request, and its minimum. Generous:
# predictions ignore background load, and lost devices are detected by heartbeats anyway.
_TIMEOUT_FACTOR = 20.0
_MIN_TIMEOUT_SECONDS = 5.0


def timeout_seconds(predicted_seconds: float) -> float:
    """Timeout in seconds of a wait for a peer during an operation with this predicted duration."""
    return max(_MIN_TIMEOUT_SECONDS, _TIMEOUT_FACTOR * predicted_seconds)


class MemoryUse(BaseModel, frozen=True):
    """Predicted memory use of one device, in bytes by purpose."""

    weights: int = Field(ge=0)
    embeddings: int = Field(ge=0)
    activations: int = Field(ge=0)
    workspace: int = Field(ge=0)  # the process, torch, its GEMM buffers, and one chunk while loading
    kv_cache: int = Field(default=0, ge=0)  # of all sequences that the plan reserves room for
    draft: int = Field(default=0, ge=0)  # of the draft model: its weights, activations and KV cache

    @property
    def total(self) -> int:
        """Bytes for all purposes together."""
        return self.weights + self.embeddings + self.activations + self.workspace + self.kv_cache + self.draft


class PlannedDevice(BaseModel, frozen=True):
    """A device of a plan: its predicted memory use, its memory limit in bytes, and its predicted compute time."""

    device_id: str
    name: str
    memory: MemoryUse
    budget_bytes: int = Field(ge=0)
    compute_seconds: float = Field(ge=0)  # simulated busy time of this device in one step or request


class Prediction(BaseModel, frozen=True):
    """Simulated seconds of one transformer step of `seq_len` rows, or of one request to an ONNX graph."""

    latency_seconds: float = Field(ge=0)  # of one step or request with no others in flight
    compute_seconds: float = Field(ge=0)  # of the busiest device
    transfer_seconds: float = Field(ge=0)  # of the busiest sending or receiving side of a network interface
    # Per request of a full pipeline: of the busiest device, or sending or receiving side of a network interface.
    bottleneck_seconds: float = Field(ge=0)
    prompt_seconds: float = Field(default=0.0, ge=0)  # the expected prompt of a decoder, in steps
    decode_seconds: float = Field(default=0.0, ge=0)  # one token of one sequence of a decoder
    bound_seconds: float | None = Field(default=None, ge=0)  # lower bound of the planner's objective, if known
    proven_optimal: bool = False


class Alternative(BaseModel, frozen=True):
    """A candidate plan that was not chosen: its predicted time, if it was priced, and the reason."""

    strategy: str
    predicted_seconds: float | None
    reason: str
