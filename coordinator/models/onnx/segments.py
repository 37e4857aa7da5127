"""A segment of a graph as an ONNX model of its own, with the weights that it uses.

The model is small: weights above `INLINE_BYTES` are placeholders in it, and go to devices by themselves, so that a weight
that several segments use, or that stays where it is after a new plan, is sent once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from coordinator.models.onnx.contrib import TensorType
from coordinator.models.onnx.file import dtype_name, num_bytes_of
from coordinator.models.onnx.nodes import in_order, uses
from coordinator.models.onnx.reader import OnnxModel
from hearth.errors import BadPlan
from hearth.plan.graph import Segment


class Initializer(NamedTuple):
    """A weight. `dtype` is numpy's (or ml_dtypes') name of its type, `element_type` ONNX's number.

    `read` gives its little-endian bytes: a view into the mapped file, where they lie there as such.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], memoryview]
    element_type: int = TensorProto.FLOAT


class SegmentModel(NamedTuple):
    """`proto` is an ONNX model in which each of `initializers` is external data without a file.

    They go to onnxruntime by `SessionOptions.add_external_initializers`. For a type that numpy lacks (bfloat16), make the
    value by `OrtValue.ortvalue_from_numpy_with_onnx_type` from unsigned integers of its width.
    """

    proto: bytes
    initializers: tuple[Initializer, ...]


def segment_model(model: OnnxModel, segment: Segment) -> SegmentModel:
    """Raises BadPlan when the segment does not fit the model (check the whole plan with `cutting.check_segments`)."""
    if bad := [index for index in segment.operators if index >= len(model.nodes)]:
        raise BadPlan(reason=f"operator {bad[0]} does not exist: {model.spec.name} has {len(model.nodes)}")
    nodes = [model.nodes[index] for index in sorted(segment.operators)]
    made = {name for node in nodes for name in node.output}
    constants, derived = _constants(model, nodes, made.union(segment.inputs))
    if missing := [name for name in segment.outputs if name not in made]:
        raise BadPlan(reason=f"a segment gives out {missing[0]}, which none of its operators makes")
    graph = GraphProto(name=f"{model.spec.name}-{segment.operators[0]}")
    graph.node.extend([*derived, *nodes])
    graph.input.extend(helper.make_tensor_value_info(name, *_type(model, name)) for name in segment.inputs)
    graph.output.extend(helper.make_tensor_value_info(name, *_type(model, name)) for name in segment.outputs)
    initializers: list[Initializer] = []
    for tensor in constants:
        if tensor.data_location == TensorProto.EXTERNAL and (found := _initializer(model, tensor)) is not None:
            graph.initializer.append(_placeholder(tensor, f"{len(initializers)}"))
            initializers.append(found)
        else:
            graph.initializer.append(model.file.inlined(tensor))
    proto = ModelProto(ir_version=model.ir_version, producer_name="hearth", opset_import=model.opsets, graph=graph)
    return SegmentModel(proto.SerializeToString(), tuple(initializers))


def _constants(
    model: OnnxModel, nodes: Iterable[NodeProto], known: set[str]
) -> tuple[list[TensorProto], list[NodeProto]]:
    """What nodes need beside `known`: weights, and nodes that compute from weights, in an order in which they can run."""
    constants: dict[str, TensorProto] = {}
    derived: dict[int, NodeProto] = {}
    todo = [name for node in nodes for name in uses(node)]
    while todo:
        name = todo.pop()
        if name in known or name in constants:
            continue
        if name in model.constants:
            constants[name] = model.constants[name]
        elif name in model.derived:
            node = model.derived[name]
            if id(node) not in derived:
                derived[id(node)] = node
                todo += uses(node)
        else:
            raise BadPlan(reason=f"a segment needs {name}, which is not among its inputs")
    return [constants[name] for name in sorted(constants)], in_order(list(derived.values()))


def _type(model: OnnxModel, name: str) -> TensorType:
    if name not in model.types:
        raise BadPlan(reason=f"the graph {model.spec.name} has no tensor {name}")
    return model.types[name]


def _initializer(model: OnnxModel, tensor: TensorProto) -> Initializer | None:
    """None for a type of which several values share a byte: there is no other way to hand those to onnxruntime."""
    dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
    size = num_bytes_of(tensor.data_type, shape)
    if size != math.prod(shape) * dtype.itemsize:
        return None
    read = partial(model.file.read, tensor)
    return Initializer(tensor.name, dtype_name(tensor.data_type), shape, size, read, tensor.data_type)


def _placeholder(tensor: TensorProto, location: str) -> TensorProto:
    found = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    found.external_data.add(key="location", value=location)
    return found
