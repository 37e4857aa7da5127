"""The four task graphs of Doppler's evaluation: ChainMM, FFNN, Llama-block and Llama-layer, at any size.

Cut for 4 devices they have the vertices, edges and costs of the authors' files. The pieces of each operator are facts about
those files; the rule that turns them into a graph is `ShardedGraph`.

As placement problems of a home they have four devices, and transfers that share full-duplex links. A vertex takes as
long as its floating point operations, or as reading and writing as much as it produces, whichever is longer, and the start of
an operator.

Indices of ChainMM: i, j, k, all of the same extent. Of FFNN: b batch, k features, c classes, j hidden. Of a layer of Llama: s
rows (tokens), t keys, h, j, k hidden, f feed-forward, H heads, d width of a head, c = d / 2 complex numbers, v vocabulary, r
the last row.

The rule. An operator has an index space (a matrix product: i, j, k) and a number of equal pieces of each index. Its joins are
all combinations of pieces. If an index is not in the output, the joins are partial results, and each output block gets one
formation that combines the joins of that block, even when there is only one. A shard depends on a block of an input if the
region that it reads overlaps the block. Inputs of the graph are cut into blocks too, but are not placed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor

# ---- operators cut into shards -----------------------------------------------------------------------------------------

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


GraphName = Literal["chain-mm", "ffnn", "llama-block", "llama-layer"]
GRAPHS: tuple[GraphName, ...] = get_args(GraphName)
HomeName = Literal["gigabit", "wifi", "unequal"]
_FLOPS_PER_SECOND = 15e9  # of a device of speed 1: 0.45 core of the testbed
_MEMORY_BYTES_PER_SECOND = 3e9  # of a device of speed 1
_START_SECONDS = 20e-6  # of every vertex, on every device
_LATENCY_SECONDS = 0.2e-3
_GIGABIT_MBIT, _WIFI_MBIT = 940.0, 190.0
_COMPLEX64_BYTES, _INT64_BYTES = 8, 8

Extents = Mapping[str, int]  # of each index


class GraphSizes(NamedTuple):
    """Sizes of all four graphs."""

    chain: Extents
    ffnn: Extents
    llama: Extents


def chain_extents(rows: int) -> Extents:
    """(A·B) + (C·(D·E)), all square."""
    return {"i": rows, "j": rows, "k": rows}


def llama_extents(rows: int, hidden: int, heads: int, feed_forward: int, vocabulary: int) -> Extents:
    """One decoder layer of Llama over a prompt, batch 1; only Llama-layer has a vocabulary."""
    width = hidden // heads
    return {
        "s": rows, "t": rows, "h": hidden, "j": hidden, "k": hidden, "f": feed_forward, "H": heads, "d": width,
        "c": width // 2, "v": vocabulary, "r": 1,
    }  # fmt: skip


# Seconds of transfers over seconds of compute are those of the paper, on four devices of 15 GFLOP/s and gigabit links.
HOME = GraphSizes(
    chain_extents(2000), {"b": 4096, "k": 64, "c": 64, "j": 8192}, llama_extents(512, 1024, 16, 2816, 32_000)
)


class _LlamaCuts(NamedTuple):
    """Pieces of each operator, as "s2 j4": two pieces of the rows, four of the columns."""

    norm: str  # the first half of the first norm
    query: str
    key: str
    value: str
    attention: str  # scores to the product with the values
    mask: str
    output: str
    second_norm: str  # the last three operators of the second norm
    up: str  # gate and up projections
    head: str = ""  # of the vocabulary; without: a block without mask and head


_LLAMA_CUTS: Mapping[str, _LlamaCuts] = {
    "llama-block": _LlamaCuts("s2 h2", "j2 k2", "s2 j2", "s2 j2", "H2 t2", "", "j2 k2", "", "f4"),
    "llama-layer": _LlamaCuts("s2 h2", "s2 j2", "j2 k2", "j2 k2", "H2 s2", "s2", "s2 k2", "s2", "s2 f2", head="v4"),
}


def tensor_graph(name: GraphName, sizes: GraphSizes = HOME) -> ShardedGraph:
    """One of the four graphs, cut as the authors cut it for 4 devices. Raises ValueError if pieces do not divide the sizes."""
    if name == "chain-mm":
        return chain_mm(sizes.chain)
    return _ffnn(sizes.ffnn) if name == "ffnn" else _Llama(name, sizes.llama, _LLAMA_CUTS[name]).graph


def chain_mm(extents: Extents) -> ShardedGraph:
    """(A·B) + (C·(D·E))."""
    graph = ShardedGraph("chain-mm", extents)
    weights = {
        "A": ("ik", "i4 k2"),
        "B": ("kj", "k2 j2"),
        "C": ("ik", "i4 k2"),
        "D": ("ik", "i2 k4"),
        "E": ("kj", "k4 j2"),
    }
    for weight, (axes, pieces) in weights.items():
        graph.add_input(weight, axes, _pieces(pieces))
    graph.add("DE", "MatMul", "ij", _pieces("i2 j2 k4"), ("D", "ik"), ("E", "kj"))
    graph.add("CDE", "MatMul", "ij", _pieces("i4 j2 k2"), ("C", "ik"), ("DE", "kj"))
    graph.add("AB", "MatMul", "ij", _pieces("i4 j2 k2"), ("A", "ik"), ("B", "kj"))
    graph.add("sum", "Add", "ij", _pieces("i4 j2"), ("AB", "ij"), ("CDE", "ij"))
    return graph


def _ffnn(extents: Extents) -> ShardedGraph:
    """softmax(ReLU(X·W1)·W2), without biases, as the authors' graph; the softmax has five operators."""
    graph = ShardedGraph("ffnn", extents)
    cut, rows = _pieces("b4 j4"), _pieces("b16")
    graph.add_input("X", "bk", cut, is_weight=False)
    graph.add_input("W1", "kj", cut)
    graph.add_input("W2", "jc", cut)
    graph.add("XW1", "MatMul", "bj", cut, ("X", "bk"), ("W1", "kj"))
    graph.add("relu", "Relu", "bj", cut, ("XW1", "bj"))
    graph.add("HW2", "MatMul", "bc", cut, ("relu", "bj"), ("W2", "jc"))
    graph.add("max", "ReduceMax", "b", rows, ("HW2", "bc"), combine="Max")
    graph.add("subtract", "Sub", "bc", rows, ("HW2", "bc"), ("max", "b"))
    graph.add("exp", "Exp", "bc", rows, ("subtract", "bc"))
    graph.add("total", "ReduceSum", "b", rows, ("exp", "bc"))
    graph.add("divide", "Div", "bc", rows, ("exp", "bc"), ("total", "b"))
    return graph


