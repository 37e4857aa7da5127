"""The node of one tile: the operator's node with the attributes and shapes that its part of the index space needs."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto, helper

from coordinator.models.onnx.nodes import attributes_of
from coordinator.models.onnx.tiling.space import IndexSpace, Range, Shape, Window
from coordinator.models.onnx.tiling.weights import SlicedConstants

_RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}


def tile_node(
    node: NodeProto,
    space: IndexSpace,
    ranges: Sequence[Range],
    inputs: Sequence[str],
    outputs: Sequence[str],
    output_shape: Shape,
    constants: SlicedConstants,
) -> NodeProto:
    """The node that computes the tile with these ranges, from `inputs` to `outputs`."""
    inputs = list(inputs)
    if node.op_type in _RESHAPES:
        return helper.make_node("Reshape", [inputs[0], constants.integers(output_shape)], outputs)
    if node.op_type == "Expand":
        inputs[1] = constants.integers(output_shape)
    while inputs and not inputs[-1]:
        del inputs[-1]
    copy = NodeProto(op_type=node.op_type, domain=node.domain, input=inputs, output=outputs)
    changed = _changed_attributes(node, space, ranges)
    dropped = {*changed, "auto_pad"} if "pads" in changed else set(changed)
    copy.attribute.extend(each for each in node.attribute if each.name not in dropped)
    copy.attribute.extend(helper.make_attribute(name, value) for name, value in changed.items())
    return copy


def _changed_attributes(node: NodeProto, space: IndexSpace, ranges: Sequence[Range]) -> dict[str, int | list[int]]:
    attributes = attributes_of(node)
    changed: dict[str, int | list[int]] = {}
    if node.op_type == "Conv" and attributes.get("group", 1) > 1:
        start, stop = ranges[1]
        changed["group"] = stop - start
    x = space.inputs[0]
    rows = x.axes[2] if len(x.axes) > 2 else None
    if isinstance(rows, Window):
        spatial = len(x.axes) - 2
        pads = list(attributes.get("pads") or [0] * (2 * spatial))
        pads[0], pads[spatial] = rows.padding(ranges, x.shape[2])
        changed["pads"] = pads
    return changed
