"""The four task graphs of Doppler's evaluation: ChainMM, FFNN, Llama-block and Llama-layer, at any size.

Cut for 4 devices they have the vertices, edges and costs of the authors' files. The pieces of each operator are facts about
those files; the rule that turns them into a graph is `tools.research.sharding`.

As placement problems of a home they have four devices, and transfers that share full-duplex links. A vertex takes as
long as its floating point operations, or as reading and writing as much as it produces, whichever is longer, and the start of
an operator.

Indices: s rows (tokens), h hidden, t keys, H heads, d width of a head, c = d / 2 complex numbers, i, j rows and columns of a
product, k its summed index, b batch, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from tools.research.sharding import Access, ShardedGraph, Span

GraphName = Literal["chain-mm", "ffnn", "llama-block", "llama-layer"]
GRAPHS: tuple[GraphName, ...] = get_args(GraphName)
_FLOPS_PER_SECOND = 15e9  # of a device of speed 1: 0.45 core of the testbed
_MEMORY_BYTES_PER_SECOND = 3e9  # of a device of speed 1
_START_SECONDS = 20e-6  # of every vertex, on every device
_LATENCY_SECONDS = 0.2e-3
_GIGABIT_MBIT, _WIFI_MBIT = 940.0, 190.0


class ChainSizes(NamedTuple):
    """(A·B) + (C·(D·E)), all square."""

    rows: int


class FfnnSizes(NamedTuple):
    """softmax(ReLU(X·W1)·W2), without biases, as the authors' graph."""

    batch: int
    features: int  # columns of X, and classes
    hidden: int


class LlamaSizes(NamedTuple):
    """One decoder layer of Llama over a prompt, batch 1; `vocabulary` only of Llama-layer."""

    rows: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int

    @property
    def half_width(self) -> int:
        """Complex numbers of a head: half its width."""
        return self.hidden // self.heads // 2


class GraphSizes(NamedTuple):
    """Sizes of all four graphs."""

    chain: ChainSizes
    ffnn: FfnnSizes
    llama: LlamaSizes


PAPER = GraphSizes(ChainSizes(10_000), FfnnSizes(2**15, 2**5, 2**16), LlamaSizes(4096, 4096, 32, 11_008, 32_000))
# Seconds of transfers over seconds of compute are those of the paper, on four devices of 15 GFLOP/s and gigabit links.
HOME = GraphSizes(ChainSizes(2000), FfnnSizes(4096, 64, 8192), LlamaSizes(512, 1024, 16, 2816, 32_000))


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
    head: int = 0  # pieces of the vocabulary; 0: a block without mask and head


_LLAMA_CUTS: Mapping[str, _LlamaCuts] = {
    "llama-block": _LlamaCuts("s2 h2", "j2 k2", "s2 j2", "s2 j2", "H2 t2", "", "j2 k2", "", "j4"),
    "llama-layer": _LlamaCuts("s2 h2", "s2 j2", "j2 k2", "j2 k2", "H2 s2", "s2", "s2 k2", "s2", "s2 j2", head=4),
}


def tensor_graph(name: GraphName, sizes: GraphSizes = HOME) -> ShardedGraph:
    """One of the four graphs, cut as the authors cut it for 4 devices. Raises ValueError if pieces do not divide the sizes."""
    if name == "chain-mm":
        return chain_mm(sizes.chain)
    return ffnn(sizes.ffnn) if name == "ffnn" else _Llama(name, sizes.llama, _LLAMA_CUTS[name]).graph


def chain_mm(sizes: ChainSizes) -> ShardedGraph:
    """(A·B) + (C·(D·E))."""
    graph, n = ShardedGraph("chain-mm"), sizes.rows

    def product(name: str, left: str, right: str, pieces: str) -> None:
        space, reads = {"i": n, "j": n, "k": n}, [(left, "ik"), (right, "kj")]
        graph.add(name, "MatMul", space, _pieces(pieces), reads, "ij")

    for weight, pieces in {"A": (4, 2), "B": (2, 2), "C": (4, 2), "D": (2, 4), "E": (4, 2)}.items():
        graph.add_input(weight, (n, n), pieces)
    product("DE", "D", "E", "i2 j2 k4")
    product("CDE", "C", "DE", "i4 j2 k2")
    product("AB", "A", "B", "i4 j2 k2")
    graph.add("sum", "Add", {"i": n, "j": n}, _pieces("i4 j2"), [("AB", "ij"), ("CDE", "ij")], "ij")
    return graph


