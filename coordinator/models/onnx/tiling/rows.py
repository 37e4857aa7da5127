"""Index spaces of element-wise operators (any block) and of row-wise ones: norms, Softmax, reductions, pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.models.onnx.tiling.call import Call
from coordinator.models.onnx.tiling.products import broadcast_axes, sliding_rows
from coordinator.models.onnx.tiling.space import Along, Axis, CannotCut, IndexSpace, Shape


def _element_wise(call: Call) -> IndexSpace:
    """Index axes: those of the output. Operands are broadcast; omitted ones stay so."""
    call.only_output()
    out = call.output_shape
    if not out:
        raise CannotCut("it computes a single value")
    if "broadcast" in call.attributes:
        raise CannotCut("it broadcasts by attributes, as before version 7")
    return IndexSpace(
        sizes=out,
        inputs=tuple(
            call.operand(position, broadcast_axes(call.shape(position), out))
            if name
            else call.whole_inputs(position)[0]
            for position, name in enumerate(call.node.input)
        ),
        outputs=(call.output(tuple(map(Along, range(len(out))))),),
    )


def _per_channel(call: Call) -> IndexSpace:
    """Axis 1 is the channel, which the parameters of the operator follow: BatchNormalization."""
    call.only_output()
    x = call.shape(0)
    if len(x) < 2 or call.attributes.get("training_mode"):
        raise CannotCut("it has no channels" if len(x) < 2 else "it is in training mode")
    axes = tuple(map(Along, range(len(x))))
    parameters = tuple(call.operand(position, (Along(1),)) for position in range(1, len(call.node.input)))
    return IndexSpace(x, (call.operand(0, axes), *parameters), (call.output(axes),))


def _rows(call: Call, mixed: set[int], first_parameter: int = 1) -> IndexSpace:
    """Any axis can be cut except those whose elements the operator mixes. The output has the shape of the input."""
    call.only_output()
    x = call.shape(0)
    axes, sizes = _kept_axes(x, mixed)
    return IndexSpace(sizes, (call.operand(0, axes), *call.whole_inputs(first_parameter)), (call.output(axes),))


def _kept_axes(shape: Shape, mixed: set[int]) -> tuple[tuple[Axis, ...], Shape]:
    kept = [axis for axis in range(len(shape)) if axis not in mixed]
    if not kept:
        raise CannotCut("it mixes the elements of all its axes")
    axes = tuple(None if axis in mixed else Along(kept.index(axis)) for axis in range(len(shape)))
    return axes, tuple(shape[axis] for axis in kept)


def _softmax(call: Call) -> IndexSpace:
    """Before version 13, Softmax mixed all axes from `axis` on."""
    rank = len(call.shape(0))
    first = int(call.attributes.get("axis", 1 if call.opset < 13 else -1)) % rank
    return _rows(call, set(range(first, rank)) if call.opset < 13 else {first})


def _one_axis(call: Call) -> IndexSpace:
    rank = len(call.shape(0))
    return _rows(call, {int(call.attributes.get("axis", -1)) % rank})


def _layer_norm(call: Call) -> IndexSpace:
    """Axes before `axis` are rows. Scale and bias must have the shape of one row, not of several."""
    rank = len(call.shape(0))
    first = int(call.attributes.get("axis", -1)) % rank
    if any(
        len(call.shape(position)) > rank - first for position in range(1, len(call.node.input)) if call.has(position)
    ):
        raise CannotCut("its scale differs from row to row")
    return _rows(call, set(range(first, rank)))


def _instance_norm(call: Call) -> IndexSpace:
    """Batch and channels; scale and bias follow the channels."""
    x = call.shape(0)
    axes: tuple[Axis, ...] = (Along(0), Along(1), *(None,) * (len(x) - 2))
    parameters = tuple(call.operand(position, (Along(1),)) for position in range(1, len(call.node.input)))
    return IndexSpace(x[:2], (call.operand(0, axes), *parameters), (call.output(axes),))


def _reduction(call: Call) -> IndexSpace:
    """Rows: the axes that are not reduced. They are attributes, or an input in later versions."""
    rank = len(call.shape(0))
    axes = call.attributes.get("axes")
    if axes is None and call.has(1):
        axes = call.values(1)
        if axes is None:
            raise CannotCut("the axes that it reduces are known only at run time")
    if not axes and call.attributes.get("noop_with_empty_axes"):
        raise CannotCut("it reduces no axis")
    reduced = {int(axis) % rank for axis in axes} if axes else set(range(rank))
    return _reduced(call, reduced)


def _arg_reduction(call: Call) -> IndexSpace:
    return _reduced(call, {int(call.attributes.get("axis", 0)) % len(call.shape(0))})


def _reduced(call: Call, reduced: set[int]) -> IndexSpace:
    axes, sizes = _kept_axes(call.shape(0), reduced)
    keeps = bool(call.attributes.get("keepdims", 1))
    out = tuple(axis for number, axis in enumerate(axes) if keeps or number not in reduced)
    return IndexSpace(sizes, (call.operand(0, axes), *call.whole_inputs(1)), (call.output(out),))


def _global_pooling(call: Call) -> IndexSpace:
    x = call.shape(0)
    axes: tuple[Axis, ...] = (Along(0), Along(1), *(None,) * (len(x) - 2))
    return IndexSpace(x[:2], (call.operand(0, axes),), (call.output(axes),))


def _pooling(call: Call) -> IndexSpace:
    """Batch, channels, and rows with halo."""
    call.only_output()
    x, out = call.shape(0), call.output_shape
    rows, out_rows, sizes = sliding_rows(call, tuple(call.attributes["kernel_shape"]), 2, x, out)
    rest: tuple[Axis, ...] = (None,) * (len(x) - 3)
    return IndexSpace(
        (*x[:2], *sizes),
        (call.operand(0, (Along(0), Along(1), rows, *rest)),),
        (call.output((Along(0), Along(1), out_rows, *rest)),),
    )


ROW_RULES: Mapping[str, Callable[[Call], IndexSpace]] = {
    **dict.fromkeys(
        ("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot",
         "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal",
         "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf",
         "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not",
         "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh",
         "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
         "BiasGelu", "FastGelu", "QuickGelu"),
        _element_wise,
    ),
    "BatchNormalization": _per_channel,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    "LpNormalization": _one_axis,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer_norm),
    "InstanceNormalization": _instance_norm,
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
         "ReduceSum", "ReduceSumSquare"),
        _reduction,
    ),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg_reduction),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _global_pooling),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pooling),
}  # fmt: skip
