"""The body of a plan for an ONNX graph: segments of operators, each placed on one device. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from hearth.plan.common import ValueFormatName

Objective = Literal["latency", "throughput"]

# Of the bytes of all copies, what a plan must have for weights if they are copied; planner and worker count alike within 5 %.
_COPIES_SHARE = 0.95
_MAX_NAMES = 1 << 20  # operators or tensors; the largest exported graphs have tens of thousands


class CutOperator(BaseModel, frozen=True):
    """An operator of the file that is cut into tiles: into how many pieces, by axis of its index space."""

    operator: int = Field(ge=0)
    pieces: tuple[Annotated[int, Field(ge=1)], ...] = Field(max_length=64)


class GraphModel(BaseModel, frozen=True):
    """Identity of an ONNX graph, and the names of its input and output tensors.

    With `tiles`, the plan places the operators of the graph that the file's graph becomes when these operators are cut.
    """

    name: str
    sha256: str  # of the ONNX file, its external data and the tiles; empty for a graph without weights
    inputs: tuple[str, ...] = Field(max_length=_MAX_NAMES)
    outputs: tuple[str, ...] = Field(max_length=_MAX_NAMES)
    tiles: tuple[CutOperator, ...] = Field(default=(), max_length=_MAX_NAMES)

    @model_serializer(mode="wrap")
    def _omit_no_tiles(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans of whole operators have the bytes, and so the hash, that they had before there were tiles."""
        fields: dict[str, Any] = dump(self)
        return fields if self.tiles else {name: value for name, value in fields.items() if name != "tiles"}


class Segment(BaseModel, frozen=True):
    """Operators that run as one onnxruntime session on one device. `inputs` and `outputs` name tensors of the graph.

    `seconds` is the predicted compute time. An output goes to every segment that consumes it, and to the client if it is
    an output of the graph.
    """

    operators: tuple[int, ...] = Field(min_length=1, max_length=_MAX_NAMES)
    rank: int = Field(ge=0)
    inputs: tuple[str, ...] = Field(max_length=_MAX_NAMES)
    outputs: tuple[str, ...] = Field(max_length=_MAX_NAMES)
    seconds: float = Field(default=0.0, ge=0)


class GraphSegments(BaseModel, frozen=True, extra="forbid"):
    """Segments in topological order: each consumes inputs of the graph or outputs of earlier segments."""

    kind: Literal["graph"] = "graph"
    objective: Objective
    segments: tuple[Segment, ...] = Field(min_length=1, max_length=4096)

    def segments_of(self, rank: int) -> tuple[Segment, ...]:
        """The segments on one rank, in the plan's order."""
        return tuple(segment for segment in self.segments if segment.rank == rank)

    def ranks_of_operators(self) -> dict[int, int]:
        """The rank that runs each operator of the graph."""
        return {operator: segment.rank for segment in self.segments for operator in segment.operators}

    def targets(self, tensor: str) -> tuple[int, ...]:
        """The ranks whose segments consume a tensor."""
        return tuple(sorted({segment.rank for segment in self.segments if tensor in segment.inputs}))

    def values_on(self, source: int, target: int, values: ValueFormatName) -> ValueFormatName:
        """The value format on one link, given the plan's value format `values`: always `values`."""
        return values

    def duration_ratio(self, num_rows: int) -> float:
        """Ratio of a request's duration to the predicted one; always 1, since shapes are fixed."""
        return 1.0

    def check(self, model: object, num_ranks: int) -> None:
        """Raise ValueError if the body does not fit the model or the number of devices."""
        if not isinstance(model, GraphModel):
            raise ValueError("the body divides a graph, but the model is a Transformer")
        known, placed = set(model.inputs), set[int]()
        for index, segment in enumerate(self.segments):
            if segment.rank >= num_ranks:
                raise ValueError(f"segment {index} is on rank {segment.rank} of {num_ranks}")
            if unknown := [name for name in segment.inputs if name not in known]:
                raise ValueError(f"segment {index} takes {unknown[0]}, which no earlier segment produces")
            if twice := placed.intersection(segment.operators):
                raise ValueError(f"operator {min(twice)} is in two segments")
            placed.update(segment.operators)
            known.update(segment.outputs)
        if unknown := [name for name in model.outputs if name not in known]:
            raise ValueError(f"no segment produces the output {unknown[0]}")


def weights_stay_in_place(planned_bytes: int, copied_bytes: int) -> bool:
    """Whether weights are used where they are mapped, since a plan has no room for a copy per operator that uses them.

    `planned_bytes`: what the plan has for weights on a device; 0: it does not say. Weights that segments share are then in
    memory once. Otherwise kernels pack their own copies, which are faster to read.
    """
    return 0 < planned_bytes < _COPIES_SHARE * copied_bytes