def ffnn(sizes: FfnnSizes) -> ShardedGraph:
    """A perceptron with one hidden layer, and a softmax of five operators."""
    graph = ShardedGraph("ffnn")
    b, c, j = sizes.batch, sizes.features, sizes.hidden
    graph.add_input("X", (b, c), (4, 1), is_weight=False)
    graph.add_input("W1", (c, j), (1, 4))
    graph.add_input("W2", (j, c), (4, 1))
    cut, rows = _pieces("b4 j4"), _pieces("b16")
    reads: list[tuple[str, str]] = [("X", "bk"), ("W1", "kj")]
    graph.add("XW1", "MatMul", {"b": b, "j": j, "k": c}, cut, reads, "bj")
    graph.add("relu", "Relu", {"b": b, "j": j}, cut, [("XW1", "bj")], "bj")
    reads = [("relu", "bj"), ("W2", "jc")]
    graph.add("HW2", "MatMul", {"b": b, "c": c, "j": j}, cut, reads, "bc")
    space = {"b": b, "c": c}
    graph.add("max", "ReduceMax", space, rows, [("HW2", "bc")], "b", combine="Max")
    graph.add("subtract", "Sub", space, rows, [("HW2", "bc"), ("max", "b")], "bc")
    graph.add("exp", "Exp", space, rows, [("subtract", "bc")], "bc")
    graph.add("total", "ReduceSum", space, rows, [("exp", "bc")], "b")
    graph.add("divide", "Div", space, rows, [("exp", "bc"), ("total", "b")], "bc")
    return graph


