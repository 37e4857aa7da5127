"""GCOF: what a backend fuses is one operator, and nothing else is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.coarsening import coarsen
from hearth.graph.spec import GraphSpec, Operator, Parameter, from_edges


def graph(kinds: list[str], edges: list[tuple[int, int]]) -> GraphSpec:
    operators = [Operator(f"op{i}", kind, float(i + 1), (i,)) for i, kind in enumerate(kinds)]
    return from_edges("graph", operators, [8] * len(kinds), edges, [Parameter(f"w{i}", 4) for i in range(len(kinds))])


def test_the_longest_rule_is_completed() -> None:
    spec = graph(["Conv", "BatchNormalization", "Relu", "MaxPool"], [(0, 1), (1, 2), (2, 3)])
    found = coarsen(spec)
    assert found.groups == ((0, 1, 2), (3,))
    assert found.spec.operators[0].flops == 6.0


def test_the_papers_example_of_a_residual_block() -> None:
    """Multi-input connections fuse (the last convolution with the addition), multi-output ones do not."""
    kinds = ["Add", "Relu", "Conv", "BatchNormalization", "Conv", "BatchNormalization", "Add", "Relu"]
    edges = [(0, 1), (0, 2), (2, 3), (3, 4), (4, 5), (1, 6), (5, 6), (6, 7)]
    assert coarsen(graph(kinds, edges)).groups == ((0,), (1,), (2, 3), (4, 5, 6, 7))


def test_what_never_completes_a_rule_is_unbound() -> None:
    spec = graph(["Div", "Erf", "Add", "Softmax"], [(0, 1), (1, 2), (2, 3)])
    assert coarsen(spec).groups == ((0,), (1,), (2,), (3,))


def test_a_tensor_that_others_take_keeps_its_operator_apart() -> None:
    spec = graph(["Conv", "Relu", "Sigmoid"], [(0, 1), (0, 2)])
    assert coarsen(spec).groups == ((0,), (1,), (2,))


@given(st.data())
def test_every_operator_is_in_one_group_and_the_order_stays_topological(data: st.DataObject) -> None:
    kind = st.sampled_from(["Conv", "BatchNormalization", "Relu", "Add", "MatMul", "Div", "Erf", "Mul"])
    kinds = data.draw(st.lists(kind, min_size=1, max_size=12))
    pairs = [(a, b) for b in range(len(kinds)) for a in range(b)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    spec = graph(kinds, edges)
    found = coarsen(spec)  # a GraphSpec refuses an order that is not topological
    assert sorted(i for group in found.groups for i in group) == list(range(len(kinds)))
    assert sum(each.flops for each in found.spec.operators) == sum(each.flops for each in spec.operators)
    everything = range(found.spec.num_operators)
    assert found.spec.parameter_bytes(everything) == spec.parameter_bytes(range(len(kinds)))
    device = [g % 3 for g in everything]
    spread = found.spread(device)
    assert all(spread[i] == device[g] for g, group in enumerate(found.groups) for i in group)
