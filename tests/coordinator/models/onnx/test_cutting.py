"""Cutting a graph into segments: they run in order, are few, and with `eager` delay no transfer."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs import from_edges

from coordinator.models.onnx.cutting import check_segments, cut, group_segments
from hearth.errors import BadPlan
from hearth.plan.common import MemoryUse, PlannedDevice, Prediction
from hearth.plan.graph import GraphModel, GraphSegments, Segment
from hearth.plan.graph_spec import GraphSpec, Operator, Tensor
from hearth.plan.plan import GraphPlan


@st.composite
def graphs(draw: st.DrawFn, most: int = 14, ranks: int = 4) -> tuple[GraphSpec, list[int]]:
    count = draw(st.integers(1, most))
    pairs = [(source, target) for target in range(count) for source in range(target)]
    edges = [pair for pair in pairs if draw(st.integers(0, 3)) == 0]
    spec = from_edges("random", [Operator(f"op{i}", "Op", 1.0) for i in range(count)], [4] * count, edges)
    return spec, [draw(st.integers(0, ranks - 1)) for _ in range(count)]


def chain(*ranks: int) -> tuple[GraphSpec, list[int]]:
    operators = [Operator(f"op{i}", "Op", 1.0) for i in range(len(ranks))]
    return from_edges("chain", operators, [4] * len(ranks), pairwise(range(len(ranks)))), list(ranks)


def plan_of(spec: GraphSpec, segments: tuple[Segment, ...], num_ranks: int) -> GraphPlan:
    """A plan of these segments; its validator checks that they can run in their order."""
    memory = MemoryUse(weights=0, embeddings=0, activations=0, workspace=0)
    return GraphPlan(
        model=GraphModel(
            name=spec.name,
            sha256="",
            inputs=tuple(tensor.name for tensor in spec.inputs),
            outputs=tuple(tensor.name for tensor in spec.outputs),
        ),
        planner="test",
        devices=tuple(
            PlannedDevice(device_id=f"d{rank}", name=f"d{rank}", memory=memory, budget_bytes=0, compute_seconds=0)
            for rank in range(num_ranks)
        ),
        predicted=Prediction(latency_seconds=0, compute_seconds=0, transfer_seconds=0, bottleneck_seconds=0),
        body=GraphSegments(objective="latency", segments=segments),
    )


def fewest(spec: GraphSpec, assignment: list[int]) -> int:
    """The minimum number of segments over all orders. States: operators done, and the device of the last one."""
    everything = (1 << spec.num_operators) - 1
    before = [sum(1 << source for source in sources) for sources in spec.predecessors]

    @cache
    def rest(done: int, rank: int) -> int:
        if done == everything:
            return 0
        return min(
            rest(done | 1 << operator, assignment[operator]) + (assignment[operator] != rank)
            for operator in range(spec.num_operators)
            if not done >> operator & 1 and before[operator] & ~done == 0
        )

    return rest(0, -1)


@given(graphs(), st.booleans())
def test_random_assignments_give_segments_in_runnable_order(case: tuple[GraphSpec, list[int]], eager: bool) -> None:
    spec, assignment = case
    segments = cut(spec, assignment, eager=eager)
    plan_of(spec, segments, 4)
    check_segments(spec, segments)
    placed = sorted((operator, segment.rank) for segment in segments for operator in segment.operators)
    assert placed == list(enumerate(assignment))


@given(graphs(), st.booleans())
def test_one_device_needs_one_segment(case: tuple[GraphSpec, list[int]], eager: bool) -> None:
    spec, _ = case
    (segment,) = cut(spec, [2] * spec.num_operators, eager=eager)
    assert segment.rank == 2
    assert segment.inputs == ()
    assert segment.outputs == tuple(tensor.name for tensor in spec.outputs)


@given(graphs(most=9, ranks=2))
def test_two_devices_get_the_fewest_segments(case: tuple[GraphSpec, list[int]]) -> None:
    spec, assignment = case
    assert len(cut(spec, assignment)) == fewest(spec, assignment)


@given(graphs(most=9, ranks=4))
def test_more_devices_get_close_to_the_fewest_segments(case: tuple[GraphSpec, list[int]]) -> None:
    spec, assignment = case
    assert len(cut(spec, assignment)) <= fewest(spec, assignment) + 1


@given(graphs())
def test_eager_segments_delay_no_transfer(case: tuple[GraphSpec, list[int]]) -> None:
    """Each segment runs as soon as possible, one step per operator: none ends later than if each were a segment."""
    spec, assignment = case

    def ends(segments: tuple[Segment, ...]) -> dict[int, int]:
        """The time at which each operator's results are available elsewhere; only transfers take time."""
        when: dict[int, int] = {}
        for segment in segments:
            starts = [
                when[source] + (assignment[source] != segment.rank)
                for operator in segment.operators
                for source in spec.predecessors[operator]
                if source not in segment.operators
            ]
            when.update(dict.fromkeys(segment.operators, max(starts, default=0)))
        return when

    single = group_segments(spec, [[operator] for operator in range(spec.num_operators)], assignment)
    assert ends(cut(spec, assignment, eager=True)) == ends(single)