class _Llama:
    """A decoder layer; Llama-layer also makes the causal mask and the rotary table, and the last row's logits."""

    def __init__(self, name: str, sizes: LlamaSizes, cuts: _LlamaCuts) -> None:
        self.graph, self._sizes, self._cuts = ShardedGraph(name), sizes, cuts
        s, h = sizes.rows, sizes.hidden
        norm, output, second = _pieces(cuts.norm), _pieces(cuts.output), _pieces(cuts.second_norm)
        self.graph.add_input("x", (s, h), (norm["s"], norm["h"]), is_weight=False)
        self._add_positions()
        normed = self._norm("norm1", "x", norm, _pieces("s2 h2"))
        for projection, pieces in (("q", cuts.query), ("k", cuts.key), ("v", cuts.value)):
            self._linear(projection, normed, h, h, _pieces(pieces))
        for projection, pieces in (("q", cuts.query), ("k", cuts.key)):
            self._rotate(projection, _pieces(pieces))
        attended = self._attention(_pieces(cuts.attention))
        self._linear("o", attended, h, h, output, access=("k", "s", None))
        residual = {"s": output.get("s", 1), "h": output.get("j", 1)}
        self._by_rows("residual1", "Add", residual, [("x", "sh"), ("o", "sh")])
        normed = self._norm("norm2", "residual1", residual, second)
        self._feed_forward(normed, _pieces(cuts.up), second.get("h", 1))
        self._by_rows("residual2", "Add", second, [("residual1", "sh"), ("down", "sh")])
        if cuts.head:
            self._head(self._norm("norm3", "residual2", second, second))

    def _add_positions(self) -> None:
        """The rotary table: an input of two blocks, or selected by the positions, which also give the causal mask."""
        s, width = self._sizes.rows, self._sizes.half_width
        if not self._cuts.head:
            self.graph.add_input("rotary", (s, width), (2, 1), dtype="complex64")
            return
        self.graph.add_input("positions", (s,), (1,), is_weight=False, dtype="int64")
        self.graph.add_input("table", (s, width), (1, 1), dtype="complex64")
        reads: list[tuple[str, Sequence[Access]]] = [("positions", "s"), ("positions", "t")]
        cut = _pieces(self._cuts.mask)
        self.graph.add("mask", "CausalMask", {"s": s, "t": s}, cut, reads, "st")
        reads = [("table", (None, "c")), ("positions", "s")]
        self.graph.add("rotary", "Select", {"s": s, "c": width}, {}, reads, "sc", dtype="complex64")

    def _norm(self, name: str, source: str, pieces: Mapping[str, int], product: Mapping[str, int]) -> str:
        """RMSNorm in eight operators; `product`: the pieces of the last three."""
        s, rows = {"s": self._sizes.rows}, {"s": pieces.get("s", 1)}
        cast = self._by_rows(f"{name}.cast", "Cast", pieces, [(source, "sh")])
        self._by_rows(f"{name}.square", "Mul", pieces, [(cast, "sh"), (cast, "sh")])
        space = {**s, "h": self._sizes.hidden}
        self.graph.add(f"{name}.mean", "ReduceMean", space, pieces, [(f"{name}.square", "sh")], "s", combine="Mean")
        self.graph.add(f"{name}.epsilon", "Add", s, rows, [(f"{name}.mean", "s")], "s")
        self.graph.add(f"{name}.rsqrt", "Rsqrt", s, rows, [(f"{name}.epsilon", "s")], "s")
        self._by_rows(f"{name}.multiply", "Mul", product, [(cast, "sh"), (f"{name}.rsqrt", "s")])
        self._by_rows(f"{name}.half", "Cast", product, [(f"{name}.multiply", "sh")])
        self.graph.add_input(f"{name}.weight", (self._sizes.hidden,), (product.get("h", 1),))
        return self._by_rows(f"{name}.scale", "Mul", product, [(f"{name}.half", "sh"), (f"{name}.weight", "h")])

    def _by_rows(self, name: str, kind: str, pieces: Mapping[str, int], reads: Sequence[tuple[str, str]]) -> str:
        """An element-wise operator on [s, h]."""
        return self.graph.add(name, kind, {"s": self._sizes.rows, "h": self._sizes.hidden}, pieces, reads, "sh")

    def _linear(
        self, name: str, source: str, inner: int, outer: int, pieces: Mapping[str, int], access: Sequence[Access] = "sk"
    ) -> str:
        """[s, inner] by a weight [inner, outer]."""
        weight = self.graph.add_input(f"{name}.weight", (inner, outer), (pieces.get("k", 1), pieces.get("j", 1)))
        space, reads = {"s": self._sizes.rows, "j": outer, "k": inner}, [(source, access), (weight, "kj")]
        kind = "MatMul" if len(access) == 2 else "JoinHeads"
        return self.graph.add(name, kind, space, pieces, reads, "sj")

    def _rotate(self, name: str, pieces: Mapping[str, int]) -> str:
        """Rotary position embedding in five operators, each cut as the projection's result."""
        sizes = self._sizes
        flat = {"s": sizes.rows, "j": sizes.hidden}
        heads = {"s": sizes.rows, "H": sizes.heads, "d": 2 * sizes.half_width}
        numbers = {"s": sizes.rows, "H": sizes.heads, "c": sizes.half_width}
        cut = {"s": pieces.get("s", 1), "H": pieces.get("j", 1)}
        self.graph.add(f"{name}.heads", "SplitHeads", heads, cut, [(name, "sH")], "sHd")
        self.graph.add(
            f"{name}.complex", "ToComplex", numbers, cut, [(f"{name}.heads", "sHc")], "sHc", dtype="complex64"
        )
        reads = [(f"{name}.complex", "sHc"), ("rotary", "sc")]
        self.graph.add(f"{name}.rotate", "Rotate", numbers, cut, reads, "sHc", dtype="complex64")
        self.graph.add(f"{name}.real", "FromComplex", heads, cut, [(f"{name}.rotate", "sHd")], "sHd")
        flat_cut = {"s": cut["s"], "j": cut["H"]}
        return self.graph.add(f"{name}.flat", "Flatten", flat, flat_cut, [(f"{name}.real", ("s", "j", None))], "sj")

    def _attention(self, pieces: Mapping[str, int]) -> str:
        """Scores, softmax, and the product with the values, [H, s, d]."""
        sizes, add = self._sizes, self.graph.add
        space = {"H": sizes.heads, "s": sizes.rows, "t": sizes.rows}
        wide = {**space, "d": 2 * sizes.half_width}
        reads: list[tuple[str, str]] = [("q.flat", "sH"), ("k.flat", "tH")]
        add("scores", "Scores", wide, pieces, reads, "Hst")
        last = add("scores.scaled", "Mul", space, pieces, [("scores", "Hst")], "Hst")
        if self._cuts.mask:
            last = add("scores.masked", "Add", space, pieces, [(last, "Hst"), ("mask", "st")], "Hst")
        add("softmax.cast", "Cast", space, pieces, [(last, "Hst")], "Hst")
        add("softmax.max", "ReduceMax", space, pieces, [("softmax.cast", "Hst")], "Hs", combine="Max")
        add("softmax.subtract", "Sub", space, pieces, [("softmax.cast", "Hst"), ("softmax.max", "Hs")], "Hst")
        add("softmax.exp", "Exp", space, pieces, [("softmax.subtract", "Hst")], "Hst")
        add("softmax.total", "ReduceSum", space, pieces, [("softmax.exp", "Hst")], "Hs")
        add("softmax.divide", "Div", space, pieces, [("softmax.exp", "Hst"), ("softmax.total", "Hs")], "Hst")
        add("softmax.half", "Cast", space, pieces, [("softmax.divide", "Hst")], "Hst")
        reads = [("softmax.half", "Hst"), ("v", "tH")]
        return add("attended", "Attend", wide, pieces, reads, "Hsd")

    def _feed_forward(self, normed: str, up: Mapping[str, int], down_columns: int) -> None:
        sizes = self._sizes
        for name in ("gate", "up"):
            self._linear(name, normed, sizes.hidden, sizes.feed_forward, up)
        space, cut = {"s": sizes.rows, "j": sizes.feed_forward}, {"s": up.get("s", 1), "j": up["j"]}
        self.graph.add("silu", "Silu", space, cut, [("gate", "sj")], "sj")
        self.graph.add("gated", "Mul", space, cut, [("silu", "sj"), ("up", "sj")], "sj")
        self._linear(
            "down", "gated", sizes.feed_forward, sizes.hidden, {"s": cut["s"], "j": down_columns, "k": cut["j"]}
        )

    def _head(self, normed: str) -> None:
        sizes = self._sizes
        h, last_row = {"h": sizes.hidden}, (sizes.rows - 1, sizes.rows)
        access: tuple[Span, str] = (last_row, "h")
        self.graph.add("last", "LastRow", {"r": 1, **h}, {}, [(normed, access)], "rh")
        self.graph.add("squeeze", "Squeeze", h, {}, [("last", (None, "h"))], "h")
        weight = self.graph.add_input("head.weight", (sizes.hidden, sizes.vocabulary), (1, self._cuts.head))
        space, reads = {"v": sizes.vocabulary, "k": sizes.hidden}, [("squeeze", "k"), (weight, "kv")]
        self.graph.add("head", "MatMul", space, {"v": self._cuts.head}, reads, "v")


