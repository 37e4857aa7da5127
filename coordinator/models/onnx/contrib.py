"""Output shapes of onnxruntime's contrib operators (domain com.microsoft), which `onnx` cannot infer. Pure.

Covers the operators that exporters, optimisers and quantisers write. For others, the model itself must declare the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto

from coordinator.models.onnx.nodes import attributes_of


class TensorType(NamedTuple):
    """An ONNX element type and a static shape."""

    element_type: int
    shape: tuple[int, ...]


InputTypes = Sequence[TensorType | None]
# Operators fused with an activation -> their standard form, which has no input for a sum.
_STANDARD_FORM = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
_Rule = Callable[[dict[str, Any], Sequence[TensorType]], list[TensorType]]


def output_types(node: NodeProto, inputs: InputTypes) -> list[TensorType] | None:
    """The types of the outputs, in the node's order; None if there is no rule, or the rule does not fit the inputs."""
    missing = TensorType(TensorProto.UNDEFINED, ())
    try:
        types = _RULES[node.op_type](attributes_of(node), [each or missing for each in inputs])
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    if any(each.element_type == TensorProto.UNDEFINED for each in types) or len(types) < len(node.output):
        return None
    return types


def without_activation(node: NodeProto) -> NodeProto | None:
    """For an operator fused with an activation, the standard operator whose outputs have the same shapes; else None."""
    if node.op_type not in _STANDARD_FORM:
        return None
    attributes = [each for each in node.attribute if not each.name.startswith("activation")]
    return NodeProto(
        op_type=_STANDARD_FORM[node.op_type],
        name=node.name,
        input=node.input[:3],
        output=node.output,
        attribute=attributes,
    )


def _skip_normalisation(_: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    """Outputs: normalised, mean, inverse standard deviation, sum of input and skip."""
    statistics = TensorType(TensorProto.FLOAT, (*inputs[0].shape[:-1], 1))
    return [inputs[0], statistics, statistics, inputs[0]]


def _product(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if min(len(left), len(right)) < 2 or left[-1] != right[-2]:
        raise ValueError(f"{left} and {right} cannot be multiplied")
    return (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])


def _fused_matmul(attributes: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    if attributes.get("transBatchA") or attributes.get("transBatchB"):
        raise ValueError("transposed batches")
    left, right = inputs[0].shape, inputs[1].shape
    if attributes.get("transA"):
        left = (*left[:-2], left[-1], left[-2])
    if attributes.get("transB"):
        right = (*right[:-2], right[-1], right[-2])
    return [TensorType(inputs[0].element_type, _product(left, right))]


def _quantised_matmul(scale: int) -> _Rule:
    """A product of quantised matrices; the result has the type of the input `scale`."""
    return lambda _, inputs: [TensorType(inputs[scale].element_type, _product(inputs[0].shape, inputs[1].shape))]


def _matmul_n_bits(attributes: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    return [TensorType(inputs[0].element_type, (*inputs[0].shape[:-1], attributes["N"]))]


def _quantised_elementwise(_: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    """Inputs: A, its scale and zero point, then B with its scale and zero point."""
    return [TensorType(inputs[0].element_type, np.broadcast_shapes(inputs[0].shape, inputs[3].shape))]


def _quantised_global_pool(attributes: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    shape = inputs[0].shape
    ones = (1,) * (len(shape) - 2)
    pooled = (shape[0], *ones, shape[-1]) if attributes.get("channels_last") else (*shape[:2], *ones)
    return [TensorType(inputs[0].element_type, pooled)]


def _attention(attributes: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    batch, length, _ = inputs[0].shape
    sizes = attributes.get("qkv_hidden_sizes") or [inputs[1].shape[1] // 3] * 3
    return [TensorType(inputs[0].element_type, (batch, length, sizes[2]))]


def _multi_head_attention(_: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    query, value = inputs[0], inputs[2]
    if len(query.shape) != 3 or len(value.shape) not in (3, 4):
        raise ValueError("packed heads")
    width = value.shape[2] if len(value.shape) == 3 else value.shape[1] * value.shape[3]
    return [TensorType(query.element_type, (*query.shape[:2], width))]


def _embedding(_: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    """The third input are the word embeddings. Outputs: embeddings, length of each mask, sum before the normalisation."""
    tokens, words = inputs[0], inputs[2]
    embedded = TensorType(words.element_type, (*tokens.shape, words.shape[1]))
    return [embedded, TensorType(TensorProto.INT32, tokens.shape[:1]), embedded]


def _quantised(_: dict[str, Any], inputs: Sequence[TensorType]) -> list[TensorType]:
    return [TensorType(inputs[2].element_type if len(inputs) > 2 else TensorProto.UINT8, inputs[0].shape)]


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "SimplifiedLayerNormalization", "GroupNorm", "RotaryEmbedding",
         "QLinearSigmoid", "QLinearLeakyRelu"),
        lambda _, inputs: [inputs[0]],
    ),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_normalisation),
    "FusedMatMul": _fused_matmul,
    "DynamicQuantizeMatMul": _quantised_matmul(2),
    "MatMulIntegerToFloat": _quantised_matmul(2),
    "MatMulNBits": _matmul_n_bits,
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _quantised_elementwise),
    "QLinearGlobalAveragePool": _quantised_global_pool,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head_attention,
    "EmbedLayerNormalization": _embedding,
    "DequantizeLinear": lambda _, inputs: [TensorType(inputs[1].element_type, inputs[0].shape)],
    "QuantizeLinear": _quantised,
}  # fmt: skip
