"""Sizes of tensors on the wire, in the format that the user chose. Pure.

Savings by lz4 are not included: they depend on the values, which are unknown when the plan is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hearth.plan.graph_spec import GraphSpec, Tensor
from hearth.plan.value_formats import VALUE_FORMATS, ValueFormatName

_FLOAT32_BYTES: Final = 4  # of a float32 value


def num_converted(tensor: Tensor, values: ValueFormatName) -> int:
    """Number of values that are converted for the wire: all or none. Only float32 tensors are converted."""
    return 0 if values == "exact" or tensor.dtype != "float32" else tensor.num_bytes // _FLOAT32_BYTES


def wire_bytes(tensor: Tensor, values: ValueFormatName) -> int:
    """Bytes of a tensor on the wire, as `hearth.wire.codec.wire_layout` encodes it: bytes per value and per row."""
    count = num_converted(tensor, values)
    if not count:
        return tensor.num_bytes
    num_rows = count // tensor.shape[-1] if tensor.shape and tensor.shape[-1] else 1
    return VALUE_FORMATS[values].num_bytes(count, num_rows)


def with_wire_sizes(spec: GraphSpec, values: ValueFormatName) -> GraphSpec:
    """The graph with the size of every tensor as it is on the wire, for planners that weigh transfers."""
    if values == "exact":
        return spec
    tensors = (tensor._replace(num_bytes=wire_bytes(tensor, values)) for tensor in spec.tensors)
    return replace(spec, tensors=tuple(tensors))
