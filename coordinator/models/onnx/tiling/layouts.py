"""Index spaces of operators that move elements without computing: Reshape, Transpose, Concat, Gather, Slice, Pad.

An axis can be cut where it survives the operator: Reshape may merge it with inner axes or split it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from coordinator.models.onnx.tiling.call import Call
from coordinator.models.onnx.tiling.products import broadcast_axes
from coordinator.models.onnx.tiling.space import Along, Axis, CannotCut, IndexSpace, Shape


def _reshape(call: Call) -> IndexSpace:
    """An index axis for each group of axes that is reshaped by itself, of the size that both sides can be cut into."""
    if call.opset < 5:
        raise CannotCut("its shape is an attribute, as before version 5")
    x, out = call.shape(0), call.output_shape
    if 0 in x:
        raise CannotCut("its input is empty")
    axes: list[Axis] = [None] * len(x)
    out_axes: list[Axis] = [None] * len(out)
    sizes: list[int] = []
    for group, out_group in _regrouped(x, out):
        if not group or not out_group:
            continue
        first, out_first = group[0], out_group[0]
        size = math.gcd(x[first], out[out_first])
        if size > 1:
            axes[first] = Along(len(sizes), x[first] // size)
            out_axes[out_first] = Along(len(sizes), out[out_first] // size)
            sizes.append(size)
    if not sizes:
        raise CannotCut("no axis survives it")
    return IndexSpace(
        tuple(sizes), (call.operand(0, tuple(axes)), *call.whole_inputs(1)), (call.output(tuple(out_axes)),)
    )


def _regrouped(x: Shape, out: Shape) -> list[tuple[list[int], list[int]]]:
    """Consecutive axes of both shapes with equal products, as short as possible and without axes of size 1."""
    groups: list[tuple[list[int], list[int]]] = []
    left = [axis for axis, size in enumerate(x) if size > 1]
    right = [axis for axis, size in enumerate(out) if size > 1]
    while left and right:
        group, out_group = [left.pop(0)], [right.pop(0)]
        count, out_count = x[group[0]], out[out_group[0]]
        while count != out_count:
            if count < out_count:
                group.append(left.pop(0))
                count *= x[group[-1]]
            else:
                out_group.append(right.pop(0))
                out_count *= out[out_group[-1]]
        groups.append((group, out_group))
    return groups


def _transpose(call: Call) -> IndexSpace:
    """Index axes in the order of the input, so that tiles keep the order of their producers."""
    x = call.shape(0)
    order = call.attributes.get("perm") or range(len(x) - 1, -1, -1)
    axes = tuple(map(Along, range(len(x))))
    if not axes:
        raise CannotCut("it has no axis")
    return IndexSpace(x, (call.operand(0, axes),), (call.output(tuple(axes[axis] for axis in order)),))


def _concat(call: Call) -> IndexSpace:
    out = call.output_shape
    joined = int(call.attributes.get("axis", 1)) % len(out)
    axes, sizes = _all_but({joined}, out)
    inputs = tuple(call.operand(position, axes) for position in range(len(call.node.input)))
    return IndexSpace(sizes, inputs, (call.output(axes),))


def _split(call: Call) -> IndexSpace:
    x = call.shape(0)
    axes, sizes = _all_but({int(call.attributes.get("axis", 0)) % len(x)}, x)
    outputs = tuple(call.output(axes, position) for position, name in enumerate(call.node.output) if name)
    if len(outputs) < len(call.node.output):
        raise CannotCut("one of its outputs is omitted")
    return IndexSpace(sizes, (call.operand(0, axes), *call.whole_inputs(1)), outputs)


def _slice(call: Call) -> IndexSpace:
    """The axes that it does not slice."""
    x, out = call.shape(0), call.output_shape
    axes, steps = call.values(3), call.values(4)
    if call.opset < 10:
        axes = list(call.attributes.get("axes") or range(len(call.attributes["starts"])))
    elif call.has(3) and axes is None:
        raise CannotCut("the axes that it slices are known only at run time")
    sliced = set(range(len(x))) if axes is None else {axis % len(x) for axis in axes}
    if steps is None and not call.has(4):  # a whole axis is read forwards
        sliced = {axis for axis in sliced if x[axis] != out[axis]}
    return _unchanged(call, sliced)


def _pad(call: Call) -> IndexSpace:
    """The axes without padding."""
    rank = len(call.shape(0))
    pads = call.values(1) if call.opset >= 11 else call.attributes["pads"]
    if pads is None or call.has(3):
        raise CannotCut("its padding is known only at run time")
    return _unchanged(call, {axis for axis in range(rank) if pads[axis] or pads[axis + rank]})


def _unchanged(call: Call, changed: set[int]) -> IndexSpace:
    axes, sizes = _all_but(changed, call.shape(0))
    return IndexSpace(sizes, (call.operand(0, axes), *call.whole_inputs(1)), (call.output(axes),))


def _expand(call: Call) -> IndexSpace:
    out = call.output_shape
    if not out:
        raise CannotCut("it has no axis")
    axes = tuple(map(Along, range(len(out))))
    return IndexSpace(
        out, (call.operand(0, broadcast_axes(call.shape(0), out)), *call.whole_inputs(1)), (call.output(axes),)
    )


def _gather(call: Call) -> IndexSpace:
    """Index axes: those of the output, which are the axes of the data with the axes of the indices in place of one."""
    data, indices = call.shape(0), call.shape(1)
    axis = int(call.attributes.get("axis", 0)) % len(data)
    out = tuple(map(Along, range(len(call.output_shape))))
    if not out:
        raise CannotCut("it has no axis")
    after = axis + len(indices)
    return IndexSpace(
        call.output_shape,
        (call.operand(0, (*out[:axis], None, *out[after:])), call.operand(1, out[axis:after])),
        (call.output(out),),
    )


def _all_but(fixed: set[int], shape: Shape) -> tuple[tuple[Axis, ...], Shape]:
    free = [axis for axis in range(len(shape)) if axis not in fixed]
    if not free:
        raise CannotCut("no axis survives it")
    axes = tuple(Along(free.index(axis)) if axis in free else None for axis in range(len(shape)))
    return axes, tuple(shape[axis] for axis in free)


LAYOUT_RULES: Mapping[str, Callable[[Call], IndexSpace]] = {
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    "Transpose": _transpose, "Concat": _concat, "Split": _split, "Slice": _slice, "Pad": _pad, "Expand": _expand,
    "Gather": _gather,
}  # fmt: skip
