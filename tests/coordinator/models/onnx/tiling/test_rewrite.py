"""Tiled graphs compute what the whole graph computes, for any pieces; a tile holds only its part of the weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.onnx_models import (
    branches,
    graph,
    integers,
    node,
    random_inputs,
    run_segments,
    run_whole,
    saved,
    value,
    weight,
)

from coordinator.models.onnx.cutting import cut
from coordinator.models.onnx.reader import OnnxModel, read_onnx
from coordinator.models.onnx.segments import segment_model
from coordinator.models.onnx.tiling.rewrite import tile
from coordinator.models.onnx.tiling.rules import index_spaces
from coordinator.models.onnx.tiling.space import IndexSpace, Pieces
from hearth.errors import CannotTile

pytest.importorskip("onnxruntime")
TOLERANCE = 1e-4
MOST_PIECES = 6  # of one operator


def vision(path: Path) -> Path:
    """Convolutions with stride, dilation, groups and uneven padding; pooling; batch normalisation; a classifier."""
    nodes = [
        node("Conv", "x w1 b1", "a", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b w2 -", "c", kernel_shape=[3, 3], dilations=[2, 1], pads=[2, 0, 3, 2]),
        node("BatchNormalization", "c gain bias mean spread", "d"),
        node("Conv", "d w3 b3", "e", kernel_shape=[3, 3], group=8, pads=[1, 1, 1, 1]),
        node("Clip", "e low high", "f"),
        node("Conv", "f w4 b3", "g", kernel_shape=[1, 1], auto_pad=b"SAME_UPPER"),
        node("Add", "g d", "h"),
        node("MaxPool", "h", "i", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0]),
        node("AveragePool", "i", "j", kernel_shape=[2, 2], pads=[1, 0, 0, 1]),
        node("Pad", "j border", "k"),
        node("GlobalAveragePool", "k", "l"),
        node("Flatten", "l", "m"),
        node("Gemm", "m w5 b5", "n", transB=1, alpha=0.5),
        node("Concat", "n m", "o", axis=1),
        node("Split", "o sizes", "p q", axis=1),
        node("Softmax", "p", "y", axis=1),
    ]
    weights = [
        weight("w1", 8, 3, 3, 3), weight("b1", 8, seed=1), weight("w2", 8, 8, 3, 3, seed=2), weight("gain", 8, seed=3),
        weight("bias", 8, seed=4), weight("mean", 8, seed=5), weight("w3", 16, 1, 3, 3, seed=6), weight("b3", 16, seed=7),
        weight("w4", 8, 16, 1, 1, seed=8), weight("w5", 10, 8, seed=9), weight("b5", 10, seed=10),
        onnx.numpy_helper.from_array(np.arange(1, 9, dtype=np.float32), "spread"), integers("sizes", 6, 12),
        onnx.numpy_helper.from_array(np.float32(-1), "low"), onnx.numpy_helper.from_array(np.float32(1), "high"),
        integers("border", 0, 0, 1, 0, 0, 0, 0, 2),
    ]  # fmt: skip
    nodes[6].input[2] = "b4"
    weights.append(weight("b4", 8, seed=11))
    outputs = [value("y", None), value("q", None), value("h", None)]
    return saved(path, graph(nodes, [value("x", [2, 3, 13, 9])], outputs, weights))


def transformer(path: Path) -> Path:
    """One encoder layer: an embedding, attention by heads, norms, a mask, and shapes that merge and split axes."""
    nodes = [
        node("Gather", "table ids", "x"),
        node("LayerNormalization", "x gain shift", "n", axis=-1),
        node("Transpose", "w_q", "w_qt", perm=[1, 0]),
        node("MatMul", "n w_qt", "q"),
        node("MatMul", "n w_k", "k"),
        node("MatMul", "n w_v", "v"),
        node("Add", "v b_v", "v2"),
        node("Reshape", "q heads", "q4"),
        node("Reshape", "k heads", "k4"),
        node("Reshape", "v2 heads", "v4"),
        node("Transpose", "q4", "qh", perm=[0, 2, 1, 3]),
        node("Transpose", "k4", "kh", perm=[0, 2, 3, 1]),
        node("Transpose", "v4", "vh", perm=[0, 2, 1, 3]),
        node("MatMul", "qh kh", "scores"),
        node("Unsqueeze", "mask middle", "mask4"),
        node("Cast", "mask4", "masked", to=onnx.TensorProto.FLOAT),
        node("Add", "scores masked", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p vh", "mixed"),
        node("Transpose", "mixed", "m4", perm=[0, 2, 1, 3]),
        node("Reshape", "m4 merged", "m"),
        node("Gemm", "m w_o b_o", "o"),
        node("Reshape", "o rows", "o3"),
        node("Add", "o3 x", "r"),
        node("ReduceMean", "r", "mean", axes=[-1], keepdims=1),
        node("Sub", "r mean", "centred"),
        node("Slice", "centred zero one axis", "first"),
        node("Squeeze", "first axis", "pooled"),
        node("Where", "flag pooled table0", "y"),
        node("Expand", "mean wide", "z"),
    ]
    weights = [
        weight("table", 40, 24), weight("gain", 24, seed=1), weight("shift", 24, seed=2), weight("w_q", 24, 24, seed=3),
        weight("w_k", 24, 24, seed=4), weight("w_v", 24, 24, seed=5), weight("b_v", 24, seed=6),
        integers("heads", 2, 6, 4, 6), integers("middle", 1, 2), integers("merged", 12, 24), weight("w_o", 24, 24, seed=7),
        weight("b_o", 12, 1, seed=8), integers("rows", 2, 6, 24), integers("zero", 0), integers("one", 1),
        integers("axis", 1), integers("wide", 2, 6, 5), weight("table0", 1, 24, seed=9),
        onnx.numpy_helper.from_array(np.arange(24) % 2 == 0, "flag"),
    ]  # fmt: skip
    inputs = [value("ids", [2, 6], onnx.TensorProto.INT64), value("mask", [2, 6], onnx.TensorProto.INT64)]
    return saved(path, graph(nodes, inputs, [value("y", None), value("z", None), value("r", None)], weights))


def large(path: Path) -> Path:
    """Weights that stay in the file: a MatMul, a convolution with a bias, a transposed weight, an operator with a body."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("Transpose", "w", "w_t", perm=[1, 0]),
        node("MatMul", "a w_t", "b"),
        node("Reshape", "b square", "c"),
        node("Conv", "c k bias", "d", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("ReduceMax", "d", "y", axes=[3], keepdims=0),
    ]
    weights = [
        weight("w", 64, 256), weight("k", 4096, 8, 3, 3, seed=1), weight("bias", 4096, seed=2),
        integers("square", 1, 8, 2, 4),
    ]  # fmt: skip
    return saved(path, graph(nodes, [value("x", [1, 64])], [value("y", None)], weights))


