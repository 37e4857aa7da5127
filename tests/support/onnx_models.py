"""ONNX models for tests: small handmade ones, exported networks, and segments run one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from coordinator.models.onnx.file import dtype_name, num_bytes_of
from coordinator.models.onnx.reader import OnnxModel
from coordinator.models.onnx.segments import segment_model
from hearth.plan.graph import Segment
from hearth.plan.graph_spec import GraphSpec

Arrays = dict[str, Any]
LARGE = (64, 128)  # a float32 weight of 32 KiB, which stays in the file
WIDE = (64, 320)  # an int8 weight that stays in the file


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    """A node with space-separated names; `-` stands for an omitted input or output."""
    takes, gives = (["" if name == "-" else name for name in names.split()] for names in (inputs, outputs))
    return helper.make_node(kind, takes, gives, name=gives[0], **attributes)


def weight(name: str, *shape: int, seed: int = 0, dtype: str = "float32") -> TensorProto:
    values = np.random.default_rng(seed).standard_normal(shape) / 8
    return numpy_helper.from_array(values.astype(dtype), name)


def integers(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def value(name: str, shape: Sequence[int | str | None], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def graph(
    nodes: Iterable[NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    weights: Iterable[TensorProto] = (),
    name: str = "by-hand",
) -> GraphProto:
    return helper.make_graph(list(nodes), name, list(inputs), list(outputs), list(weights))


def saved(path: Path, of: GraphProto, opset: int = 17, **more: Any) -> Path:
    """Save with the operator sets of ONNX and of onnxruntime."""
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1), *more.pop("opsets", ())]
    model: ModelProto = helper.make_model(of, opset_imports=opsets, ir_version=8, **more)
    path.write_bytes(model.SerializeToString())
    return path


def save_two_products(path: Path, rows: int = 512, width: int = 512) -> Path:
    """y = Relu(x W1) W2, with square weights: by default 268 MFLOP and 1 MiB each."""
    nodes = [node("MatMul", "x w1", "a"), node("Relu", "a", "b"), node("MatMul", "b w2", "y")]
    weights = [weight("w1", width, width), weight("w2", width, width, seed=1)]
    return saved(path, graph(nodes, [value("x", [rows, width])], [value("y", None)], weights))


def random_inputs(spec: GraphSpec, seed: int = 0) -> Arrays:
    """Integers are token ids and masks: 0 or 1."""
    random = np.random.default_rng(seed)
    return {
        tensor.name: (random.integers(0, 2, tensor.shape) if tensor.dtype != "float32" else random.normal(size=tensor.shape))
        .astype(tensor.dtype)
        for tensor in spec.inputs
    }  # fmt: skip


def run_whole(path: Path, inputs: Mapping[str, Any]) -> Arrays:
    """The reference: one onnxruntime session of the unchanged file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), _options(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def run_segments(model: OnnxModel, segments: Iterable[Segment], inputs: Mapping[str, Any]) -> Arrays:
    """Run each segment in its own session, with only its inputs."""
    known = dict(inputs)
    for segment in segments:
        outputs = run_segment(model, segment, {name: known[name] for name in segment.inputs})
        assert set(outputs) == set(segment.outputs)
        known.update(outputs)
    return {tensor.name: known[tensor.name] for tensor in model.spec.outputs}


def run_segment(model: OnnxModel, segment: Segment, inputs: Mapping[str, Any]) -> Arrays:
    import onnxruntime

    proto, weights = segment_model(model, segment)
    options, arrays = _options(), []
    for weight in weights:
        data = model.file.read(weight)
        assert data.nbytes == num_bytes_of(weight.data_type, tuple(weight.dims))
        # numpy has no bfloat16; the runtime takes the bits.
        dtype = dtype_name(weight.data_type)
        arrays.append(np.frombuffer(data, {"bfloat16": "uint16"}.get(dtype, dtype)).reshape(weight.dims))
    values = [_ort_value(array, weight.data_type) for array, weight in zip(arrays, weights, strict=True)]
    options.add_external_initializers([weight.name for weight in weights], values)
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _ort_value(array: np.ndarray[Any, Any], data_type: int) -> Any:
    import onnxruntime

    if hasattr(onnxruntime.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, data_type)
    if data_type == TensorProto.BFLOAT16:
        pytest.skip("this version of onnxruntime takes no bfloat16 from numpy")
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return options


# ---- handmade graphs: each function saves one ---------------------------------------------------------------------


def shared_weights(path: Path) -> Path:
    """One large weight used twice, once transposed; another by both halves of a Split with an odd remainder."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("Relu", "a", "b"),
        node("Transpose", "w", "w_t", perm=[1, 0]),
        node("MatMul", "b w_t", "c"),
        node("Split", "c sizes", "left right", axis=1),
        node("MatMul", "left v", "d"),
        node("MatMul", "right u", "e"),
        node("Add", "d e", "f"),
        node("MatMul", "f w", "y"),
    ]
    weights = [
        weight("w", *LARGE), weight("v", 40, 64, seed=1), weight("u", 24, 64, seed=2), integers("sizes", 40, 24),
    ]  # fmt: skip
    return saved(path, graph(nodes, [value("x", [3, 64])], [value("y", [3, 128]), value("a", [3, 128])], weights))


def branches(path: Path) -> Path:
    """If on an input. Its branches read outer tensors and an outer weight, and have large weights with equal names."""

    def branch(kind: str, seed: int) -> GraphProto:
        nodes = [
            node("MatMul", "a w", "m"),
            node("Add", "m inner", "n"),
            node(kind, "n", "r"),
            node("Mul", "r b", "out"),
        ]
        return graph(nodes, [], [value("out", [32, 128])], [weight("inner", 32, 128, seed=seed)], kind)

    constant = helper.make_node("Constant", [], ["k"], value=weight("", 64, 128, seed=9))
    deep = graph([constant, node("MatMul", "a k", "deep")], [], [value("deep", [32, 128])], name="deep")
    other = graph([node("MatMul", "a w", "shallow")], [], [value("shallow", [32, 128])], name="shallow")
    then_branch, else_branch = branch("Sigmoid", 1), branch("Tanh", 2)
    then_branch.node.append(node("If", "choice", "nested", then_branch=deep, else_branch=other))
    then_branch.node.append(node("Add", "out nested", "both"))
    then_branch.output[0].name = "both"
    nodes = [
        node("Relu", "x", "a"),
        node("Sigmoid", "bias", "b"),
        node("If", "choice", "c", then_branch=then_branch, else_branch=else_branch),
        node("MatMul", "c v", "d"),
        node("Add", "d a", "y"),
    ]
    inputs = [value("x", [32, 64]), value("bias", [128]), value("choice", [], TensorProto.BOOL)]
    weights = [weight("w", *LARGE, seed=3), weight("v", 128, 64, seed=4)]
    return saved(path, graph(nodes, inputs, [value("y", [32, 64])], weights))


def loop(path: Path) -> Path:
    """Five iterations of state = tanh(state w + u) with outer w and u; the states are stacked."""
    body = graph(
        [
            node("Identity", "go", "go_on"), node("MatMul", "state w", "m"), node("Add", "m u", "n"),
            node("Tanh", "n", "next"), node("ReduceMean", "next", "mean", axes=[1], keepdims=0),
        ],
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("state", None)],
        [value("go_on", [], TensorProto.BOOL), value("next", None), value("mean", None)],
        name="round",
    )  # fmt: skip
    rounds = helper.make_node("Constant", [], ["rounds"], value_int=5)
    nodes = [
        node("Relu", "x", "u"), rounds, node("Abs", "x", "start"),
        node("Loop", "rounds - start", "final means", body=body), node("Mul", "final u", "y"),
    ]  # fmt: skip
    outputs = [value("y", [2, 80]), value("means", None)]
    return saved(path, graph(nodes, [value("x", [2, 80])], outputs, [weight("w", 80, 80)]))


def scan(path: Path) -> Path:
    """A running sum over the second axis, with an outer tensor."""
    body = graph(
        [node("Add", "sum slice", "more"), node("Mul", "more gain", "scaled")],
        [value("sum", [3]), value("slice", [3])],
        [value("more", [3]), value("scaled", [3])],
        name="step",
    )
    nodes = [
        node("Exp", "g", "gain"), node("Relu", "x", "r"),
        node("Scan", "s r", "total all", body=body, num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1]),
        node("Add", "all x", "y"),
    ]  # fmt: skip
    inputs = [value("x", [3, 7]), value("s", [3]), value("g", [3])]
    return saved(path, graph(nodes, inputs, [value("y", [3, 7]), value("total", [3])]))


def functions(path: Path) -> Path:
    """A function used twice that calls another one, with a large constant in it."""
    standard = [helper.make_opsetid("", 17)]
    constant = helper.make_node("Constant", [], ["k"], value=weight("", *LARGE, seed=5))
    square = helper.make_function("ours", "Square", ["a"], ["b"], [node("Mul", "a a", "b")], standard)
    used = helper.make_node("Square", ["m"], ["b"], domain="ours")
    project = helper.make_function(
        "ours", "Project", ["a"], ["b"], [constant, node("MatMul", "a k", "m"), used],
        [*standard, helper.make_opsetid("ours", 1)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Project", ["x"], ["p"], domain="ours"), node("MatMul", "p w", "q"),
        helper.make_node("Project", ["q"], ["y"], domain="ours"),
    ]  # fmt: skip
    of = graph(nodes, [value("x", [2, 64])], [value("y", [2, 128])], [weight("w", 128, 64)])
    return saved(path, of, functions=[square, project], opsets=[helper.make_opsetid("ours", 1)])


def onnxruntime_operators(path: Path) -> Path:
    nodes = [
        node("FusedMatMul", "x w", "a", domain="com.microsoft", transB=1, alpha=0.5),
        node("BiasGelu", "a bias", "b", domain="com.microsoft"),
        node("SkipLayerNormalization", "b a gain bias", "c - - s", domain="com.microsoft"),
        node("MatMul", "c v", "d"),
        node("FastGelu", "d", "e", domain="com.microsoft"),
        node("Reshape", "e image", "f"),
        node(
            "FusedConv", "f k", "g", domain="com.microsoft", activation="Relu", kernel_shape=[3, 3], pads=[1, 1, 1, 1]
        ),
        node("MultiHeadAttention", "c s s", "h", domain="com.microsoft", num_heads=4),
        node("Add", "h s", "y"),
    ]
    weights = [
        weight("w", 128, 64), weight("v", 128, 64, seed=1), weight("k", 6, 4, 3, 3, seed=2),
        weight("bias", 128, seed=3), weight("gain", 128, seed=4), integers("image", 2, 4, 8, 10),
    ]  # fmt: skip
    outputs = [value("y", [2, 5, 128]), value("g", [2, 6, 8, 10])]
    return saved(path, graph(nodes, [value("x", [2, 5, 64])], outputs, weights))


def constants(path: Path) -> Path:
    """Outputs that are an input, a weight, or computed from weights alone; weights of many types."""
    numbers = helper.make_tensor("typed", TensorProto.FLOAT, WIDE, np.linspace(-1, 1, 64 * 320).tolist())
    brain = helper.make_tensor("brain", TensorProto.BFLOAT16, WIDE, np.linspace(-1, 1, 64 * 320).tolist())
    nodes = [
        helper.make_node("Constant", [], ["big"], value=weight("", *WIDE, seed=6)),
        node("Neg", "big", "negative"),
        node("Cast", "half", "from_half", to=TensorProto.FLOAT),
        node("Cast", "brain", "from_brain", to=TensorProto.FLOAT),
        node("DequantizeLinear", "bytes scale", "from_bytes"),
        node("Add", "from_half from_brain", "sum"),
        node("Add", "x sum", "a"),
        node("Mul", "a from_bytes", "b"),
        node("Mul", "b typed", "c"),
        node("Add", "c negative", "d"),
        node("Sub", "d big", "y"),
    ]
    weights = [
        weight("half", *WIDE, seed=7, dtype="float16"), brain, numbers,
        numpy_helper.from_array(np.arange(-64, 64, dtype=np.int8).repeat(160).reshape(WIDE), "bytes"),
        numpy_helper.from_array(np.float32(0.01), "scale"),
    ]  # fmt: skip
    outputs = [value(name, WIDE) for name in ("y", "typed", "negative", "sum", "x")]
    return saved(path, graph(nodes, [value("x", WIDE)], outputs, weights))


def nibbles(path: Path) -> Path:
    """Weights of four bits: two share a byte, in the file too."""
    packed = helper.make_tensor("packed", TensorProto.INT4, [256, 256], bytes(range(256)) * 128, raw=True)
    nodes = [node("DequantizeLinear", "packed scale", "w"), node("Add", "x w", "a"), node("Mul", "a w", "y")]
    weights = [packed, numpy_helper.from_array(np.float32(0.02), "scale")]
    of = graph(nodes, [value("x", [1, 256])], [value("y", [256, 256])], weights)
    return saved(path, of, opset=21)


def shapes_from_shapes(path: Path) -> Path:
    """As exporters write it: shapes computed from shapes, a branch on a shape, nodes out of order; `n` is open."""
    squeeze = graph([node("Squeeze", "wide zero", "then_out")], [], [value("then_out", None)], name="squeeze")
    same = graph([node("Identity", "wide", "else_out")], [], [value("else_out", None)], name="same")
    nodes = [
        node("Reshape", "a rows", "flat"),
        node("Relu", "x", "a"),
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "n"),
        node("Mul", "n four", "n4"),
        node("Concat", "n4 rest", "rows", axis=0),
        node("MatMul", "flat w", "b"),
        node("Concat", "one rows_b", "wide_shape", axis=0),
        node("Shape", "b", "rows_b"),
        node("Reshape", "b wide_shape", "wide"),
        node("Gather", "wide_shape zero", "first"),
        node("Equal", "first one", "is_one"),
        helper.make_node("If", ["is_one"], ["c"], name="maybe", then_branch=squeeze, else_branch=same),
        node("Range", "zero_s n_s one_s", "counted"),
        node("Squeeze", "n4", "n_s"),
        node("Cast", "counted", "numbers", to=TensorProto.FLOAT),
        node("Unsqueeze", "numbers last", "column"),
        node("Add", "c column", "d"),
        node("ReduceSum", "d last", "y", keepdims=0),
        node("Neg", "d", "nobody_wants_it"),
    ]
    weights = [
        weight("w", 16, 300), integers("zero", 0), integers("one", 1), integers("four", 4), integers("rest", 16),
        integers("last", 1), numpy_helper.from_array(np.int64(0), "zero_s"), numpy_helper.from_array(np.int64(1), "one_s"),
    ]  # fmt: skip
    return saved(path, graph(nodes, [value("x", ["n", 64])], [value("y", [None]), value("d", None)], weights))


HANDMADE_MODELS = (
    shared_weights, branches, loop, scan, functions, onnxruntime_operators, constants, nibbles, shapes_from_shapes,
)  # fmt: skip
