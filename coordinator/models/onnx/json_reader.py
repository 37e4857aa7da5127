"""Read a GraphSpec from a JSON description: operators with their costs, and edges. For planning; it has no weights to run.

`{"name", "nodes": [{"id", "op", "name", "out_shape", "out_bytes", "param_bytes", "flops"}], "edges": [[source, target]]}`:
ids are 0..n-1 in topological order, an edge carries the `out_bytes` of its source, and a node without outgoing edges is an
output. An input layer is an ordinary operator without cost.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from coordinator.models.file_kinds import read_json_file
from hearth.errors import BadModelFile
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor
from hearth.validation import first_error

_MAX_OPERATORS = 100_000  # larger graphs are refused: networks have a few thousand, and planning time grows with them


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
    nodes: tuple[_Node, ...] = Field(min_length=1, max_length=_MAX_OPERATORS)
    edges: tuple[tuple[int, int], ...]


def read_graph_json(path: Path) -> GraphSpec:
    """Read the graph. Raises BadModelFile, which names the faulty field, node or edge."""

    def bad(reason: str) -> BadModelFile:
        return BadModelFile(path=str(path), reason=reason)

    try:
        graph = _Graph.model_validate(read_json_file(path, lambda reason: bad(f"it {reason}")))
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
