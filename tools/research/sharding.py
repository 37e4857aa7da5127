"""Operators cut into shards, by the rule behind the task graphs of Doppler's evaluation (arXiv 2505.23131). Pure.

An operator has an index space (a matrix product: i, j, k) and a number of equal pieces of each index. Its joins are all
combinations of pieces. If an index is not in the output, the joins are partial results, and each output block gets one
formation that combines the joins of that block, even when there is only one. A shard depends on a block of an input if the
region that it reads overlaps the block. Inputs of the graph are cut into blocks too, but are not placed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor

# Bytes of an element. A complex number of a result counts as one element, as in the authors' files, though it has 8 bytes.
_ELEMENT_BYTES = 4
# Floating point operations per element of an operator's index space: of products, and of a mask; 1 for all other kinds.
_FLOPS = {"MatMul": 2.0, "JoinHeads": 2.0, "Scores": 2.0, "Attend": 2.0, "CausalMask": 0.0}

Block = tuple[int, ...]  # for each index or axis, the number of the piece
Pieces = Mapping[str, int]  # of each index that is cut; others are whole
# How an operator reads an axis of a tensor: cut as one of its indices, whole (None), or always the same span, elements
# [first, end). An index may have another extent than the axis: index H (heads) cuts the axis of H * d columns.
Access = str | tuple[int, int] | None


class Vertex(NamedTuple):
    """One task: a join, or a formation. It produces one block."""

    name: str  # unique in the graph: the group and the block
    kind: str  # of a join the operator's kind, of a formation Sum, Max or Mean
    group: str  # the operator, or its formations: what EnumerativeOptimizer places together
    num_bytes: int  # of the block that it produces
    reads: tuple[int, ...]  # vertices, and ~i for block i of the inputs; in increasing order
    flops: float
    published_cost: int  # of the authors' files: elements of the index space of the whole, uncut operator


class InputBlock(NamedTuple):
    """A block of a weight, or of a tensor of the request."""

    name: str
    num_bytes: int
    is_weight: bool


class _CutTensor(NamedTuple):
    extents: tuple[int, ...]
    blocks: NDArray[np.int64]  # by piece of each axis: the vertex that produces it, or ~i for block i of the inputs

    def overlapping(self, access: Sequence[Access], pieces: Mapping[str, tuple[int, int]]) -> list[int]:
        """Blocks of the region that a shard reads. `pieces`: of the shard, by index: its number, of how many."""
        region = []
        for axis, extent, cut in zip(access, self.extents, self.blocks.shape, strict=True):
            first, end = axis if isinstance(axis, tuple) else (0, extent)
            if isinstance(axis, str):
                piece, count = pieces[axis]
                first, end = piece * extent // count, (piece + 1) * extent // count
            size = extent // cut
            region.append(slice(first // size, -(-end // size)))
        found: list[int] = self.blocks[tuple(region)].ravel().tolist()
        return found


class ShardedGraph:
    """A task graph under construction, with the extent of each index; vertices are in topological order."""

    def __init__(self, name: str, extents: Mapping[str, int]) -> None:
        self.name = name
        self.vertices: list[Vertex] = []
        self.inputs: list[InputBlock] = []
        self._extents = extents
        self._tensors: dict[str, _CutTensor] = {}

    def add_input(
        self, name: str, axes: str, pieces: Pieces, is_weight: bool = True, element_bytes: int = _ELEMENT_BYTES
    ) -> str:
        """Add an input with these indices as axes. Returns its name. Raises ValueError, as `add`."""
        extents, cuts = self._cut(name, axes, pieces)
        count, first = math.prod(cuts), len(self.inputs)
        num_bytes = math.prod(extents) // count * element_bytes
        for block in itertools.product(*map(range, cuts)):
            self.inputs.append(InputBlock(_name(name, block), num_bytes, is_weight))
        self._tensors[name] = _CutTensor(extents, ~np.arange(first, first + count).reshape(cuts))
        return name

    def add(
        self,
        name: str,
        kind: str,
        output: str,
        pieces: Pieces,
        *reads: tuple[str, Sequence[Access]],
        summed: str = "",
        combine: str = "Sum",
    ) -> str:
        """Add an operator, cut as `pieces` says. Returns its name, which is also that of its result.

        Its index space has the indices of the result's axes (`output`), those that are `summed` though no tensor is read by
        them, and those of its `reads`: tensors, and how each axis is read. `combine`: kind of the formations.
        Raises ValueError if pieces do not divide an extent.
        """
        read_by = [axis for _, access in reads for axis in access if isinstance(axis, str)]
        space = "".join(dict.fromkeys([*output, *read_by, *summed]))
        extents, cuts = self._cut(name, space, pieces)
        rank, elements = len(output), math.prod(extents)
        num_bytes = math.prod(extents[:rank]) // math.prod(cuts[:rank]) * _ELEMENT_BYTES
        flops = _FLOPS.get(kind, 1.0) * elements / math.prod(cuts)
        made = np.full(cuts[:rank], -1)
        joins: dict[Block, list[int]] = {}  # by output block
        for block in itertools.product(*map(range, cuts)):
            of_index = dict(zip(space, zip(block, cuts, strict=True), strict=True))
            found = {each for tensor, access in reads for each in self._tensors[tensor].overlapping(access, of_index)}
            made[block[:rank]] = len(self.vertices)
            joins.setdefault(block[:rank], []).append(len(self.vertices))
            vertex = Vertex(_name(name, block), kind, name, num_bytes, tuple(sorted(found)), flops, elements)
            self.vertices.append(vertex)
        if len(space) > rank:
            group, elements = f"{name}.{combine}", math.prod(extents[:rank])
            for block, parts in joins.items():
                made[block] = len(self.vertices)
                flops = float(num_bytes // _ELEMENT_BYTES * (len(parts) - 1))
                vertex = Vertex(_name(group, block), combine, group, num_bytes, tuple(parts), flops, elements)
                self.vertices.append(vertex)
        self._tensors[name] = _CutTensor(extents[:rank], made)
        return name

    def spec(self) -> GraphSpec:
        """The graph for planners. An operator is named after its vertex; blocks of weights are its parameters."""
        users: dict[int, list[int]] = {}  # by vertex, and ~block of an input
        for index, vertex in enumerate(self.vertices):
            for read in vertex.reads:
                users.setdefault(read, []).append(index)
        weights = [~index for index, block in enumerate(self.inputs) if block.is_weight]
        parameter_of = {read: index for index, read in enumerate(weights)}
        requested = [
            Tensor(block.name, block.num_bytes, None, tuple(users[~index]))
            for index, block in enumerate(self.inputs)
            if not block.is_weight
        ]
        results = [
            Tensor(vertex.name, vertex.num_bytes, index, tuple(users.get(index, ())), is_output=index not in users)
            for index, vertex in enumerate(self.vertices)
        ]
        operators = []
        for vertex in self.vertices:
            parameters = sorted(parameter_of[read] for read in vertex.reads if read in parameter_of)
            operators.append(Operator(vertex.name, vertex.kind, vertex.flops, tuple(parameters), vertex.group))
        blocks = [self.inputs[~read] for read in weights]
        parameters_of_graph = tuple(Parameter(block.name, block.num_bytes) for block in blocks)
        return GraphSpec(self.name, tuple(operators), (*requested, *results), parameters_of_graph)

    def _cut(self, name: str, indices: str, pieces: Pieces) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents and numbers of pieces of the indices."""
        extents, cuts = tuple(self._extents[each] for each in indices), tuple(pieces.get(each, 1) for each in indices)
        for extent, cut in zip(extents, cuts, strict=True):
            if extent % cut:
                raise ValueError(f"{name}: {cut} pieces do not divide {extent} elements")
        return extents, cuts


def _name(of: str, block: Block) -> str:
    return f"{of}[{','.join(map(str, block))}]"