class _Llama:
    """A decoder layer; Llama-layer also makes the causal mask and the rotary table, and the last row's logits."""

    def __init__(self, name: str, extents: Extents, cuts: _LlamaCuts) -> None:
        self.graph, self._cuts, self._last_row = ShardedGraph(name, extents), cuts, (extents["s"] - 1, extents["s"])
        add, norm, second = self.graph.add, _pieces(cuts.norm), _pieces(cuts.second_norm)
        self.graph.add_input("x", "sh", norm, is_weight=False)
        self._add_positions()
        normed = self._norm("norm1", "x", norm, _pieces("s2 h2"))
        for projection, pieces in (("q", cuts.query), ("k", cuts.key), ("v", cuts.value)):
            self._linear(projection, "kj", _pieces(pieces), normed)
        for projection, pieces in (("q", cuts.query), ("k", cuts.key)):
            self._rotate(projection, _pieces(pieces))
        output = _pieces(cuts.output)
        self._linear("o", "kj", output, self._attention(_pieces(cuts.attention)), access=("k", "s", None))
        residual = {"s": output.get("s", 1), "h": output.get("j", 1)}
        add("residual1", "Add", "sh", residual, ("x", "sh"), ("o", "sh"))
        normed = self._norm("norm2", "residual1", residual, second)
        self._feed_forward(normed, {**_pieces(cuts.up), "j": second.get("h", 1)})
        add("residual2", "Add", "sh", second, ("residual1", "sh"), ("down", "sh"))
        if cuts.head:
            self._head(self._norm("norm3", "residual2", second, second))

    def _add_positions(self) -> None:
        """The rotary table: an input of two blocks, or selected by the positions, which also give the causal mask."""
        if not self._cuts.head:
            self.graph.add_input("rotary", "sc", {"s": 2}, element_bytes=_COMPLEX64_BYTES)
            return
        self.graph.add_input("positions", "s", {}, is_weight=False, element_bytes=_INT64_BYTES)
        self.graph.add_input("table", "sc", {}, element_bytes=_COMPLEX64_BYTES)
        self.graph.add("mask", "CausalMask", "st", _pieces(self._cuts.mask), ("positions", "s"), ("positions", "t"))
        self.graph.add("rotary", "Select", "sc", {}, ("table", (None, "c")), ("positions", "s"))

    def _norm(self, name: str, source: str, pieces: Pieces, product: Pieces) -> str:
        """RMSNorm in eight operators; `product`: the pieces of the last three."""
        add, cast, rsqrt = self.graph.add, f"{name}.cast", f"{name}.rsqrt"
        add(cast, "Cast", "sh", pieces, (source, "sh"))
        add(f"{name}.square", "Mul", "sh", pieces, (cast, "sh"))
        add(f"{name}.mean", "ReduceMean", "s", pieces, (f"{name}.square", "sh"), combine="Mean")
        add(f"{name}.epsilon", "Add", "s", pieces, (f"{name}.mean", "s"))
        add(rsqrt, "Rsqrt", "s", pieces, (f"{name}.epsilon", "s"))
        add(f"{name}.multiply", "Mul", "sh", product, (cast, "sh"), (rsqrt, "s"))
        add(f"{name}.half", "Cast", "sh", product, (f"{name}.multiply", "sh"))
        weight = self.graph.add_input(f"{name}.weight", "h", product)
        return add(f"{name}.scale", "Mul", "sh", product, (f"{name}.half", "sh"), (weight, "h"))

    def _linear(self, name: str, axes: str, pieces: Pieces, source: str, access: Sequence[Access] = ()) -> str:
        """Rows by a weight with these axes; `access`: how the source is read, by default its rows and the inner axis."""
        inner, outer = axes[0], axes[1]
        weight = self.graph.add_input(f"{name}.weight", axes, pieces)
        kind = "JoinHeads" if access else "MatMul"
        return self.graph.add(name, kind, f"s{outer}", pieces, (source, access or f"s{inner}"), (weight, axes))

    def _rotate(self, name: str, pieces: Pieces) -> None:
        """Rotary position embedding in five operators, each cut as the projection's result."""
        add, cut = self.graph.add, {**pieces, "H": pieces.get("j", 1)}
        add(f"{name}.heads", "SplitHeads", "sHd", cut, (name, "sH"))
        add(f"{name}.complex", "ToComplex", "sHc", cut, (f"{name}.heads", "sHc"))
        add(f"{name}.rotate", "Rotate", "sHc", cut, (f"{name}.complex", "sHc"), ("rotary", "sc"))
        add(f"{name}.real", "FromComplex", "sHd", cut, (f"{name}.rotate", "sHd"))
        add(f"{name}.flat", "Flatten", "sj", cut, (f"{name}.real", ("s", "j", None)))

    def _attention(self, pieces: Pieces) -> str:
        """Scores, softmax, and the product with the values, [H, s, d]."""
        add = self.graph.add
        add("scores", "Scores", "Hst", pieces, ("q.flat", "sH"), ("k.flat", "tH"), summed="d")
        last = add("scores.scaled", "Mul", "Hst", pieces, ("scores", "Hst"))
        if self._cuts.mask:
            last = add("scores.masked", "Add", "Hst", pieces, (last, "Hst"), ("mask", "st"))
        add("softmax.cast", "Cast", "Hst", pieces, (last, "Hst"))
        add("softmax.max", "ReduceMax", "Hs", pieces, ("softmax.cast", "Hst"), combine="Max")
        add("softmax.subtract", "Sub", "Hst", pieces, ("softmax.cast", "Hst"), ("softmax.max", "Hs"))
        add("softmax.exp", "Exp", "Hst", pieces, ("softmax.subtract", "Hst"))
        add("softmax.total", "ReduceSum", "Hs", pieces, ("softmax.exp", "Hst"))
        add("softmax.divide", "Div", "Hst", pieces, ("softmax.exp", "Hst"), ("softmax.total", "Hs"))
        add("softmax.half", "Cast", "Hst", pieces, ("softmax.divide", "Hst"))
        return add("attended", "Attend", "Hsd", pieces, ("softmax.half", "Hst"), ("v", "tH"))

    def _feed_forward(self, normed: str, pieces: Pieces) -> None:
        for name in ("gate", "up"):
            self._linear(name, "hf", pieces, normed)
        self.graph.add("silu", "Silu", "sf", pieces, ("gate", "sf"))
        self.graph.add("gated", "Mul", "sf", pieces, ("silu", "sf"), ("up", "sf"))
        self._linear("down", "fj", pieces, "gated")

    def _head(self, normed: str) -> None:
        add, cut = self.graph.add, _pieces(self._cuts.head)
        add("last", "LastRow", "rh", {}, (normed, (self._last_row, "h")))
        add("squeeze", "Squeeze", "h", {}, ("last", (None, "h")))
        weight = self.graph.add_input("head.weight", "kv", cut)
        add("head", "MatMul", "v", cut, ("squeeze", "k"), (weight, "kv"))


