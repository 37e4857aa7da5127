"""The task graphs of Doppler's evaluation: as the authors' files, and priced on a home."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.graph.latency.baselines import local
from coordinator.plan.graph.latency.list_scheduling import contended_heft, heft
from tools.research.graphs import (
    GRAPHS,
    HOME,
    HOMES,
    GraphName,
    GraphSizes,
    HomeName,
    ShardedGraph,
    TensorHome,
    chain_extents,
    chain_mm,
    llama_extents,
    tensor_graph,
)

_WL_ROUNDS = 14
# The authors' sizes.
PAPER = GraphSizes(
    chain_extents(10_000),
    {"b": 2**15, "k": 2**5, "c": 2**5, "j": 2**16},
    llama_extents(4096, 4096, 32, 11_008, 32_000),
)

# Blocks of inputs, vertices, edges, and `structure` with the published costs, of the authors' files. Both graphs of a layer
# have two more inputs there than blocks of weights and of x: here the positions and the rotary table.
PUBLISHED = {
    "chain-mm": (36, 76, 80, "edf15133579e49da"),
    "ffnn": (12, 180, 208, "1a44a1a335948e44"),
    "llama-block": (33, 182, 234, "faab9123916aff7f"),
    "llama-layer": (32, 229, 284, "7c420c80253df147"),
}


def structure(labels: Sequence[object], predecessors: Sequence[Sequence[int]]) -> str:
    """Digest of a labelled graph by Weisfeiler-Lehman hashes; equal for isomorphic graphs."""
    successors: list[list[int]] = [[] for _ in labels]
    for vertex, sources in enumerate(predecessors):
        for source in sources:
            successors[source].append(vertex)
    found = [str(label) for label in labels]
    for _ in range(_WL_ROUNDS):
        found = [
            _digest(
                repr((found[v], sorted(found[p] for p in predecessors[v]), sorted(found[s] for s in successors[v])))
            )
            for v in range(len(found))
        ]
    return _digest(" ".join(sorted(found)))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("name", PUBLISHED)
def test_graphs_equal_the_published_files(name: GraphName) -> None:
    graph = tensor_graph(name, PAPER)
    predecessors = graph.spec().predecessors
    found = (len(graph.inputs), len(graph.vertices), sum(map(len, predecessors)))
    costs = [vertex.published_cost for vertex in graph.vertices]
    assert (*found, structure(costs, predecessors)) == PUBLISHED[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_home_graphs_have_the_published_structure(name: GraphName) -> None:
    graphs = [tensor_graph(name, sizes) for sizes in (HOME, PAPER)]
    at_home, published = (structure([v.kind for v in graph.vertices], graph.spec().predecessors) for graph in graphs)
    assert at_home == published


@pytest.mark.parametrize("name", GRAPHS)
def test_groups_are_the_shards_of_one_operator_in_topological_order(name: GraphName) -> None:
    spec = tensor_graph(name).spec()
    groups = [operator.group for operator in spec.operators]
    assert all(operator.name.startswith(f"{operator.group}[") for operator in spec.operators)
    place = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    for group, predecessors in zip(groups, spec.predecessors, strict=True):
        assert all(place[groups[before]] < place[group] for before in predecessors)


@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([12, 24]))
def test_shard_depends_on_the_blocks_that_hold_elements_it_reads(made: int, read: int, scale: int) -> None:
    """The consumer's index may have fewer elements than the axis (heads of a hidden axis), or read a fixed span."""
    graph = ShardedGraph("two", {"a": 24, "b": 12, "H": scale})
    graph.add("first", "Exp", "ab", {"a": made, "b": 3})
    graph.add("second", "Exp", "H", {"H": read}, ("first", ("H", (5, 9))))
    blocks = [(a, b) for a in range(made) for b in range(3)]
    predecessors = graph.spec().predecessors
    for shard in range(read):
        elements = {(a, b) for a in range(24) if a * read // 24 == shard for b in range(5, 9)}
        expected = {blocks.index((a * made // 24, b * 3 // 12)) for a, b in elements}
        assert set(predecessors[len(blocks) + shard]) == expected


def test_pieces_must_divide_the_extents() -> None:
    with pytest.raises(ValueError, match=r"A: 4 pieces do not divide 10 elements"):
        chain_mm(chain_extents(10))


def test_weights_are_parameters_and_the_request_is_an_input() -> None:
    spec = tensor_graph("ffnn").spec()
    assert [tensor.name for tensor in spec.inputs] == [f"X[{block},0]" for block in range(4)]
    assert sum(each.num_bytes for each in spec.parameters) == 2 * 64 * 8192 * 4
    assert {len(spec.operators[index].parameters) for index in range(16)} == {1}
    assert len(spec.outputs) == 16


# Seconds of the best single device, HEFT, and HEFT with contention; the shorter of the latter two is the best list of the
# homes' specification.
@pytest.mark.parametrize(
    ("home", "name", "seconds"),
    [
        ("gigabit", "llama-block", (1.083, 0.4122, 0.391)),
        ("wifi", "chain-mm", (3.244, 3.859, 1.482)),
        ("unequal", "chain-mm", (3.244, 1.224, 1.225)),
        ("unequal", "llama-layer", (1.107, 0.554, 0.520)),
    ],
)
def test_home_prices(home: HomeName, name: GraphName, seconds: tuple[float, ...]) -> None:
    problem = HOMES[home].problem(tensor_graph(name))
    found = [local(problem), heft(problem), contended_heft(problem)]
    assert [each.makespan for each in found] == pytest.approx(seconds, rel=1e-3)


def test_budget_is_a_share_of_all_weights() -> None:
    problem = TensorHome((1.0, 0.5), 100.0).problem(tensor_graph("chain-mm"), budget_share=0.75)
    assert problem.budget_bytes == (60_000_000, 60_000_000)
    assert problem.used_bytes([0] * problem.num_operators) == (80_000_000, 0)
