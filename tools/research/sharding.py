"""Operators cut into shards, by the rule behind the task graphs of Doppler's evaluation (arXiv 2505.23131). Pure.

An operator has an index space (a matrix product: i, j, k) and a number of equal pieces of each index. Its joins are all
combinations of pieces. If an index is not in the output, the joins are partial results, and each output block gets one
formation that combines the joins of that block, even when there is only one. A shard depends on a block of an input if the
region that it reads overlaps the block. Inputs of the graph are cut into blocks too, but are not placed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor

# Bytes of a result's element. A complex number counts as one element, as in the authors' files, though it has 8 bytes.
_RESULT_BYTES = 4
_BYTES = {"float32": 4, "complex64": 8, "int64": 8}  # of an input's element
# Floating point operations per element of an operator's index space: of products, and of a mask; 1 for all other kinds.
_FLOPS = {"MatMul": 2.0, "JoinHeads": 2.0, "Scores": 2.0, "Attend": 2.0, "CausalMask": 0.0}

Block = tuple[int, ...]  # for each index or axis, the number of the piece
Span = tuple[int, int]  # elements [first, end) of an axis
# How an operator reads an axis of a tensor: cut as one of its indices, whole (None), or always the same span. An index may
# have another extent than the axis: index H (heads) cuts the axis of H * d columns into equal parts.
Access = str | Span | None


class Read(NamedTuple):
    """A region of a tensor: for each axis a span."""

    tensor: str
    spans: tuple[Span, ...]


class Vertex(NamedTuple):
    """One task: a join, or a formation if `joins` is not empty. It produces one block."""

    operator: str
    kind: str  # of a join the operator's kind, of a formation Sum, Max or Mean
    block: Block  # pieces of the operator's indices, of a formation those of the output only
    shape: tuple[int, ...]  # of the block that it produces
    reads: tuple[Read, ...]  # of a join
    joins: tuple[int, ...]  # vertices that a formation combines
    flops: float
    published_cost: int  # of the authors' files: elements of the index space of the whole, uncut operator

    @property
    def name(self) -> str:
        """Unique in the graph: the group and the block."""
        return f"{self.group}[{','.join(map(str, self.block))}]"

    @property
    def group(self) -> str:
        """The operator, or its formations: what EnumerativeOptimizer places together."""
        return f"{self.operator}.{self.kind}" if self.joins else self.operator


@dataclass(frozen=True)
class CutTensor:
    """A tensor of equal blocks, each produced by a vertex; `vertices` of an input is empty."""

    name: str
    extents: tuple[int, ...]
    pieces: tuple[int, ...]
    vertices: Mapping[Block, int] = field(default_factory=dict)
    is_weight: bool = False
    dtype: str = "float32"  # complex64: its arrays have another axis of two numbers

    @property
    def num_block_bytes(self) -> int:
        """Bytes of a block in memory."""
        return math.prod(self.block_shape) * _BYTES[self.dtype]

    @property
    def blocks(self) -> Iterator[Block]:
        return itertools.product(*map(range, self.pieces))

    @property
    def block_shape(self) -> tuple[int, ...]:
        return tuple(extent // pieces for extent, pieces in zip(self.extents, self.pieces, strict=True))

    def block_name(self, block: Block) -> str:
        """Name of a block of an input."""
        return f"{self.name}[{','.join(map(str, block))}]"

    def overlapping(self, spans: Sequence[Span]) -> list[Block]:
        """Blocks that a region overlaps, in row-major order."""
        sizes = zip(spans, self.block_shape, strict=True)
        return list(itertools.product(*(range(first // size, -(-end // size)) for (first, end), size in sizes)))


class ShardedGraph:
    """A task graph under construction; vertices are in topological order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.vertices: list[Vertex] = []
        self.tensors: dict[str, CutTensor] = {}

    @property
    def inputs(self) -> tuple[CutTensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if not tensor.vertices)

    @property
    def num_inputs(self) -> int:
        """Number of blocks of inputs."""
        return sum(math.prod(tensor.pieces) for tensor in self.inputs)

    @property
    def published_costs(self) -> tuple[int, ...]:
        """By vertex, the cost in the authors' files; sending its result costs 4 times as much there."""
        return tuple(vertex.published_cost for vertex in self.vertices)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The vertices of each operator, then its formations, in topological order (meta-operators of the paper)."""
        found: dict[str, list[int]] = {}
        for index, vertex in enumerate(self.vertices):
            found.setdefault(vertex.group, []).append(index)
        return tuple(map(tuple, found.values()))

    def add_input(
        self, name: str, extents: Sequence[int], pieces: Sequence[int], is_weight: bool = True, dtype: str = "float32"
    ) -> str:
        """Add an input: a weight, or a tensor of the request. Returns its name. Raises ValueError, as `add`."""
        _check_divisible(name, extents, pieces)
        self.tensors[name] = CutTensor(name, tuple(extents), tuple(pieces), is_weight=is_weight, dtype=dtype)
        return name

    def add(
        self,
        name: str,
        kind: str,
        space: Mapping[str, int],
        pieces: Mapping[str, int],
        reads: Sequence[tuple[str, Sequence[Access]]],
        output: str,
        combine: str = "Sum",
        dtype: str = "float32",
    ) -> str:
        """Add an operator, cut as `pieces` says. Returns its name, which is also that of its result.

        `space`: extent of each index. `pieces`: of the indices that are cut. `reads`: tensors and how each axis is read.
        `output`: the indices of the result's axes. `combine`: kind of the formations.
        Raises ValueError if pieces do not divide an extent.
        """
        extents, cuts = tuple(space.values()), tuple(pieces.get(index, 1) for index in space)
        _check_divisible(name, extents, cuts)
        axes = [list(space).index(index) for index in output]
        shape = tuple(extents[axis] // cuts[axis] for axis in axes)
        shard_flops = _FLOPS.get(kind, 1.0) * math.prod(extents) / math.prod(cuts)
        joins: dict[Block, list[int]] = {}  # by output block
        for block in itertools.product(*map(range, cuts)):
            joins.setdefault(tuple(block[axis] for axis in axes), []).append(len(self.vertices))
            where = {index: (piece, cut) for index, piece, cut in zip(space, block, cuts, strict=True)}
            regions = tuple(self._region(tensor, access, where) for tensor, access in reads)
            self.vertices.append(Vertex(name, kind, block, shape, regions, (), shard_flops, math.prod(extents)))
        made = {block: indices[0] for block, indices in joins.items()}
        if len(output) < len(space):
            whole, part = math.prod(extents[axis] for axis in axes), math.prod(shape)
            for block, indices in joins.items():
                made[block] = len(self.vertices)
                flops = float(part * (len(indices) - 1))
                self.vertices.append(Vertex(name, combine, block, shape, (), tuple(indices), flops, whole))
        result = tuple(extents[axis] for axis in axes), tuple(cuts[axis] for axis in axes)
        self.tensors[name] = CutTensor(name, *result, made, dtype=dtype)
        return name

    def predecessors(self, vertex: int) -> tuple[int, ...]:
        """The vertices whose results a vertex reads, in increasing order."""
        found = set(self.vertices[vertex].joins)
        for read in self.vertices[vertex].reads:
            tensor = self.tensors[read.tensor]
            if tensor.vertices:
                found.update(tensor.vertices[block] for block in tensor.overlapping(read.spans))
        return tuple(sorted(found))

    def spec(self) -> GraphSpec:
        """The graph for planners. An operator is named after its vertex; blocks of weights are its parameters."""
        parameters, parameter_of = list[Parameter](), dict[str, int]()
        users: dict[str, list[int]] = {}  # by block of an input
        for index, vertex in enumerate(self.vertices):
            for read in vertex.reads:
                tensor = self.tensors[read.tensor]
                for block in [] if tensor.vertices else tensor.overlapping(read.spans):
                    users.setdefault(tensor.block_name(block), []).append(index)
        tensors = []
        for cut in self.inputs:
            for name in map(cut.block_name, cut.blocks):
                if cut.is_weight:
                    parameter_of[name] = len(parameters)
                    parameters.append(Parameter(name, cut.num_block_bytes))
                else:
                    tensors.append(
                        Tensor(name, cut.num_block_bytes, None, tuple(users[name]), cut.dtype, cut.block_shape)
                    )
        used = [list[int]() for _ in self.vertices]
        for name, index in parameter_of.items():
            for vertex_index in users[name]:
                used[vertex_index].append(index)
        consumers = [list[int]() for _ in self.vertices]
        for index in range(len(self.vertices)):
            for source in self.predecessors(index):
                consumers[source].append(index)
        for index, vertex in enumerate(self.vertices):
            num_bytes = math.prod(vertex.shape) * _RESULT_BYTES
            reached = tuple(consumers[index])
            tensors.append(
                Tensor(vertex.name, num_bytes, index, reached, shape=vertex.shape, is_output=not consumers[index])
            )
        operators = (
            Operator(vertex.name, vertex.kind, vertex.flops, tuple(sorted(parameters_of)), vertex.group)
            for vertex, parameters_of in zip(self.vertices, used, strict=True)
        )
        return GraphSpec(self.name, tuple(operators), tuple(tensors), tuple(parameters))

    def _region(self, tensor: str, access: Sequence[Access], where: Mapping[str, tuple[int, int]]) -> Read:
        spans = []
        for axis, extent in zip(access, self.tensors[tensor].extents, strict=True):
            if isinstance(axis, str):
                piece, cut = where[axis]
                spans.append((piece * extent // cut, (piece + 1) * extent // cut))
            else:
                spans.append(axis or (0, extent))
        return Read(tensor, tuple(spans))


def _check_divisible(name: str, extents: Sequence[int], pieces: Sequence[int]) -> None:
    for extent, cut in zip(extents, pieces, strict=True):
        if extent % cut:
            raise ValueError(f"{name}: {cut} pieces do not divide {extent} elements")