def _pieces(text: str) -> dict[str, int]:
    return {each[0]: int(each[1:]) for each in text.split()}


# ---- homes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorHome:
    """Devices, by relative speed, and the rate of transfers between any two of them."""

    speeds: tuple[float, ...]
    mbit: float

    def problem(self, graph: ShardedGraph, budget_share: float = 1.0) -> PlacementProblem:
        """The graph's vertices on these devices, each with a memory budget of this share of all weights."""
        spec, count = graph.spec(), len(self.speeds)
        works = [
            max(operator.flops / _FLOPS_PER_SECOND, 2 * block.num_bytes / _MEMORY_BYTES_PER_SECOND)
            for operator, (block,) in zip(spec.operators, spec.produced, strict=True)
        ]
        seconds = [[work / speed + _START_SECONDS for speed in self.speeds] for work in works]
        budget = round(budget_share * sum(parameter.num_bytes for parameter in spec.parameters))
        rates, latencies = [[self.mbit * 1e6 / 8] * count] * count, [[_LATENCY_SECONDS] * count] * count
        return placement_problem(spec, seconds, [budget] * count, rates, latencies)


HOMES: Mapping[HomeName, TensorHome] = {
    "gigabit": TensorHome((1, 1, 1, 1), _GIGABIT_MBIT),
    "wifi": TensorHome((1, 1, 1, 1), _WIFI_MBIT),
    "unequal": TensorHome((1, 1, 1 / 2, 1 / 4), _GIGABIT_MBIT),
}
