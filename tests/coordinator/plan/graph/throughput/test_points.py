"""Candidate partition points: the paper's, those of graphs with several sources and sinks, and crossing tensors."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs import chain, from_edges, two_branches

from coordinator.plan.graph.throughput.points import candidate_chain, candidate_points, fine_chain
from hearth.plan.graph_spec import GraphSpec, Operator, Tensor
from tools.research.partition import published_points


def graph(num_operators: int, edges: list[tuple[int, int]]) -> GraphSpec:
    operators = [Operator(f"op{index}", "Add", 1.0) for index in range(num_operators)]
    return from_edges("graph", operators, [100 + index for index in range(num_operators)], edges)


def random_graph(rng: Random, one_source: bool) -> GraphSpec:
    """Density at which some operators lie on every path and some do not."""
    count = rng.randint(1, 12)
    edges = {(max(0, target - 1 - int(rng.expovariate(1.2))), target) for target in range(1, count)}
    edges |= {(rng.randrange(target), target) for target in range(1, count) if rng.random() < 0.2}
    if not one_source:
        edges = {edge for edge in edges if rng.random() < 0.85}
    return graph(count, sorted(edges))


def on_every_path(spec: GraphSpec, source: int, sinks: set[int]) -> list[int]:
    """Reference by counting paths: a vertex is on all paths if as many paths lead through it as there are."""
    n = spec.num_operators
    to = [0] * n
    to[source] = 1
    for vertex in range(n):
        for after in spec.successors[vertex]:
            to[after] += to[vertex]
    on = [0] * n
    for vertex in reversed(range(n)):
        on[vertex] = (vertex in sinks) + sum(on[after] for after in spec.successors[vertex])
    total = sum(to[sink] for sink in sinks)
    return [vertex for vertex in range(n) if to[vertex] * on[vertex] == total]


@given(st.integers(0, 10**9))
def test_single_source_points_equal_the_paper_and_path_counts(seed: int) -> None:
    spec = random_graph(Random(seed), one_source=True)
    sinks = {index for index, after in enumerate(spec.successors) if not after}
    every = on_every_path(spec, 0, sinks)
    if len(sinks) == 1:
        assert list(candidate_points(spec)) == list(published_points(spec)) == every
    else:  # with a virtual sink, operators before a side head are no points; with the main sink they are
        assert set(published_points(spec)) == set(every) <= set(candidate_points(spec))


@given(st.integers(0, 10**9))
def test_points_are_on_every_path_between_first_and_last(seed: int) -> None:
    spec = random_graph(Random(seed), one_source=False)
    points = candidate_points(spec)
    assert list(points) == on_every_path(spec, points[0], {points[-1]})


@given(st.integers(0, 10**9))
def test_blocks_partition_operators_without_backward_edges(seed: int) -> None:
    spec = random_graph(Random(seed), one_source=False)
    found = candidate_chain(spec)
    assert sorted(itertools.chain(*found.blocks)) == list(range(spec.num_operators))
    block = {operator: index for index, block in enumerate(found.blocks) for operator in block}
    assert [block[point] for point in found.points] == list(range(len(found.blocks)))
    for operator, after in enumerate(spec.successors):
        assert all(block[operator] <= block[each] for each in after)
    for cut, crossing in enumerate(found.crossing):
        expected = [
            index
            for index, tensor in enumerate(spec.tensors)
            if tensor.source is not None
            and block[tensor.source] <= cut < max((block[each] for each in tensor.consumers), default=-1)
        ]
        assert list(crossing) == expected


def test_chains_are_cut_everywhere_and_branches_at_joins() -> None:
    assert candidate_points(chain(1, [10, 20, 30])) == (0, 1, 2)
    found = candidate_chain(two_branches())
    assert found.points == (0, 5)
    assert found.blocks == ((0,), (1, 2, 3, 4, 5))
    assert found.boundary_bytes(two_branches()) == (100,)  # one tensor feeds both branches


def test_tensor_used_by_all_layers_crosses_every_cut() -> None:
    """input -> embed -> layer -> layer -> layer, and a mask, converted once, into each layer."""
    kinds = ("embed", "widen", "layer0", "layer1", "layer2")
    tensors = (
        Tensor("ids", 64, None, (0,), "int64"),
        Tensor("mask", 64, None, (1,), "int64"),
        Tensor("hidden", 4000, 0, (2,)),
        Tensor("wide", 512, 1, (2, 3, 4)),
        *(Tensor(f"out{i}", 4000, 2 + i, (3 + i,) if i < 2 else (), is_output=i == 2) for i in range(3)),
    )
    spec = GraphSpec("masked", tuple(Operator(kind, kind, 1.0) for kind in kinds), tensors)
    found = candidate_chain(spec)
    assert found.points == (0, 2, 3, 4)
    # The mask is converted in the block of its first consumer; before that the original mask crosses the cut.
    assert [[tensors[index].name for index in crossing] for crossing in found.crossing] == [
        ["mask", "hidden"],
        ["wide", "out0"],
        ["wide", "out1"],
    ]


@given(st.integers(0, 10**9))
def test_fine_chain_keeps_blocks_and_topological_order(seed: int) -> None:
    spec = random_graph(Random(seed), one_source=False)
    coarse, fine = candidate_chain(spec), fine_chain(spec)
    order = [operator for block in fine.blocks for operator in block]
    assert all(len(block) == 1 for block in fine.blocks)
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    assert [set(order[a:b]) for a, b in itertools.pairwise(ends)] == [set(block) for block in coarse.blocks]
    assert [fine.crossing[end - 1] for end in ends[1:-1]] == list(coarse.crossing)  # the points are among the cuts
    place = {operator: index for index, operator in enumerate(order)}
    for operator, after in enumerate(spec.successors):
        assert all(place[operator] < place[each] for each in after)


def test_fine_chain_finishes_a_branch_before_the_next() -> None:
    spec = two_branches()
    found = fine_chain(spec)
    assert found.blocks == ((0,), (1,), (2,), (3,), (4,), (5,))
    # Branches 1 -> 2 and 3 -> 4: during the first, the stem's output is still needed; afterwards, the first one's result.
    assert found.boundary_bytes(spec) == (100, 200, 200, 200, 200)


def test_fine_chain_keeps_few_bytes_alive() -> None:
    """0 -> 1 (large) -> 2 (small), and 0 -> 3 (small): small outputs come first, large ones are consumed at once."""
    operators = [Operator(f"op{index}", "X", 1.0) for index in range(5)]
    spec = from_edges("wide", operators, [100, 1000, 5, 5, 1], [(0, 1), (1, 2), (0, 3), (2, 4), (3, 4)])
    found = fine_chain(spec)
    assert [block[0] for block in found.blocks] == [0, 3, 1, 2, 4]
    assert found.boundary_bytes(spec) == (100, 105, 1005, 10)


def test_side_head_stays_with_its_producer() -> None:
    # 0 -> 1 -> 2 -> 3, and from 1 a head 4 with its own output
    spec = graph(5, [(0, 1), (1, 2), (2, 3), (1, 4)])
    found = candidate_chain(spec)
    assert found.points == (0, 1, 2, 3)
    assert found.blocks == ((0,), (1,), (2, 4), (3,))
    assert found.boundary_bytes(spec) == (100, 101, 102)


def test_shape_operators_do_not_affect_points() -> None:
    """Operator 1 reads the shape of 0's output; the last operator uses that shape, past all others."""
    tensors = (
        Tensor("a", 5000, 0, (1, 2)),
        Tensor("shape", 32, 1, (4,), "int64"),
        Tensor("b", 5000, 2, (3,)),
        Tensor("c", 5000, 3, (4,)),
        Tensor("d", 5000, 4, (), is_output=True),
    )
    spec = GraphSpec("shapes", tuple(Operator(f"op{i}", "X", 1.0) for i in range(5)), tensors)
    found = candidate_chain(spec)
    assert found.points == (0, 2, 3, 4)
    assert [found.boundary_bytes(spec)[0], found.boundary_bytes(spec)[1]] == [5000, 5032]


def test_published_points_require_a_single_source() -> None:
    with pytest.raises(ValueError, match="has 2"):
        published_points(graph(3, [(0, 2), (1, 2)]))
