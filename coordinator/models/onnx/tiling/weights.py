"""Regions of constants: a tile uses only its part of a weight, which stays in the model file until it is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from coordinator.models.onnx.contrib import TensorType
from coordinator.models.onnx.file import INLINE_BYTES, OnnxFile, num_bytes_of, slice_reference
from coordinator.models.onnx.nodes import attributes_of, unique_name
from coordinator.models.onnx.shapes import ResolvedGraph
from coordinator.models.onnx.tiling.space import Region, Shape, shape_of


def region_name(name: str, region: Region) -> str:
    """The name of a region of a tensor, such as `x[0:64,32:64]`."""
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in region)}]"


class SlicedConstants:
    """Adds regions of constants to a graph, each once."""

    def __init__(self, file: OnnxFile, graph: ResolvedGraph, opset: int, used_names: set[str]) -> None:
        self._file, self._graph, self._opset, self._used_names = file, graph, opset, used_names
        self._regions: dict[tuple[str, Region], str] = {}
        self._integers: dict[tuple[int, ...], str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._graph.constants or name in self._graph.derived

    def region(self, name: str, region: Region) -> str:
        """The name of a constant with this region of the constant `name`."""
        kind, shape = self._graph.types[name]
        if shape_of(region) == shape:
            return name
        if (name, region) not in self._regions:
            new = self._regions[name, region] = unique_name(region_name(name, region), self._used_names)
            self._graph.types[new] = TensorType(kind, shape_of(region))
            if name in self._graph.constants:
                self._graph.constants[new] = self._slice(self._graph.constants[name], region, new)
            else:
                self._derive(name, region, new)
        return self._regions[name, region]

    def integers(self, values: Sequence[int]) -> str:
        """The name of a constant vector of int64."""
        key = tuple(values)
        if key not in self._integers:
            name = self._integers[key] = unique_name(f"[{','.join(map(str, key))}]", self._used_names)
            self._add(numpy_helper.from_array(np.array(key, np.int64), name))
        return self._integers[key]

    def reshaped(self, name: str, shape: Shape) -> str:
        """The name of an initialiser with the elements of `name` in another shape."""
        tensor = TensorProto()
        tensor.CopyFrom(self._graph.constants[name])
        tensor.name = f"{name}@{','.join(map(str, shape))}"
        if tensor.name not in self._graph.constants:
            self._used_names.add(tensor.name)
            tensor.dims[:] = shape
            self._add(tensor)
        return str(tensor.name)

    def slice_node(self, name: str, new: str, region: Region, of: Region) -> NodeProto:
        """A node that takes `region` from the tensor `name`, which is the region `of` of some tensor."""
        parts = [
            (axis, start - first, stop - first)
            for axis, ((start, stop), (first, last)) in enumerate(zip(region, of, strict=True))
            if (start, stop) != (first, last)
        ]
        axes, starts, ends = (list(each) for each in zip(*parts, strict=True))
        if self._opset < 10:
            return helper.make_node("Slice", [name], [new], axes=axes, starts=starts, ends=ends)
        return helper.make_node("Slice", [name, *map(self.integers, (starts, ends, axes))], [new])

    def _slice(self, tensor: TensorProto, region: Region, new: str) -> TensorProto:
        if tensor.data_location != TensorProto.EXTERNAL:
            array = numpy_helper.to_array(tensor)[tuple(slice(*each) for each in region)]
            return numpy_helper.from_array(np.ascontiguousarray(array), new)
        reference = slice_reference(tensor, region, new)
        small = num_bytes_of(tensor.data_type, shape_of(region)) <= INLINE_BYTES
        return self._file.inlined(reference) if small else reference

    def _derive(self, name: str, region: Region, new: str) -> None:
        """Derive the region from that region of the stored weight, where one corresponds to the other."""
        node = self._graph.derived[name]
        if node.op_type in ("Transpose", "Identity", "Cast"):
            order: Sequence[int] = range(len(region))
            if node.op_type == "Transpose":
                order = attributes_of(node).get("perm") or order[::-1]
            source = self.region(node.input[0], tuple(region[list(order).index(axis)] for axis in range(len(region))))
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.input[0], copy.output[0], copy.name = source, new, new
        else:
            copy = self.slice_node(name, new, region, tuple((0, size) for size in self._graph.types[name].shape))
        self._graph.derived[new] = copy

    def _add(self, tensor: TensorProto) -> None:
        self._graph.constants[tensor.name] = tensor
        self._graph.types[tensor.name] = TensorType(tensor.data_type, tuple(tensor.dims))
