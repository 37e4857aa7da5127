"""Floating-point operations of ONNX operators, from the shapes of their tensors. Pure.

- Matrix products (Conv, Gemm, MatMul, Einsum, recurrent and attention operators, their quantised forms): 2 per multiply-add;
  groups are considered, bias is not counted.
- Pooling: the elements of all windows. Reductions, softmax and normalisations: the elements of the input.
- Operators that only rename or reshape their input: 0.
- All others: the elements of the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onnx import NodeProto

from coordinator.models.onnx.nodes import attributes_of

Shape = tuple[int, ...]


class OperatorCall(NamedTuple):
    """One use of an operator. Optional inputs and outputs that are absent have the shape None."""

    attributes: Mapping[str, Any]
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None]

    def input(self, index: int) -> Shape:
        return (self.inputs[index] if index < len(self.inputs) else None) or ()

    @property
    def output(self) -> Shape:
        return self.outputs[0] or ()


def flops_of(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> float:
    """FLOPs of an operator without a body; `inputs` and `outputs` are shapes in the node's order."""
    call = OperatorCall(attributes_of(node), inputs, outputs)
    return float(_RULES.get(node.op_type, _output_elements)(call))


def _output_elements(call: OperatorCall) -> int:
    return sum(math.prod(shape) for shape in call.outputs if shape is not None)


def _pooling(call: OperatorCall) -> int:
    """A window may be larger than its input; then only the input's elements count."""
    window = [
        min(size, length) for size, length in zip(call.attributes["kernel_shape"], call.input(0)[2:], strict=False)
    ]
    return math.prod(call.output) * int(math.prod(window))


def _convolution(weight: int) -> Callable[[OperatorCall], int]:
    """W is [out, in / groups, kernel...]: each output element sums over all but the first axis."""
    return lambda call: 2 * math.prod(call.output) * math.prod(call.input(weight)[1:])


def _transposed_convolution(call: OperatorCall) -> int:
    """W is [in, out / groups, kernel...]: each input element is multiplied with all but the first axis."""
    return 2 * math.prod(call.input(0)) * math.prod(call.input(1)[1:])


def _matmul(call: OperatorCall) -> int:
    """The inner axis is the last of A; FusedMatMul may transpose it."""
    left = call.input(0)
    inner = left[-2] if call.attributes.get("transA") and len(left) > 1 else left[-1]
    return 2 * math.prod(call.output) * inner


def _gemm(call: OperatorCall) -> int:
    return 2 * math.prod(call.output) * call.input(0)[0 if call.attributes.get("transA") else 1]


def _einsum(call: OperatorCall) -> int:
    """A multiply-add for each combination of indices, regardless of the order of computation."""
    equation = call.attributes["equation"].decode().replace(" ", "")
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.split("->")[0].split(","), call.inputs, strict=False):
        before, dots, after = term.partition("...")
        shape = shape or ()
        named = [*zip(before, shape, strict=False), *zip(reversed(after), reversed(shape), strict=False)]
        for letter, size in named:
            sizes[letter] = max(size, sizes.get(letter, 1))
        if dots:
            rest = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(math.prod(rest), sizes.get("...", 1))
    return int(2 * math.prod(sizes.values()))


def _recurrent(call: OperatorCall) -> int:
    """X is [time, batch, in], W [directions, gates x hidden, in], R [directions, gates x hidden, hidden]."""
    steps, batch = call.input(0)[:2]
    return 2 * steps * batch * (math.prod(call.input(1)) + math.prod(call.input(2)))


def _attention(call: OperatorCall) -> int:
    """Scores and their product with V, which is assumed to be as wide as Q.

    Keys are [batch, heads, length, size] or [batch, length, heads x size]; if there are past keys, the second output holds
    all of them.
    """
    present = call.outputs[1] if len(call.outputs) > 1 else None
    keys = present or call.input(1) or call.input(0)
    return 4 * keys[-2 if len(keys) < 5 else 1] * math.prod(call.output)


def _packed_attention(call: OperatorCall) -> int:
    """com.microsoft.Attention: the input [batch, length, hidden] and one weight [hidden, Q + K + V]."""
    batch, length, hidden = call.input(0)
    return 2 * batch * length * hidden * call.input(1)[-1] + 4 * length * math.prod(call.output)


def _either_attention(call: OperatorCall) -> int:
    """The standard operator takes Q, K and V; onnxruntime's operator of the same name takes them packed."""
    return _packed_attention(call) if len(call.input(1)) == 2 else _attention(call)


_RULES: dict[str, Callable[[OperatorCall], int]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "FusedConv"), _convolution(1)),
    "QLinearConv": _convolution(3),
    "DeformConv": _convolution(1),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(("Gemm", "FusedGemm"), _gemm),
    **dict.fromkeys(
        ("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
         "MatMulNBits"),
        _matmul,
    ),
    "Einsum": _einsum,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "Attention": _either_attention,
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), _attention),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pooling),
    **dict.fromkeys(
        ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin",
         "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "ArgMax", "ArgMin",
         "TopK", "Softmax", "LogSoftmax", "Hardmax", "BatchNormalization", "InstanceNormalization",
         "LayerNormalization", "GroupNormalization", "LpNormalization", "MeanVarianceNormalization",
         "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
         "SkipSimplifiedLayerNormalization", "LRN"),
        lambda call: math.prod(call.input(0)),
    ),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Size"), lambda call: 0),
}  # fmt: skip