def _pieces(text: str) -> dict[str, int]:
    return {each[0]: int(each[1:]) for each in text.split()}


# ---- homes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorHome:
    """Devices, by relative speed, and the rate of transfers between any two of them."""

    speeds: tuple[float, ...]
    mbit: float

    def problem(self, graph: ShardedGraph, budget_share: float = 1.0) -> PlacementProblem:
        """The graph's vertices on these devices, as `cluster`."""
        cluster = self.cluster(graph, budget_share)
        budgets = [device.budget_bytes for device in cluster.devices]
        return placement_problem(
            graph.spec(), cluster.seconds, budgets, cluster.bytes_per_second, cluster.latency_seconds
        )

    def cluster(self, graph: ShardedGraph, budget_share: float = 1.0) -> GraphCluster:
        """These devices, each with a memory budget of this share of all weights."""
        spec, ranks = graph.spec(), range(len(self.speeds))
        works = [
            max(operator.flops / _FLOPS_PER_SECOND, 2 * block.num_bytes / _MEMORY_BYTES_PER_SECOND)
            for operator, (block,) in zip(spec.operators, spec.produced, strict=True)
        ]
        budget = round(budget_share * sum(parameter.num_bytes for parameter in spec.parameters))
        return GraphCluster(
            devices=tuple(ClusterDevice(f"device{k}", f"device{k}", budget) for k in ranks),
            seconds=tuple(tuple(work / speed + _START_SECONDS for speed in self.speeds) for work in works),
            bytes_per_second=((self.mbit * 1e6 / 8,) * len(ranks),) * len(ranks),
            latency_seconds=((_LATENCY_SECONDS,) * len(ranks),) * len(ranks),
        )


HOMES: Mapping[str, TensorHome] = {
    "gigabit": TensorHome((1, 1, 1, 1), _GIGABIT_MBIT),
    "wifi": TensorHome((1, 1, 1, 1), _WIFI_MBIT),
    "unequal": TensorHome((1, 1, 1 / 2, 1 / 4), _GIGABIT_MBIT),
    "unequal-wifi": TensorHome((1, 1, 1 / 2, 1 / 4), _WIFI_MBIT),
}
