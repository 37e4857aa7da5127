"""ONNX files as graphs: operators, costs, tensors, and errors of malformed files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support import onnx_models
from support.onnx_models import graph, integers, node, saved, value, weight

from coordinator.models.onnx.flops import flops_of
from coordinator.models.onnx.reader import read_onnx
from hearth.errors import BadModelFile, BadSetting, DynamicShape, HearthError, UnsupportedOperator

X = [value("x", [2, 64])]
Y = [value("y", None)]


def small(path: Path) -> Path:
    """A convolution, a view, a product with a transposed weight, and a node without consumers."""
    nodes = [
        node("Conv", "x k bias", "a", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", "a", "b"),
        node("Reshape", "b shape", "c"),
        node("Transpose", "w", "w_t", perm=[1, 0]),
        node("MatMul", "c w_t", "y"),
        node("Exp", "b", "unused"),
    ]
    weights = [weight("k", 8, 3, 3, 3), weight("bias", 8), weight("w", 100, 128), integers("shape", 1, 128)]
    return saved(path, graph(nodes, [value("x", [1, 3, 8, 8])], [value("y", [1, 100])], weights))


def test_graph_has_costs_and_tensor_sizes(tmp_path: Path) -> None:
    model = read_onnx(small(tmp_path / "small.onnx"))
    spec = model.spec
    assert spec.name == "small"
    assert [(each.name, each.kind, each.flops) for each in spec.operators] == [
        ("a", "Conv", 2 * 8 * 16 * 27), ("b", "Relu", 128), ("c", "Reshape", 0), ("y", "MatMul", 2 * 128 * 100),
    ]  # fmt: skip
    assert [(each.name, each.num_bytes, each.source, each.consumers) for each in spec.tensors] == [
        ("x", 768, None, (0,)), ("a", 512, 0, (1,)), ("b", 512, 1, (2,)), ("c", 512, 2, (3,)), ("y", 400, 3, ()),
    ]  # fmt: skip
    assert spec.tensors[1].shape == (1, 8, 4, 4)
    assert [tensor.name for tensor in spec.outputs] == ["y"]
    assert [spec.parameter_bytes([index]) for index in range(4)] == [4 * (216 + 8), 0, 16, 51200]


def test_weights_stay_in_the_file(tmp_path: Path) -> None:
    numbers = helper.make_tensor("typed", TensorProto.FLOAT, [1 << 20], np.arange(1 << 20, dtype=np.float32))
    constant = helper.make_node("Constant", [], ["k"], value=weight("", 1 << 20))
    nodes = [constant, node("Add", "x typed", "a"), node("Mul", "a k", "b"), node("Sub", "b w", "y")]
    of = graph(nodes, [value("x", [1])], Y, [numbers, weight("w", 1 << 20, seed=1)])
    model = read_onnx(saved(tmp_path / "model.onnx", of))
    assert os.path.getsize(model.file.path) > 3 << 22
    assert model.file.proto.ByteSize() < 1000
    for name, expected in (("typed", np.arange(1 << 20)), ("w", numpy_helper.to_array(weight("w", 1 << 20, seed=1)))):
        np.testing.assert_array_equal(np.frombuffer(model.file.read(model.graph.constants[name]), np.float32), expected)
    os.truncate(model.file.path, 1 << 20)
    with pytest.raises(BadModelFile, match="cut short while it was read"):
        model.file.read(model.graph.constants["w"])


def test_fingerprint_covers_all_weights_and_dimensions(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    inside = onnx_models.shared_weights(tmp_path / "inside.onnx")
    path = tmp_path / "outside.onnx"
    onnx.save(onnx.load(inside), path, save_as_external_data=True, location="weights.bin")
    before = read_onnx(path).fingerprint
    for name in ("outside.onnx", "weights.bin"):
        shutil.copy(tmp_path / name, tmp_path / "other" / name)
    assert read_onnx(tmp_path / "other" / "outside.onnx").fingerprint == before
    with (tmp_path / "other" / "weights.bin").open("r+b") as file:
        file.seek(1000)
        file.write(b"\x01")
    assert read_onnx(tmp_path / "other" / "outside.onnx").fingerprint != before
    open_dims = onnx_models.shapes_from_shapes(tmp_path / "open.onnx")
    assert read_onnx(open_dims, {"n": 1}).fingerprint != read_onnx(open_dims, {"n": 2}).fingerprint


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "attributes", "flops"),
    [
        ("Conv", [(1, 8, 6, 6), (12, 4, 3, 3)], [(1, 12, 4, 4)], {"group": 2}, 2 * 12 * 16 * 4 * 9),
        ("QLinearConv", [(1, 8, 6, 6), (), (), (12, 8, 3, 3)], [(1, 12, 4, 4)], {}, 2 * 12 * 16 * 72),
        ("ConvTranspose", [(1, 8, 6, 6), (8, 4, 2, 2)], [(1, 4, 12, 12)], {}, 2 * 8 * 36 * 16),
        ("Gemm", [(5, 3), (7, 5)], [(3, 7)], {"transA": 1, "transB": 1}, 2 * 3 * 5 * 7),
        ("MatMul", [(4, 1, 2, 3), (5, 3, 6)], [(4, 5, 2, 6)], {}, 2 * 4 * 5 * 2 * 3 * 6),
        ("FusedMatMul", [(3, 2), (3, 6)], [(2, 6)], {"transA": 1}, 2 * 2 * 3 * 6),
        ("Einsum", [(2, 3, 4), (2, 5, 4)], [(2, 3, 5)], {"equation": "bij,bkj->bik"}, 2 * 2 * 3 * 4 * 5),
        ("Einsum", [(7, 2, 3), (3, 5)], [(7, 2, 5)], {"equation": "...ij, jk -> ...ik"}, 2 * 7 * 2 * 3 * 5),
        ("LSTM", [(10, 2, 3), (1, 16, 3), (1, 16, 4)], [(10, 1, 2, 4)], {}, 2 * 10 * 2 * 16 * 7),
        ("MaxPool", [(1, 8, 6, 6)], [(1, 8, 3, 3)], {"kernel_shape": [2, 2]}, 8 * 9 * 4),
        ("AveragePool", [(1, 8, 6, 6)], [(1, 8, 1, 1)], {"kernel_shape": [99, 99]}, 8 * 36),
        ("GlobalAveragePool", [(1, 8, 6, 6)], [(1, 8, 1, 1)], {}, 8 * 36),
        ("Attention", [(1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)], [(1, 2, 5, 4)], {}, 2 * 2 * 5 * 7 * (4 + 4)),
        ("Attention", [(1, 5, 8), (8, 24)], [(1, 5, 8)], {}, 2 * 5 * 8 * 24 + 2 * 2 * 5 * 5 * 8),
        ("Transpose", [(2, 3)], [(3, 2)], {}, 6),
        ("Squeeze", [(1, 3)], [(3,)], {}, 0),
        ("Split", [(4, 3)], [(1, 3), (3, 3)], {}, 12),
    ],
)
def test_floating_point_operations(
    kind: str, inputs: list[Any], outputs: list[Any], attributes: dict[str, Any], flops: float
) -> None:
    names = [
        " ".join(f"{letter}{index}" for index in range(len(shapes)))
        for letter, shapes in (("i", inputs), ("o", outputs))
    ]
    assert flops_of(node(kind, *names, **attributes), inputs, outputs) == flops


def test_control_flow_costs_as_much_as_its_body(tmp_path: Path) -> None:
    spec = read_onnx(onnx_models.loop(tmp_path / "loop.onnx")).spec
    (loop,) = (each for each in spec.operators if each.kind == "Loop")
    # A product, a sum, a tanh and a mean of 2 x 80, five times.
    assert loop.flops == 5 * (2 * 2 * 80 * 80 + 3 * 160)
    taken = next(index for index, each in enumerate(spec.operators) if each is loop)
    assert {tensor.name for tensor in spec.consumed[taken]} == {"start", "u"}


def test_random_node_without_inputs_is_an_operator(tmp_path: Path) -> None:
    """A random node without inputs is placed like other operators: two devices would draw different numbers."""
    nodes = [
        helper.make_node("RandomNormal", [], ["r"], shape=[2, 64]), node("Add", "x r", "a"), node("Sub", "a r", "y")
    ]  # fmt: skip
    spec = read_onnx(saved(tmp_path / "random.onnx", graph(nodes, X, Y))).spec
    assert [each.kind for each in spec.operators] == ["RandomNormal", "Add", "Sub"]


# ---- dimensions ---------------------------------------------------------------------------------------------------


def open_model(tmp_path: Path) -> Path:
    nodes = [node("MatMul", "x w", "a"), node("Add", "a z", "y")]
    inputs = [value("x", ["batch", None, 64]), value("z", ["batch", 1, 128])]
    return saved(tmp_path / "open.onnx", graph(nodes, inputs, Y, [weight("w", 64, 128)]))


def test_dimensions_are_set_by_name_or_position(tmp_path: Path) -> None:
    path = open_model(tmp_path)
    assert read_onnx(path, {"batch": 2, "x.1": 5}).spec.outputs[0].shape == (2, 5, 128)
    assert read_onnx(path, {"x.0": 3, "x.1": 5, "z.0": 1}).spec.outputs[0].shape == (3, 5, 128)


def test_open_dimension_without_a_value_is_named(tmp_path: Path) -> None:
    path = open_model(tmp_path)
    with pytest.raises(DynamicShape) as error:
        read_onnx(path)
    assert (error.value.tensor, error.value.axis) == ("x", 0)
    assert error.value.options == "--dim batch=1 --dim x.1=1"
    with pytest.raises(DynamicShape, match=r"axis 1 of its input 'x'.*--dim x\.1=1"):
        read_onnx(path, {"batch": 1})


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ({"bach": 1}, "--dim bach=1.*leaves open: only batch, x.0, x.1"),
        ({"batch": 0, "x.1": 1}, "--dim batch=0.*at least 1"),
        ({"x.2": 64}, "--dim x.2=64"),
    ],
)
def test_fixed_dimension_cannot_be_set(tmp_path: Path, dims: dict[str, int], reason: str) -> None:
    with pytest.raises(BadSetting, match=reason):
        read_onnx(open_model(tmp_path), dims)


def test_inconsistent_dimensions_are_reported_at_their_operator(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="the Add node 'y' does not fit its inputs"):
        read_onnx(open_model(tmp_path), {"x.0": 2, "z.0": 3, "x.1": 1})


# ---- unsupported operators ----------------------------------------------------------------------------------------


def dynamic_loop() -> list[onnx.NodeProto]:
    body = graph(
        [node("ReduceMean", "state", "m", keepdims=0), node("Less", "m limit", "go_on"), node("Exp", "state", "next")],
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("state", None)],
        [value("go_on", [], TensorProto.BOOL), value("next", None), value("m", None)],
    )
    return [node("ReduceMax", "x", "limit", keepdims=0), node("Loop", "- - x", "y all", body=body)]


def unlike_branches() -> list[onnx.NodeProto]:
    one = graph([node("Exp", "x", "b1")], [], [value("b1", None)])
    other = graph([node("ReduceSum", "x", "b2")], [], [value("b2", None)])
    nodes = [node("ReduceMax", "x", "m", keepdims=0), node("Cast", "m", "choice", to=TensorProto.BOOL)]
    return [*nodes, node("If", "choice", "y", then_branch=one, else_branch=other)]


@pytest.mark.parametrize(
    ("nodes", "operator", "name", "reason"),
    [
        ([node("Fancy", "x", "y", domain="our.domain")], "our.domain.Fancy", "y", "domain 'our.domain'"),
        ([node("Fancy", "x", "y")], "Fancy", "y", "version 17 of the standard operators"),
        ([node("Fancy", "x", "y", domain="com.microsoft")], "com.microsoft.Fancy", "y", "output y is known only at run time"),
        ([node("NonZero", "x", "i"), node("Neg", "i", "y")], "NonZero", "i", "output i is known only at run time"),
        ([node("SplitToSequence", "x", "y")], "SplitToSequence", "y", "not a tensor"),
        (dynamic_loop(), "Loop", "y", "number of its iterations"),
        (unlike_branches(), "If", "y", "branches give different shapes"),
    ],
)  # fmt: skip
def test_unsupported_operator_is_named(
    tmp_path: Path, nodes: list[onnx.NodeProto], operator: str, name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedOperator, match=reason) as error:
        read_onnx(saved(tmp_path / "model.onnx", graph(nodes, X, Y)))
    assert (error.value.operator, error.value.node) == (operator, name)


def test_unknown_operator_has_the_output_shape_of_the_file(tmp_path: Path) -> None:
    of = graph([node("Fancy", "x", "y", domain="com.microsoft")], X, [value("y", [2, 3])])
    assert read_onnx(saved(tmp_path / "model.onnx", of)).spec.outputs[0].shape == (2, 3)


# ---- unreadable files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (
            graph([node("Add", "x missing", "y")], X, Y),
            "the Add node 'y' uses the tensor missing, which no node produces",
        ),
        (graph([node("Add", "x b", "a"), node("Exp", "a", "b")], X, [value("b", None)]), "in a cycle"),
        (graph([node("Exp", "x", "y"), node("Abs", "x", "y")], X, Y), "two of its nodes produce the tensor y"),
        (graph([node("Exp", "x", "a")], X, Y), "no node produces its output y"),
        (graph([node("Exp", "x", "y")], X, []), "no outputs"),
        (graph([node("MatMul", "x w", "y")], X, Y, [weight("w", 3, 3)]), "the MatMul node 'y' does not fit"),
        (graph([node("Exp", "x", "y")], [value("x", [2], TensorProto.STRING)], Y), "x is not a tensor of numbers"),
        (graph([node("Exp", "x", "y")], [value("x", None)], Y), "how many axes its input x has"),
        (graph([node("Exp", "x", "y")], X, Y, [weight("w", 3), weight("w", 3)]), "same name"),
        (graph([node("If", "x", "y")], X, Y), "the If node 'y' is not complete"),
    ],
)
def test_invalid_graphs_are_rejected(tmp_path: Path, of: onnx.GraphProto, reason: str) -> None:
    with pytest.raises(BadModelFile, match=reason):
        read_onnx(saved(tmp_path / "model.onnx", of))


def test_non_onnx_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(BadModelFile, match="no such file"):
        read_onnx(path)
    for content in (b"", b"\x80" * 50, b"PK\x03\x04 a zip archive", os.urandom(40000)):
        path.write_bytes(content)
        with pytest.raises(BadModelFile):
            read_onnx(path)
    whole = onnx_models.shared_weights(path).read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 40):
        path.write_bytes(whole[:length])
        with pytest.raises(BadModelFile, match="cut short"):
            read_onnx(path)


def save_with_external_weights(tmp_path: Path) -> Path:
    path = tmp_path / "outside.onnx"
    model = onnx.load(onnx_models.shared_weights(tmp_path / "inside.onnx"))
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def cut_weights(path: Path) -> None:
    os.truncate(path.with_name("weights.bin"), 40000)


def point_at(location: str, length: int = 32768) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if tensor.name == "w" and entry.key in ("location", "length"):
                    entry.value = location if entry.key == "location" else str(length)
        path.write_bytes(model.SerializeToString())

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.with_name("weights.bin").unlink(), r"its weights in weights\.bin are missing"),
        (cut_weights, r"the weight \w is incomplete: weights\.bin was cut short"),
        (point_at("../inside.onnx"), r"the weight w lies outside of the model's folder, at \.\./inside\.onnx"),
        (point_at("/etc/hostname"), "outside of the model's folder"),
        (point_at("weights.bin", 1000), "the weight w has 1000 bytes, its type and shape need 32768"),
    ],
)
def test_invalid_external_weights_are_reported(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    path = save_with_external_weights(tmp_path)
    read_onnx(path)
    damage(path)
    with pytest.raises(BadModelFile, match=reason):
        read_onnx(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_models.branches(tmp_path_factory.mktemp("intact") / "model.onnx")


@given(st.data())
def test_damaged_files_give_a_graph_or_a_typed_error(intact: Path, data: st.DataObject) -> None:
    content = bytearray(intact.read_bytes())
    heads = [index for index in range(len(content)) if index < 200 or content[index : index + 3] != b"\x00" * 3]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.sampled_from(heads))] = data.draw(st.integers(0, 255))
    damaged = intact.with_name("damaged.onnx")
    damaged.write_bytes(bytes(content))
    try:
        read_onnx(damaged)
    except HearthError:
        pass
