"""The ONNX nodes of one vertex of a task graph.

A vertex first puts together the regions that it reads, from blocks of other vertices or of inputs, and then computes: one
node, or a few, such as the transposition of heads around a product. A complex tensor has a last axis of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tools.bench.tensor.sharding import CutOperator, CutTensor, Read, ShardedGraph, Vertex

SCALE = "scale"  # an input of the request, see `_operands`
_MASKED = -1e9  # added to the scores of later positions


class NodeWriter:
    """Writes a graph's vertices as nodes. Nodes of a vertex begin with its name, and its result has its name."""

    def __init__(self, graph: ShardedGraph) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.uses_scale = False
        self._graph = graph
        self._vertex = ""
        self._first = 0  # of the vertex's nodes

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node. Returns the name of its first result; the others follow by number."""
        prefix = f"{self._vertex}/{len(self.nodes) - self._first}"
        names = [prefix, *(f"{prefix}.{number}" for number in range(1, outputs))]
        self.nodes.append(helper.make_node(kind, inputs, names, prefix, **attributes))
        return prefix

    def integers(self, *values: int) -> str:
        """The name of a constant, of one axis."""
        return self._constant(f"int64{list(values)}", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """The name of a constant without axes."""
        return self._constant(f"float32({value!r})", np.array(value, np.float32))

    def write(self, vertex: Vertex) -> None:
        """Add the nodes of a vertex."""
        self._vertex, self._first = vertex.name, len(self.nodes)
        if vertex.joins:
            self.add(vertex.kind, *(self._graph.vertices[join].name for join in vertex.joins))
        else:
            operator = self._graph.operators[vertex.operator]
            operands = self._operands(vertex)
            if operator.constant is not None:
                operands.append(self.number(operator.constant))
            result = _KERNELS.get(operator.kind, _elementwise)(self, operator, vertex, operands)
            if len(self.nodes) == self._first:  # the region itself is the result
                self.add("Identity", result)
        self.nodes[-1].output[0] = self.nodes[-1].name = vertex.name

    def _operands(self, vertex: Vertex) -> list[str]:
        """What the vertex reads. If these are weights only, the first is multiplied by `SCALE`.

        Otherwise its result would be constant, and so computed when the file is loaded instead of in every request.
        """
        found = [self._region(read) for read in vertex.reads]
        if all(self._graph.tensors[read.tensor].is_weight for read in vertex.reads):
            found[0], self.uses_scale = self.add("Mul", found[0], SCALE), True
        return found

    def _region(self, read: Read) -> str:
        tensor = self._graph.tensors[read.tensor]
        parts = {block: self._part(tensor, block, read) for block in tensor.overlapping(read.spans)}
        for axis in reversed(range(len(tensor.extents))):  # join the last axis first, then rows of such blocks
            rows: dict[tuple[int, ...], list[str]] = {}
            for block, name in parts.items():
                rows.setdefault(block[:axis], []).append(name)
            parts = {
                block: names[0] if len(names) == 1 else self.add("Concat", *names, axis=axis)
                for block, names in rows.items()
            }
        return parts[()]

    def _part(self, tensor: CutTensor, block: tuple[int, ...], read: Read) -> str:
        """The part of a block that lies in the region."""
        made = tensor.vertices
        name = self._graph.vertices[made[block]].name if made else tensor.block_name(block)
        spans = []
        for (first, end), piece, size in zip(read.spans, block, tensor.block_shape, strict=True):
            begin = piece * size
            spans.append((max(first - begin, 0), min(end - begin, size)))
        cut = [axis for axis, span in enumerate(spans) if span != (0, tensor.block_shape[axis])]
        if not cut:
            return name
        starts, ends = (self.integers(*(spans[axis][side] for axis in cut)) for side in (0, 1))
        return self.add("Slice", name, starts, ends, self.integers(*cut))

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        self.constants.setdefault(name, numpy_helper.from_array(value, name))
        return name


# Adds a vertex's nodes, given the names of its operands; returns the name of the result.
_Kernel = Callable[[NodeWriter, CutOperator, Vertex, Sequence[str]], str]


def _elementwise(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    """One node of this kind; operands that lack axes of the result are broadcast."""
    aligned = list(operands)
    for number, (_, access) in enumerate(operator.reads):
        missing = [axis for axis, index in enumerate(operator.output) if index not in access]
        if missing != list(range(len(missing))):  # leading axes need no help
            aligned[number] = writer.add("Unsqueeze", operands[number], writer.integers(*missing))
    return writer.add(operator.kind, *aligned)


def _cast(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Cast", *operands, to=TensorProto.FLOAT)


def _silu(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Mul", operands[0], writer.add("Sigmoid", operands[0]))


def _rsqrt(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Reciprocal", writer.add("Sqrt", operands[0]))


def _reduce(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    axes = [axis for axis, index in enumerate(operator.axes(0)) if index not in tuple(operator.output)]
    if operator.kind == "ReduceSum":  # its axes are an operand from operator set 13 on
        return writer.add("ReduceSum", operands[0], writer.integers(*axes), keepdims=0)
    return writer.add(operator.kind, operands[0], axes=axes, keepdims=0)


def _split_heads(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Reshape", operands[0], writer.integers(0, vertex.shape[1], -1))


def _to_complex(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Reshape", operands[0], writer.integers(0, 0, -1, 2))


def _from_complex(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Reshape", operands[0], writer.integers(0, 0, -1))


def _flatten(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Reshape", operands[0], writer.integers(0, -1))


def _rotate(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    """The complex product of [s, H, c, 2] and [s, c, 2]."""
    x, by = operands[0], writer.add("Unsqueeze", operands[1], writer.integers(1))
    real, by_real = writer.add("Split", x, axis=3, outputs=2), writer.add("Split", by, axis=3, outputs=2)
    imaginary, by_imaginary = f"{real}.1", f"{by_real}.1"
    first = writer.add("Sub", writer.add("Mul", real, by_real), writer.add("Mul", imaginary, by_imaginary))
    second = writer.add("Add", writer.add("Mul", real, by_imaginary), writer.add("Mul", imaginary, by_real))
    return writer.add("Concat", first, second, axis=3)


def _scores(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    heads = writer.integers(0, vertex.shape[0], -1)
    query, key = (writer.add("Reshape", operand, heads) for operand in operands)
    query = writer.add("Transpose", query, perm=[1, 0, 2])
    return writer.add("MatMul", query, writer.add("Transpose", key, perm=[1, 2, 0]))


def _attend(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    value = writer.add("Reshape", operands[1], writer.integers(0, vertex.shape[0], -1))
    return writer.add("MatMul", operands[0], writer.add("Transpose", value, perm=[1, 0, 2]))


def _join_heads(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    rows = writer.add("Transpose", operands[0], perm=[1, 0, 2])
    return writer.add("MatMul", writer.add("Reshape", rows, writer.integers(0, -1)), operands[1])


def _matmul(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("MatMul", *operands)


def _causal_mask(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    rows = writer.add("Unsqueeze", operands[0], writer.integers(1))
    later = writer.add("Greater", operands[1], rows)
    return writer.add("Where", later, writer.number(_MASKED), writer.number(0.0))


def _select(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Gather", *operands, axis=0)


def _last_row(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return operands[0]


def _squeeze(writer: NodeWriter, operator: CutOperator, vertex: Vertex, operands: Sequence[str]) -> str:
    return writer.add("Squeeze", operands[0], writer.integers(0))


_KERNELS: Mapping[str, _Kernel] = {
    "Attend": _attend, "Cast": _cast, "CausalMask": _causal_mask, "Flatten": _flatten, "FromComplex": _from_complex,
    "JoinHeads": _join_heads, "LastRow": _last_row, "MatMul": _matmul, "ReduceMax": _reduce, "ReduceMean": _reduce,
    "ReduceSum": _reduce, "Rotate": _rotate, "Rsqrt": _rsqrt, "Scores": _scores, "Select": _select, "Silu": _silu,
    "SplitHeads": _split_heads, "Squeeze": _squeeze, "ToComplex": _to_complex,
}  # fmt: skip