def test_remote_branch_starts_before_the_local_branch_ends() -> None:
    """0 is the stem, 1-2 the branch on the same device, 3-4 the other branch, 5 joins them."""
    spec = from_edges(
        "branches",
        [Operator(name, "Op", 1.0) for name in ("stem", "a1", "a2", "b1", "b2", "join")],
        [4] * 6,
        [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)],
    )
    assignment = [0, 0, 0, 1, 1, 0]
    assert [segment.operators for segment in cut(spec, assignment)] == [(0, 1, 2), (3, 4), (5,)]
    assert [segment.operators for segment in cut(spec, assignment, eager=True)] == [(0,), (1, 2), (3, 4), (5,)]


@pytest.mark.parametrize("eager", [False, True])
def test_segments_come_in_the_order_of_their_planned_starts(eager: bool) -> None:
    """Two chains from device 0 to device 1; the planner starts the second one first."""
    spec = from_edges("chains", [Operator(name, "Op", 1.0) for name in "abcd"], [4] * 4, [(0, 1), (2, 3)])
    segments = cut(spec, [0, 1, 0, 1], eager=eager, starts=[1.0, 2.0, 0.0, 1.0])
    order = [operator for segment in segments for operator in segment.operators]
    assert order == [2, 0, 3, 1] if eager else order == [0, 2, 1, 3]


def test_tensor_with_several_consumers_is_listed_once() -> None:
    operators = [Operator(f"op{i}", "Op", 1.0) for i in range(3)]
    tensors = (
        Tensor("x", 4, None, (0, 1)),
        Tensor("a", 4, 0, (1, 2), is_output=True),
        Tensor("b", 4, 1, (2,)),
        Tensor("c", 4, 2, (), is_output=True),
    )
    spec = GraphSpec("shared", tuple(operators), tensors)
    first, second = cut(spec, [0, 1, 1])
    assert (first.inputs, first.outputs) == (("x",), ("a",))
    assert (second.inputs, second.outputs) == (("x", "a"), ("c",))


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([[0, 2], [1]], r"in a cycle: segment 0 .* needs op1 of segment 1, segment 1 \(rank 1\) needs op0 of segment 0"),
        ([[0], [1]], r"operator 2 \(op2\) is in no segment"),
        ([[0, 1], [1, 2]], r"operator 1 \(op1\) is in two segments"),
        ([[0, 1, 2], []], "segment 1 is empty"),
        ([[0, 1], [2, 3]], "operator 3 does not exist"),
    ],
)  # fmt: skip
def test_invalid_grouping_is_rejected(groups: list[list[int]], reason: str) -> None:
    spec, _ = chain(0, 1, 0)
    with pytest.raises(BadPlan, match=reason):
        group_segments(spec, groups, [0, 1])


@pytest.mark.parametrize("assignment", [[0, 0], [0, -1, 0]])
def test_every_operator_needs_a_device(assignment: list[int]) -> None:
    spec, _ = chain(0, 1, 0)
    with pytest.raises(BadPlan):
        cut(spec, assignment)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inputs": ()}, "segment 1 lacks op0"),
        ({"outputs": ("op1", "op2")}, "segment 1 gives op2"),
        ({"operators": (2,)}, "is in two segments"),
        ({"operators": (1, 99)}, "operator 99 does not exist"),
        ({"inputs": ("op0", "elsewhere")}, "segment 1 takes elsewhere"),
    ],
)
def test_plan_for_another_graph_is_rejected(change: dict[str, Any], reason: str) -> None:
    spec, assignment = chain(0, 1, 0)
    segments = list(cut(spec, assignment))
    segments[1] = segments[1].model_copy(update=change)
    with pytest.raises(BadPlan, match=reason):
        check_segments(spec, segments)
