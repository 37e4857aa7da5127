"""A segment of a graph as a separate ONNX model, with the weights that it uses.

The model is small: weights above `INLINE_BYTES` are placeholders in it, and are sent to devices separately. So a weight
that several segments use, or that stays on its device under a new plan, is sent only once.
"""

from __future__ import annotations

from typing import NamedTuple

from onnx import GraphProto, ModelProto, TensorProto, helper

from coordinator.models.onnx.file import is_packed
from coordinator.models.onnx.nodes import sort_topologically, used_tensors
from coordinator.models.onnx.reader import OnnxModel
from hearth.plan.graph import Segment


class SegmentModel(NamedTuple):
    """`proto` is an ONNX model in which each of `weights` is external data without a file; `OnnxFile.read` gives its bytes.

    Pass weights to onnxruntime with `SessionOptions.add_external_initializers`. For a type that numpy lacks (bfloat16),
    make the value with `OrtValue.ortvalue_from_numpy_with_onnx_type` from unsigned integers of the same width.
    """

    proto: bytes
    weights: tuple[TensorProto, ...]


def segment_model(model: OnnxModel, segment: Segment) -> SegmentModel:
    """The ONNX model of a segment. The plan must be a cut of this model; `cutting.check_segments` checks that."""
    nodes = [model.graph.nodes[index] for index in sorted(segment.operators)]
    constants, derived = model.graph.constant_inputs(name for node in nodes for name in used_tensors(node))
    graph = GraphProto(name=f"{model.spec.name}-{segment.operators[0]}")
    graph.node.extend([*sort_topologically(derived), *nodes])
    graph.input.extend(helper.make_tensor_value_info(name, *model.graph.types[name]) for name in segment.inputs)
    graph.output.extend(helper.make_tensor_value_info(name, *model.graph.types[name]) for name in segment.outputs)
    weights: list[TensorProto] = []
    for tensor in (model.graph.constants[name] for name in sorted(constants)):
        if tensor.data_location == TensorProto.EXTERNAL and not is_packed(tensor.data_type):
            graph.initializer.append(_placeholder(tensor, f"{len(weights)}"))
            weights.append(tensor)
        else:
            graph.initializer.append(model.file.inlined(tensor))
    proto = ModelProto(ir_version=model.ir_version, producer_name="hearth", opset_import=model.opsets, graph=graph)
    return SegmentModel(proto.SerializeToString(), tuple(weights))


def _placeholder(tensor: TensorProto, location: str) -> TensorProto:
    placeholder = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    placeholder.external_data.add(key="location", value=location)
    return placeholder
