"""How many bytes tensors have on the wire, in the format that the user chose for them. Pure.

What lz4 takes off is not in it: that depends on the values, which nobody has seen when the plan is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hearth.plan.graph_spec import GraphSpec, Tensor
from hearth.plan.value_formats import VALUE_FORMATS, Values

_FLOAT_BYTES: Final = 4


def num_converted(tensor: Tensor, values: Values) -> int:
    """How many values change their format on the way: all or none. Only float32 ever does."""
    return 0 if values == "exact" or tensor.dtype != "float32" else tensor.num_bytes // _FLOAT_BYTES


def wire_bytes(tensor: Tensor, values: Values) -> int:
    """As `hearth.wire.codec.wire_layout` lays them out: by the format's bytes per value and per row."""
    count = num_converted(tensor, values)
    if not count:
        return tensor.num_bytes
    num_rows = count // tensor.shape[-1] if tensor.shape and tensor.shape[-1] else 1
    return VALUE_FORMATS[values].num_bytes(count, num_rows)


def on_wire(spec: GraphSpec, values: Values) -> GraphSpec:
    """The graph as a planner of transfers is to see it: every tensor as large as it travels."""
    if values == "exact":
        return spec
    tensors = (tensor._replace(num_bytes=wire_bytes(tensor, values)) for tensor in spec.tensors)
    return replace(spec, tensors=tuple(tensors))