class Case:
    """A graph with its index spaces, an input, and the outputs of the whole file."""

    def __init__(self, path: Path) -> None:
        self.model = read_onnx(path)
        self.spaces = index_spaces(self.model)
        self.inputs = random_inputs(self.model.spec)
        self.expected = run_whole(path, self.inputs)

    def check(self, tiled: OnnxModel, num_devices: int = 1) -> None:
        assert [each.name for each in tiled.spec.outputs] == [each.name for each in self.model.spec.outputs]
        assignment = [operator % num_devices for operator in range(tiled.spec.num_operators)]
        found = run_segments(tiled, cut(tiled.spec, assignment), self.inputs)
        for name, array in self.expected.items():
            assert found[name].shape == array.shape
            assert np.abs(found[name].astype(np.float64) - array).max() <= TOLERANCE, name


def pieces_of(space: IndexSpace) -> st.SearchStrategy[Pieces]:
    """Any pieces of an index space, up to MOST_PIECES in all."""
    return st.tuples(*(st.integers(1, max(min(size, 4), 1)) for size in space.sizes)).filter(
        lambda pieces: np.prod(pieces) <= MOST_PIECES
    )


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("models")
    return [Case(make(folder / f"{make.__name__}.onnx")) for make in (vision, transformer, large, branches)]


