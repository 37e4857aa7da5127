"""Files that hold a graph: an ONNX model, a graph without weights, or a published placement problem.

A graph without weights is for planning only. It is a JSON description: operators with their costs, and edges.
`{"name", "nodes": [{"id", "op", "name", "out_shape", "out_bytes", "param_bytes", "flops"}], "edges": [[source, target]]}`:
ids are 0..n-1 in topological order, an edge carries the `out_bytes` of its source, and a node without outgoing edges is an
output. An input layer is an ordinary operator without cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from coordinator.models.file_kinds import file_kind, read_json_file, why_wrong_kind
from coordinator.models.limits import MAX_GRAPH_BYTES, MAX_JSON_OPERATORS
from hearth.errors import BadModelFile, BadSetting
from hearth.plan.graph import CutOperator
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor
from hearth.validation import first_error
from hearth.wire.messages import ElementType

if TYPE_CHECKING:
    from coordinator.models.onnx.reader import OnnxModel

ModelFileKind = Literal["transformer", "onnx", "graph", "instance"]


class _Node(BaseModel):
    id: int
    op: str
    name: str
    out_bytes: int = Field(ge=0)
    out_shape: tuple[int, ...] = ()
    param_bytes: int = Field(default=0, ge=0)
    flops: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class _Graph(BaseModel):
    name: str
    nodes: tuple[_Node, ...] = Field(min_length=1, max_length=MAX_JSON_OPERATORS)
    edges: tuple[tuple[int, int], ...]


def read_graph_json(path: Path) -> GraphSpec:
    """Read the graph. Raises BadModelFile, which names the faulty field, node or edge."""

    def bad(reason: str) -> BadModelFile:
        return BadModelFile(path=str(path), reason=reason)

    try:
        graph = _Graph.model_validate(_read_json(path))
    except ValidationError as error:
        raise bad(first_error(error)) from None
    for index, node in enumerate(graph.nodes):
        if node.id != index:
            raise bad(f"node {index} has the id {node.id}")
    if len({node.name for node in graph.nodes}) < len(graph.nodes):
        raise bad("two of its nodes have the same name")
    consumers: list[set[int]] = [set() for _ in graph.nodes]
    for source, target in graph.edges:
        if not 0 <= source < target < len(graph.nodes):
            raise bad(f"the edge [{source}, {target}] does not go from a node to a later one")
        if target in consumers[source]:
            raise bad(f"the edge [{source}, {target}] appears twice")
        consumers[source].add(target)
    operators, tensors, weights = [], [], list[Parameter]()
    for node, node_consumers in zip(graph.nodes, consumers, strict=True):
        used: tuple[int, ...] = ()
        if node.param_bytes:
            used = (len(weights),)
            weights.append(Parameter(f"{node.name}.weights", node.param_bytes))
        operators.append(Operator(node.name, node.op, node.flops, used))
        consumer_ids, is_output = tuple(sorted(node_consumers)), not node_consumers
        tensors.append(
            Tensor(node.name, node.out_bytes, node.id, consumer_ids, shape=node.out_shape, is_output=is_output)
        )
    return GraphSpec(graph.name, tuple(operators), tuple(tensors), tuple(weights))


@dataclass(frozen=True)
class GraphFile:
    """A graph and its file. `model` is set if the graph can be run, that is, for an ONNX file."""

    path: Path
    spec: GraphSpec
    model: OnnxModel | None = None

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint if self.model is not None else ""

    @property
    def tiles(self) -> tuple[CutOperator, ...]:
        """The operators of the file that are cut into tiles."""
        return self.model.tiles if self.model is not None else ()

    def check_types(self) -> None:
        """Raise BadModelFile for an input or an output whose type no request can carry."""
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            if tensor.dtype not in get_args(ElementType) or tensor.dtype == "bfloat16":
                reason = f"its tensor {tensor.name} is of {tensor.dtype}, which numpy lacks and requests cannot carry"
                raise BadModelFile(path=str(self.path), reason=reason)


def _read_json(path: Path) -> Any:
    """The content of a graph or a placement problem. Raises BadModelFile."""
    return read_json_file(
        path, lambda reason: BadModelFile(path=str(path), reason=f"it {reason}"), path.parent, MAX_GRAPH_BYTES
    )


def model_file_kind(path: Path) -> ModelFileKind:
    """The kind of a MODEL argument on the command line. Raises BadModelFile for a .json that cannot be read."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix not in (".onnx", ".json"):
        return "transformer"
    if suffix == ".onnx":
        return "onnx"
    content = _read_json(path)
    if file_kind(content) == "problem":
        return "instance"
    if reason := why_wrong_kind(content, "graph"):
        raise BadModelFile(path=str(path), reason=f"it {reason}")
    return "graph"


def read_graph_file(path: Path, dims: Mapping[str, int]) -> GraphFile:
    """Read the graph; for an ONNX file, `dims` fixes its open dimensions.

    Raises BadModelFile, BadSetting (dimensions that it does not have), DynamicShape and UnsupportedOperator.
    """
    if model_file_kind(path) == "onnx":
        from coordinator.models.onnx.reader import read_onnx

        model = read_onnx(path, dims)
        return GraphFile(path, model.spec, model)
    if dims:
        raise BadSetting(setting="--dim", reason=f"{path} has no dynamic dimensions")
    return GraphFile(path, read_graph_json(path))


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Parse dimensions such as `batch=1`. Raises BadSetting."""
    dims: dict[str, int] = {}
    for text in texts:
        name, separator, size = text.rpartition("=")
        if not separator or not name.strip() or not size.strip().isdecimal() or int(size) < 1:
            raise BadSetting(setting="--dim", reason=f"'{text}' is not of the form NAME=N, such as batch=1")
        dims[name.strip()] = int(size)
    return dims
