"""GCOF coarsening: operators that a backend fuses become one operator; the graph is otherwise unchanged."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ortools")

from support.graphs import from_edges
from support.schedule_checker import violations

from coordinator.plan.graph.latency.coarsening import coarsen
from coordinator.plan.graph.latency.list_scheduling import heft
from coordinator.plan.graph.latency.schedule import best_schedule
from coordinator.plan.graph.latency.search import solve_moirai
from coordinator.plan.solution import SearchOptions
from hearth.errors import BadSetting
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter
from tools.bench.experiment import Context, make_experiment, read_settings
from tools.research.moirai import (
    SLOWDOWNS,
    Coarsening,
    CoarseningRow,
    on_devices,
    problem_on_devices,
    refined_schedule,
)

KINDS = ["Pad", "Conv", "BatchNormalization", "Relu", "Add", "MatMul", "Div", "Erf", "Mul", "Sigmoid"]


def graph(kinds: list[str], edges: list[tuple[int, int]]) -> GraphSpec:
    operators = [Operator(f"op{i}", kind, float(i + 1), (i,)) for i, kind in enumerate(kinds)]
    return from_edges("graph", operators, [8] * len(kinds), edges, [Parameter(f"w{i}", 4) for i in range(len(kinds))])


def test_longest_fusion_rule_wins() -> None:
    spec = graph(["Conv", "BatchNormalization", "Relu", "MaxPool"], [(0, 1), (1, 2), (2, 3)])
    found = coarsen(spec)
    assert found.groups == ((0, 1, 2), (3,))
    assert found.spec.operators[0].flops == 6.0


def test_padding_fuses_with_the_following_convolution() -> None:
    spec = graph(["Pad", "Conv", "Clip", "Pad", "MaxPool"], [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert coarsen(spec).groups == ((0, 1, 2), (3,), (4,))


def test_matmul_fuses_with_a_bias_but_not_with_a_mask() -> None:
    operators = [Operator("a", "MatMul", 1.0, (0,)), Operator("b", "Add", 1.0, (1,)), Operator("c", "MatMul", 1.0)]
    operators.append(Operator("d", "Add", 1.0))
    spec = from_edges("graph", operators, [8] * 4, [(0, 1), (1, 2), (2, 3)], [Parameter("w", 4), Parameter("v", 4)])
    assert coarsen(spec).groups == ((0, 1), (2,), (3,))


def test_sigmoid_gating_its_own_input_fuses_with_the_product() -> None:
    swish = graph(["Conv", "Sigmoid", "Mul"], [(0, 1), (0, 2), (1, 2)])
    assert coarsen(swish).groups == ((0,), (1, 2))
    gated = graph(["Relu", "Relu", "Sigmoid", "Mul"], [(0, 2), (1, 3), (2, 3)])
    assert coarsen(gated).groups == ((0,), (1,), (2,), (3,))


def test_residual_block_of_the_paper() -> None:
    """Multi-input connections fuse (the last convolution with the addition), multi-output ones do not."""
    kinds = ["Add", "Relu", "Conv", "BatchNormalization", "Conv", "BatchNormalization", "Add", "Relu"]
    edges = [(0, 1), (0, 2), (2, 3), (3, 4), (4, 5), (1, 6), (5, 6), (6, 7)]
    assert coarsen(graph(kinds, edges)).groups == ((0,), (1,), (2, 3), (4, 5, 6, 7))


def test_incomplete_rules_fuse_nothing() -> None:
    spec = graph(["Div", "Erf", "Add", "Softmax"], [(0, 1), (1, 2), (2, 3)])
    assert coarsen(spec).groups == ((0,), (1,), (2,), (3,))


def test_tensor_with_other_consumers_prevents_fusion() -> None:
    spec = graph(["Conv", "Relu", "Sigmoid"], [(0, 1), (0, 2)])
    assert coarsen(spec).groups == ((0,), (1,), (2,))


@st.composite
def graphs(draw: st.DrawFn) -> GraphSpec:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12))
    pairs = [(a, b) for b in range(len(kinds)) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return graph(kinds, edges)


@given(st.data())
def test_groups_partition_operators_in_topological_order(data: st.DataObject) -> None:
    spec = data.draw(graphs())
    found = coarsen(spec)  # a GraphSpec rejects an order that is not topological
    assert sorted(i for group in found.groups for i in group) == list(range(spec.num_operators))
    assert sum(each.flops for each in found.spec.operators) == sum(each.flops for each in spec.operators)
    everything = range(found.spec.num_operators)
    assert found.spec.parameter_bytes(everything) == spec.parameter_bytes(range(spec.num_operators))
    device = [g % 3 for g in everything]
    spread = found.expand_assignment(device)
    assert all(spread[i] == device[g] for g, group in enumerate(found.groups) for i in group)


# ---- the benchmark ----------------------------------------------------------------------------------------------------


@given(st.data())
def test_coarsened_plan_is_valid_on_the_original_graph(data: st.DataObject) -> None:
    spec = data.draw(graphs())
    n = spec.num_operators
    seconds = data.draw(st.lists(st.floats(0, 1e-6, allow_subnormal=False), min_size=n, max_size=n))
    congestion = data.draw(st.booleans())
    on_each, coarsened = on_devices(seconds), coarsen(spec)
    fine = replace(problem_on_devices(spec, on_each), congestion=congestion)
    coarse = replace(problem_on_devices(coarsened.spec, coarsened.group_seconds(on_each)), congestion=congestion)
    ranks = st.sampled_from(range(len(SLOWDOWNS)))
    where = data.draw(st.lists(ranks, min_size=coarse.num_operators, max_size=coarse.num_operators))
    solved = solve_moirai(coarse, SearchOptions(5.0, 0, time.monotonic)).assignment
    for known in (solved, heft(coarse), best_schedule(coarse, where, range(coarse.num_operators))):
        assert violations(coarse, known) == []
        refined = refined_schedule(fine, spec, coarsened, known)
        assert violations(fine, refined) == []
        assert refined.makespan <= known.makespan * (1 + 1e-9)
        assert refined.assignment == coarsened.expand_assignment(known.assignment)


def residual() -> GraphSpec:
    """Two branches, each of which fuses to one operator."""
    kinds = ["Conv", "Conv", "Relu", "Conv", "Relu", "Concat"]
    return graph(kinds, [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)])


def coarsening(folder: Path) -> Coarsening:
    pytest.importorskip("torch", reason="the list of experiments imports those that measure it")
    experiment = make_experiment(read_settings("coarsening", [f'onnx="{folder}"', "time_limit=10"]))
    assert isinstance(experiment, Coarsening)
    return experiment


def test_row_reports_operators_and_makespans_of_both_plans(tmp_path: Path) -> None:
    seconds = [1.0, 2.0, 0.5, 2.0, 0.5, 1.0]
    experiment = coarsening(tmp_path)
    row = experiment.compare(replace(residual(), name="residual"), seconds, num_kernels=4)
    assert (row.fine.num_operators, row.coarse.num_operators, row.num_kernels) == (6, 4, 4)
    # The branches run in parallel on the two devices that are 8 times slower than this machine. The stem's result is
    # transferred; the transfer of one branch's result overlaps the other branch, which started later.
    way = 8 / 125e6 + 0.0002
    assert row.fine.makespans["moirai"] == row.refined_makespan == pytest.approx(8 * 4.5 + way, abs=1e-6)
    assert row.fine.makespans["local"] == pytest.approx(8 * 7.0)
    assert row.fine.proven
    assert row.loss == 0
    found = experiment.summary([row])
    assert found.tables[0].rows[0][:5] == ("residual", "6", "4", "4 (-33%)", "56000.00")
    assert found.tables[0].rows[0][-3] == "+0.00%"
    assert found.tables[0].rows[0][-1] == "not worse"
    assert not found.failure
    for plan in ("fine", "coarse"):
        planned = getattr(row, plan)
        slow = planned.model_copy(update={"makespans": {**planned.makespans, "moirai": 60.0}})
        assert "worse than a baseline" in experiment.summary([row.model_copy(update={plan: slow})]).failure


def test_folder_without_onnx_files_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"onnx.*holds no \.onnx files"):
        next(coarsening(tmp_path).measure(Context(tmp_path, lambda step: None)))


def test_onnx_file_is_profiled_and_planned_both_ways(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from support.onnx_models import branches

    branches(tmp_path / "branches.onnx")
    (row,) = coarsening(tmp_path).measure(Context(tmp_path, lambda step: None))
    assert isinstance(row, CoarseningRow)
    assert row.fine.instance == "branches"
    assert 0 < row.coarse.num_operators <= row.fine.num_operators
    assert row.num_kernels > 0
