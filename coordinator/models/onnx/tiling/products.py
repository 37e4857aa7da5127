"""Index spaces of matrix products and convolutions. Their summed axes may be cut into partial sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.models.onnx.tiling.call import Call
from coordinator.models.onnx.tiling.space import Along, Axis, CannotCut, IndexSpace, Operand, Shape, Window


def broadcast_axes(shape: Shape, out: Shape) -> tuple[Axis, ...]:
    """The axes of an operand that is broadcast to `out`, whose axes are the first index axes in order."""
    first = len(out) - len(shape)
    return tuple(Along(first + axis) if size == out[first + axis] else None for axis, size in enumerate(shape))


def _matmul(call: Call) -> IndexSpace:
    """Index axes: batch axes, rows i, columns j, summed k."""
    left, right, out = call.shape(0), call.shape(1), call.output_shape
    if min(len(left), len(right)) < 2:
        raise CannotCut("one of its operands is a vector")
    batch, row, column, inner = out[:-2], len(out) - 2, len(out) - 1, len(out)
    summed = (inner,) if call.can_be_summed else ()
    k: Axis = Along(inner) if summed else None
    return IndexSpace(
        sizes=(*out, left[-1]) if summed else out,
        inputs=(
            call.operand(0, (*broadcast_axes(left[:-2], batch), Along(row), k)),
            call.operand(1, (*broadcast_axes(right[:-2], batch), k, Along(column))),
        ),
        outputs=(call.output(tuple(map(Along, range(len(out))))),),
        summed=summed,
    )


def _gemm(call: Call) -> IndexSpace:
    """Index axes: rows i, columns j, summed k. With k cut, C is added by the formation."""
    out, attributes = call.output_shape, call.attributes
    left_t, right_t = bool(attributes.get("transA")), bool(attributes.get("transB"))
    has_bias = call.has(2)
    summable = call.can_be_summed and call.opset >= 11  # C was not optional before
    if has_bias and attributes.get("beta", 1.0) != 1.0:
        summable = False
    k: Axis = Along(2) if summable else None
    left, right = (k, Along(0)) if left_t else (Along(0), k), (Along(1), k) if right_t else (k, Along(1))
    inputs = [call.operand(0, left), call.operand(1, right)]
    if has_bias:
        inputs.append(call.operand(2, broadcast_axes(call.shape(2), out)))
    return IndexSpace(
        sizes=(*out, call.shape(0)[0 if left_t else 1]) if summable else out,
        inputs=tuple(inputs),
        outputs=(call.output((Along(0), Along(1))),),
        summed=(2,) if summable else (),
        added_once=2 if has_bias else None,
    )


def _convolution(call: Call) -> IndexSpace:
    """Index axes: batch, output channels (or groups), rows with halo, and without groups the summed input channels."""
    x, w, out = call.shape(0), call.shape(1), call.output_shape
    if len(x) < 3:
        raise CannotCut("it has no spatial axis")
    groups = int(call.attributes.get("group", 1))
    rows, out_rows, sizes = sliding_rows(call, w[2:], 2, x, out)
    # The formation adds the bias, which needs another shape there: possible only for a stored one.
    summed = (2 + len(sizes),) if groups == 1 and call.can_be_summed and (not call.has(2) or call.is_weight(2)) else ()
    channel: Axis = Along(summed[0]) if summed else None
    if groups > 1:
        channel = Along(1, x[1] // groups)
    out_channel = Along(1, out[1] // groups) if groups > 1 else Along(1)
    rest: tuple[Axis, ...] = (None,) * (len(x) - 3)
    inputs: list[Operand] = [
        call.operand(0, (Along(0), channel, rows, *rest)),
        call.operand(1, (out_channel, channel if summed else None, *(None,) * len(w[2:]))),
    ]
    if call.has(2):
        inputs.append(call.operand(2, (out_channel,)))
    return IndexSpace(
        sizes=(x[0], groups if groups > 1 else out[1], *sizes, *((x[1],) if summed else ())),
        inputs=tuple(inputs),
        outputs=(call.output((Along(0), out_channel, out_rows, *rest)),),
        summed=summed,
        added_once=2 if call.has(2) else None,
    )


def sliding_rows(call: Call, kernel: Shape, index: int, x: Shape, out: Shape) -> tuple[Axis, Axis, tuple[int, ...]]:
    """How the rows of input and output follow index axis `index`, and its size; (None, None, ()) if they cannot be cut.

    A window must not lie in the padding alone, and the padding of SAME_LOWER and SAME_UPPER is not computed here.
    """
    attributes, spatial = call.attributes, len(x) - 2
    stride = int((attributes.get("strides") or [1])[0])
    reach = (kernel[0] - 1) * int((attributes.get("dilations") or [1])[0]) + 1
    pads = attributes.get("pads") or [0] * (2 * spatial)
    is_explicit = attributes.get("auto_pad", b"NOTSET") in (b"NOTSET", b"VALID")
    if not is_explicit or attributes.get("ceil_mode") or min(pads) < 0 or max(pads[0], pads[spatial]) >= reach:
        return None, None, ()
    return Window(index, stride, reach, int(pads[0])), Along(index), (out[2],)


PRODUCT_RULES: Mapping[str, Callable[[Call], IndexSpace]] = {
    "MatMul": _matmul, "Gemm": _gemm, "Conv": _convolution,
}  # fmt: skip
