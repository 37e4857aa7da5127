"""A plan for a graph of operators: which device runs which segments. Printed, saved as JSON, loaded again. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hearth.errors import BadPlan
from hearth.plan.transformer import Alternative, MemoryUse, WireFormat, patience_seconds
from hearth.validation import first_error

Objective = Literal["latency", "throughput"]


class Segment(BaseModel):
    """Operators that run as one onnxruntime session on one device. `inputs` and `outputs` name tensors of the graph.

    `seconds` is its predicted compute time. An output goes to every segment that takes it, and to the client where the
    graph gives it out.
    """

    model_config = ConfigDict(frozen=True)

    operators: tuple[int, ...] = Field(min_length=1)
    rank: int = Field(ge=0)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seconds: float = Field(default=0.0, ge=0)


class GraphDevice(BaseModel):
    model_config = ConfigDict(frozen=True)

    device_id: str
    name: str
    memory: MemoryUse
    budget_bytes: int = Field(ge=0)
    compute_seconds: float = Field(ge=0)  # busy time of one request, as the simulator prices it


class GraphPrediction(BaseModel):
    """Of one request alone, and of a full pipeline (per request: the busiest device or link)."""

    model_config = ConfigDict(frozen=True)

    latency_seconds: float = Field(ge=0)
    bottleneck_seconds: float = Field(ge=0)
    bound_seconds: float | None = Field(default=None, ge=0)  # no plan can be better in the objective, if it is known
    proven_optimal: bool = False


class GraphPlan(BaseModel):
    """Segments in an order in which they can run: each takes tensors of segments before it, or the graph's inputs."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    kind: Literal["graph"] = "graph"
    epoch: int = Field(default=0, ge=0, lt=1 << 63)
    model: str
    model_hash: str = ""  # SHA-256 of the ONNX file and its external data; empty for a graph without weights
    objective: Objective
    planner: str
    devices: tuple[GraphDevice, ...] = Field(min_length=1, max_length=256)
    segments: tuple[Segment, ...] = Field(min_length=1, max_length=4096)
    inputs: tuple[str, ...]  # of the graph
    outputs: tuple[str, ...]
    wire: WireFormat = WireFormat()
    predicted: GraphPrediction
    alternatives: tuple[Alternative, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def wait_seconds(self) -> float:
        """How long a wait for a peer may last in one request, from the plan's own prediction."""
        return patience_seconds(self.predicted.latency_seconds)

    def with_epoch(self, epoch: int) -> GraphPlan:
        return self.model_copy(update={"epoch": epoch})

    def segments_of(self, rank: int) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.rank == rank)

    def targets(self, tensor: str) -> tuple[int, ...]:
        """The ranks whose segments take a tensor."""
        return tuple(sorted({segment.rank for segment in self.segments if tensor in segment.inputs}))

    @model_validator(mode="after")
    def _consistent(self) -> GraphPlan:
        known, placed = set(self.inputs), set[int]()
        for index, segment in enumerate(self.segments):
            if segment.rank >= self.num_ranks:
                raise ValueError(f"segment {index} is on rank {segment.rank} of {self.num_ranks}")
            if unknown := [name for name in segment.inputs if name not in known]:
                raise ValueError(f"segment {index} takes {unknown[0]}, which no segment before it makes")
            if twice := placed.intersection(segment.operators):
                raise ValueError(f"operator {min(twice)} stands in two segments")
            placed.update(segment.operators)
            known.update(segment.outputs)
        if unknown := [name for name in self.outputs if name not in known]:
            raise ValueError(f"no segment makes the output {unknown[0]}")
        if len({device.device_id for device in self.devices}) != self.num_ranks:
            raise ValueError("a device stands in the plan twice")
        return self


def graph_plan_from_json(text: str | bytes) -> GraphPlan:
    """Read a saved plan. Raises BadPlan that says which field is wrong."""
    try:
        return GraphPlan.model_validate_json(text)
    except ValidationError as error:
        raise BadPlan(reason=first_error(error, "the plan")) from None
