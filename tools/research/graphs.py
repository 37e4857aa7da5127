"""The four task graphs of Doppler's evaluation: ChainMM, FFNN, Llama-block and Llama-layer, at any size.

Cut for 4 devices they have the vertices, edges and costs of the authors' files. The pieces of each operator are facts about
those files; the rule that turns them into a graph is `tools.research.sharding`.

As placement problems of a home they have four devices, and transfers that share full-duplex links. A vertex takes as
long as its floating point operations, or as reading and writing as much as it produces, whichever is longer, and the start of
an operator.

Indices of ChainMM: i, j, k, all of the same extent. Of FFNN: b batch, k features, c classes, j hidden. Of a layer of Llama: s
rows (tokens), t keys, h, j, k hidden, f feed-forward, H heads, d width of a head, c = d / 2 complex numbers, v vocabulary, r
the last row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from tools.research.sharding import Access, Pieces, ShardedGraph

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
