"""Random placement problems of many kinds: sums of products, tiled networks, branches, Llama's layer; on random homes.

Sizes are chosen so that a graph has at most `MAX_OPERATORS` operators. Indices of tensors as in `tools.bench.tensor.graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.random import Generator

from coordinator.plan.graph.latency.problem import PlacementProblem
from tools.bench.tensor.graphs import LlamaSizes, llama
from tools.bench.tensor.homes import TensorHome
from tools.bench.tensor.sharding import ShardedGraph

MIN_OPERATORS, MAX_OPERATORS = 12, 320
_LEAST_MBIT, _MOST_MBIT = 60.0, 940.0
_PRODUCT_FLOPS = 2.0

T = TypeVar("T")


def random_instance(rng: Generator) -> PlacementProblem:
    """A random graph on a random home that has room for it."""
    kinds = list(KINDS.values())
    while True:
        graph = _any(rng, kinds)(rng)
        if MIN_OPERATORS <= len(graph.vertices) <= MAX_OPERATORS:
            return random_home(rng, graph)


def random_home(rng: Generator, graph: ShardedGraph) -> PlacementProblem:
    """The graph on 2 to 6 devices, equal or not, with links of 60 to 940 Mbit/s that transfers share.

    Every fourth home has little more room than for all weights.
    """
    num_devices = int(rng.integers(2, 7))
    equal = rng.random() < 0.4
    speeds = (1.0,) * num_devices if equal else tuple(map(float, rng.choice([1, 1, 3 / 4, 1 / 2, 1 / 4], num_devices)))
    mbit = float(np.exp(rng.uniform(np.log(_LEAST_MBIT), np.log(_MOST_MBIT))))
    room = float(rng.uniform(1.8, 3.0)) / num_devices if rng.random() < 0.25 else 1.0
    problem = TensorHome(speeds, mbit).problem(graph, room)
    return replace(problem, congestion=bool(rng.random() < 0.9))


def _any(rng: Generator, choices: list[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


def _pieces(rng: Generator, indices: str, most: int) -> dict[str, int]:
    """Powers of two for the indices, with a product of at most `most`."""
    pieces = dict.fromkeys(indices, 1)
    for _ in range(int(rng.integers(1, most.bit_length()))):
        pieces[_any(rng, list(indices))] *= 2
    return pieces


def products(rng: Generator) -> ShardedGraph:
    """A random expression of sums and products of square matrices, each operator in up to 32 pieces."""
    graph, n = ShardedGraph("products"), 512 * int(rng.integers(2, 9))
    space = {"i": n, "j": n, "k": n}
    terms = [graph.add_input(f"W{i}", (n, n), (4, 4)) for i in range(int(rng.integers(3, 8)))]
    for index in range(len(terms) - 1):
        left, right = (terms.pop(int(rng.integers(len(terms)))) for _ in range(2))
        name = f"op{index}"
        if rng.random() < 0.75:
            reads, pieces = [(left, "ik"), (right, "kj")], _pieces(rng, "ijk", 32)
            graph.add(name, "MatMul", space, pieces, reads, "ij", flops_per_element=_PRODUCT_FLOPS)
        else:
            graph.add(name, "Add", {"i": n, "j": n}, _pieces(rng, "ij", 16), [(left, "ij"), (right, "ij")], "ij")
        terms.append(name)
    return graph


def tiles(rng: Generator) -> ShardedGraph:
    """A random network on [s, h]: linear layers, element-wise operators, sums of two results, and norms of rows."""
    graph, s = ShardedGraph("tiles"), 64 * 2 ** int(rng.integers(2, 8))
    most = _any(rng, [4, 8, 16])
    widths = {graph.add_input("x", (s, h := 512 * 2 ** int(rng.integers(0, 3))), (4, 1), is_weight=False): h}
    for index in range(int(rng.integers(4, 16))):
        name, source = f"op{index}", _any(rng, list(widths)[-3:])
        h, kind = widths[source], rng.random()
        if kind < 0.5:
            j = 256 * 2 ** int(rng.integers(0, 5))
            pieces = _pieces(rng, "sjk", most)
            weight = graph.add_input(f"W{index}", (h, j), (pieces["k"], pieces["j"]))
            space = {"s": s, "j": j, "k": h}
            reads = [(source, "sk"), (weight, "kj")]
            graph.add(name, "MatMul", space, pieces, reads, "sj", flops_per_element=_PRODUCT_FLOPS)
            widths[name] = j
            continue
        space, pieces, reads = {"s": s, "h": h}, _pieces(rng, "sh", most), [(source, "sh")]
        if kind < 0.65:
            graph.add(f"{name}.total", "ReduceSum", space, pieces, reads, "s")
            reads.append((f"{name}.total", "s"))
        else:
            equal = [each for each, width in widths.items() if width == h and each != source]
            if equal and kind < 0.85:
                reads.append((_any(rng, equal), "sh"))
        widths[graph.add(name, "Elementwise", space, pieces, reads, "sh")] = h
    return graph


def branches(rng: Generator) -> ShardedGraph:
    """Stages of parallel chains that join, as in GoogLeNet; operators are not cut."""
    graph, s = ShardedGraph("branches"), 64 * 2 ** int(rng.integers(0, 6))
    source = graph.add_input("x", (s,), (1,), is_weight=False)
    for stage in range(int(rng.integers(2, 10))):
        ends = []
        for branch in range(int(rng.integers(1, 6))):
            end = source
            for depth in range(int(rng.integers(1, 5))):
                width, work = 16 * 2 ** int(rng.integers(0, 4)), float(np.exp(rng.uniform(np.log(100), np.log(10_000))))
                reads, name = [(end, (None,) * len(graph.tensors[end].extents))], f"op{stage}.{branch}.{depth}"
                end = graph.add(name, "Conv", {"s": s, "c": width}, {}, reads, "sc", flops_per_element=work)
            ends.append(end)
        reads = [(end, (None,) * len(graph.tensors[end].extents)) for end in ends]
        source = graph.add(f"join{stage}", "Concat", {"s": s, "c": 128}, {}, reads, "sc")
    return graph


def llama_layer(rng: Generator) -> ShardedGraph:
    """One of Llama's four task graphs, with random sizes."""
    heads = 8 * 2 ** int(rng.integers(0, 2))
    sizes = LlamaSizes(
        rows=64 * int(rng.integers(2, 17)),
        hidden=heads * 64 * 2 ** int(rng.integers(0, 2)),
        heads=heads,
        feed_forward=256 * int(rng.integers(2, 17)),
        vocabulary=8000 * int(rng.integers(1, 5)),
    )
    return llama(_any(rng, ["llama-block", "llama-layer"]), sizes, _any(rng, [4, 4, 8]))


KINDS: Mapping[str, Callable[[Generator], ShardedGraph]] = {
    "products": products,
    "tiles": tiles,
    "branches": branches,
    "llama": llama_layer,
}