@pytest.mark.parametrize("which", range(4))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_tiles_of_any_pieces_equal_the_whole_graph(cases: list[Case], which: int, data: st.DataObject) -> None:
    case = cases[which]
    pieces = {
        operator: data.draw(pieces_of(space))
        for operator, space in enumerate(case.spaces)
        if isinstance(space, IndexSpace)
    }
    case.check(tile(case.model, pieces), num_devices=data.draw(st.sampled_from([1, 1, 3])))


@pytest.mark.parametrize("which", range(2))
def test_each_axis_of_each_operator_alone(cases: list[Case], which: int) -> None:
    """Cut one axis of every operator, so that no error of an axis hides behind another."""
    case = cases[which]
    most = max(len(space.sizes) for space in case.spaces if isinstance(space, IndexSpace))
    for axis in range(most):
        pieces = {
            operator: tuple(min(2, size) if number == axis else 1 for number, size in enumerate(space.sizes))
            for operator, space in enumerate(case.spaces)
            if isinstance(space, IndexSpace) and axis < len(space.sizes)
        }
        case.check(tile(case.model, pieces))


def operator(model: OnnxModel, name: str) -> int:
    return next(index for index, each in enumerate(model.spec.operators) if each.name == name)


def test_a_tile_holds_only_its_part_of_the_weights(cases: list[Case]) -> None:
    case = cases[2]
    convolution, product = operator(case.model, "d"), operator(case.model, "a")
    tiled = tile(case.model, {convolution: (1, 4, 1, 1), product: (1, 1, 2)})
    case.check(tiled)
    held = [
        tiled.spec.parameter_bytes([index]) for index, each in enumerate(tiled.spec.operators) if "d/tile" in each.name
    ]
    assert held == [1024 * 8 * 9 * 4 + 1024 * 4] * 4
    segments = cut(tiled.spec, list(range(tiled.spec.num_operators)))
    slices = [each for segment in segments for each in segment_model(tiled, segment).weights if each.name[:2] == "w["]
    assert [tuple(each.dims) for each in slices] == [(32, 256)] * 2  # read from the file when they are sent
    data = tiled.file.read(case.model.graph.constants["w"])
    assert b"".join(map(tiled.file.read, slices)) == data


def test_partial_sums_are_formed_with_the_bias_once(cases: list[Case]) -> None:
    case = cases[2]
    tiled = tile(case.model, {operator(case.model, "d"): (1, 2, 1, 4)})
    kinds = [each.kind for each in tiled.spec.operators]
    assert (kinds.count("Conv"), kinds.count("Sum")) == (8, 2)
    assert [len(node.input) for node in tiled.graph.nodes if node.op_type == "Sum"] == [5, 5]
    groups = Counter(each.group for each in tiled.spec.operators)
    assert {group: count for group, count in groups.items() if group} == {"d/tile": 8, "d/sum": 2}
    case.check(tiled)


def test_flops_of_tiles_add_up_and_halos_cost_more(cases: list[Case]) -> None:
    case = cases[0]
    whole = case.model.spec.operators[operator(case.model, "a")].flops
    tiled = tile(case.model, {operator(case.model, "a"): (2, 2, 1, 3)})
    assert sum(each.flops for each in tiled.spec.operators if each.kind == "Conv" and each.name[0] == "a") == whole


def test_tiled_model_is_another_model_for_plans_and_profiles(cases: list[Case]) -> None:
    model = cases[0].model
    tiled = [tile(model, {operator(model, "a"): pieces}) for pieces in ((1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1))]
    assert len({each.fingerprint for each in tiled}) == 3
    assert tiled[2] is model


@pytest.mark.parametrize(
    ("which", "name", "pieces", "reason"),
    [
        (3, "c", (2,), "operators of type If have no rule"),
        (0, "a", (2, 2), "do not fit an index space"),
        (0, "a", (3, 1, 1, 1), "do not fit an index space"),
        (0, "o", (1, 2), "do not fit"),
    ],
)
def test_an_operator_that_cannot_be_cut_is_named(
    cases: list[Case], which: int, name: str, pieces: Pieces, reason: str
) -> None:
    model = cases[which].model
    with pytest.raises(CannotTile, match=reason) as raised:
        tile(model, {operator(model, name): pieces})
    assert raised.value.operator == name
