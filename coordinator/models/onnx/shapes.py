"""Infer the type and static shape of every tensor of an ONNX graph, and find the constant parts of the graph.

Nodes are visited in topological order. The shapes of a node's outputs follow from those of its inputs (by `onnx`, or by our
rules for onnxruntime's own operators and for control flow). Small values that depend only on shapes and constants are
computed on the way, since other shapes depend on them: so a dimension fixed at an input propagates through the whole graph.
If the condition of an If is constant, the chosen branch replaces the If.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_shapes

from coordinator.models.limits import MAX_AXES, MAX_TENSOR_BYTES
from coordinator.models.onnx import contrib
from coordinator.models.onnx.contrib import TensorType
from coordinator.models.onnx.file import INLINE_BYTES, OnnxFile, num_bytes_of
from coordinator.models.onnx.flops import flops_of
from coordinator.models.onnx.nodes import (
    attributes_of,
    bodies,
    constant_value,
    rename_uses,
    sort_topologically,
    unique_name,
    used_tensors,
)
from hearth.errors import UnsupportedOperator

CONTRIB_DOMAIN = "com.microsoft"
# Results differ from run to run, so they must not be precomputed, nor computed twice.
_RANDOM_OPERATORS = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}
# A node with larger outputs is not evaluated here: shapes and indices are far smaller.
_MAX_CONSTANTS_BYTES = INLINE_BYTES
# Operators of onnxruntime that its exporters and its optimiser write without a domain.
_CONTRIB_WITHOUT_DOMAIN = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
_CONTROL_FLOW = {"If", "Loop", "Scan"}

TensorTypes = MutableMapping[str, TensorType]
KnownValues = MutableMapping[str, TensorProto]


@dataclass
class ResolvedGraph:
    """A graph with all types resolved. `nodes` are the operators in topological order, with their FLOPs.

    `constants` are initialisers and computed values. `derived` are the nodes that compute more tensors from constants
    alone, by output; they are copied to every segment that needs them.
    """

    types: dict[str, TensorType]
    nodes: list[NodeProto] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    derived: dict[str, NodeProto] = field(default_factory=dict)

    def constant_inputs(self, names: Iterable[str]) -> tuple[list[str], list[NodeProto]]:
        """The constants that these tensors depend on, and the nodes that derive them from constants."""
        todo, seen = list(names), set[str]()
        constants: list[str] = []
        derived: dict[int, NodeProto] = {}
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.constants:
                constants.append(name)
            elif name in self.derived:
                node = self.derived[name]
                derived[id(node)] = node
                todo += used_tensors(node)
        return constants, list(derived.values())


def resolve_types(
    file: OnnxFile,
    model: ModelProto,
    inputs: Mapping[str, TensorType],
    declared: Mapping[str, TensorType],
    used_names: set[str],
) -> ResolvedGraph:
    """Resolve all types of a graph.

    `inputs` are its inputs without initialisers; `declared` are the types that the file gives for inner tensors and
    outputs. `used_names` are the names in use, to which new ones are added.

    Raises BadModelFile and UnsupportedOperator.
    """
    resolver = _Resolver(file, model, declared)
    resolved = ResolvedGraph(types=dict(inputs))
    values: dict[str, TensorProto] = {}
    for tensor in model.graph.initializer:
        resolver.add_constant(tensor, resolved.types, values)
        resolved.constants[tensor.name] = tensor
    todo = deque(_sorted_nodes(file, model.graph, resolved.types))
    while todo:
        node = todo.popleft()
        if (branch := _constant_branch(node, values)) is not None:
            todo.extendleft(reversed(_inlined(branch, node, used_names)))
            continue
        flops = resolver.infer_node(node, resolved.types, values)
        if node.op_type == "Constant":
            resolved.constants[node.output[0]] = resolver.constant_value_of(node)
        elif all(name in values for name in node.output if name):
            resolved.constants.update((name, values[name]) for name in node.output if name)
        elif _is_repeatable(node) and all(
            name in resolved.constants or name in resolved.derived for name in used_tensors(node)
        ):
            resolved.derived.update((name, node) for name in node.output if name)
        else:
            resolved.nodes.append(node)
            resolved.flops.append(flops)
    return resolved


def tensor_type(proto: TypeProto, dims: Mapping[str, int]) -> TensorType | None:
    """The type with these dimensions; None if it is not a tensor, or if its shape is still not fixed."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    shape = [
        each.dim_value if each.HasField("dim_value") else dims.get(each.dim_param, -1)
        for each in proto.tensor_type.shape.dim
    ]
    return None if any(size < 0 for size in shape) else TensorType(proto.tensor_type.elem_type, tuple(shape))


def _sorted_nodes(file: OnnxFile, graph: GraphProto, known: Mapping[str, Any]) -> list[NodeProto]:
    """The nodes in topological order. `known` are the tensors that exist besides the outputs of the graph's nodes.

    Raises BadModelFile.
    """
    made: set[str] = set()
    for node in graph.node:
        for name in filter(None, node.output):
            if name in made:
                raise file.error(f"two of its nodes produce the tensor {name}")
            made.add(name)
    for node in graph.node:
        if missing := [name for name in used_tensors(node) if name not in made and name not in known]:
            raise file.error(f"{_describe(node)} uses the tensor {missing[0]}, which no node produces")
    nodes = sort_topologically(graph.node)
    if len(nodes) < len(graph.node):
        left = next(node for node in graph.node if not any(node is each for each in nodes))
        raise file.error(f"its nodes depend on each other in a cycle, {_describe(left)} among them")
    return nodes


def _is_repeatable(node: NodeProto) -> bool:
    return not (
        node.op_type in _RANDOM_OPERATORS
        or any(not _is_repeatable(each) for body in bodies(node) for each in body.node)
    )


def _constant_branch(node: NodeProto, values: Mapping[str, TensorProto]) -> GraphProto | None:
    if node.op_type != "If" or node.input[0] not in values:
        return None
    wanted = "then_branch" if numpy_helper.to_array(values[node.input[0]]).all() else "else_branch"
    return next((attribute.g for attribute in node.attribute if attribute.name == wanted), None)


def _inlined(branch: GraphProto, node: NodeProto, used_names: set[str]) -> list[NodeProto]:
    """The nodes of a branch that replace its If: inner names are made unique; results get the names of the If's outputs."""
    constants = [helper.make_node("Constant", [], [each.name], value=each) for each in branch.initializer]
    nodes = [*constants, *(NodeProto.FromString(each.SerializeToString()) for each in branch.node)]
    names = {name: unique_name(name, used_names) for each in nodes for name in each.output if name}
    rename_uses(nodes, names)
    for each in nodes:
        for index, name in enumerate(each.output):
            each.output[index] = names.get(name, name)
    results = zip(branch.output, node.output, strict=False)
    return nodes + [
        helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer]) for inner, outer in results if outer
    ]


def _dummy_array(element_type: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of this type and shape that takes almost no memory: one value, broadcast."""
    return np.broadcast_to(np.zeros((), helper.tensor_dtype_to_np_dtype(element_type)), shape)


def _is_contrib(node: NodeProto) -> bool:
    return node.domain == CONTRIB_DOMAIN or (node.op_type in _CONTRIB_WITHOUT_DOMAIN and not node.domain)


def _describe(node: NodeProto) -> str:
    return f"the {node.op_type} node '{node.name or next(iter(node.output), '')}'"


class _Resolver:
    def __init__(self, file: OnnxFile, model: ModelProto, declared: Mapping[str, TensorType]) -> None:
        self._file, self._declared = file, declared
        self._opsets = {entry.domain: entry.version for entry in model.opset_import}
        self._header = ModelProto(ir_version=max(model.ir_version, 8), opset_import=model.opset_import)

    def add_constant(self, tensor: TensorProto, types: TensorTypes, values: KnownValues) -> None:
        types[tensor.name] = TensorType(tensor.data_type, tuple(tensor.dims))
        if tensor.data_location != TensorProto.EXTERNAL:
            values[tensor.name] = tensor

    def constant_value_of(self, node: NodeProto) -> TensorProto:
        tensor = constant_value(node)
        if tensor is None:
            raise self._unsupported(node, "it holds no tensor, or a sparse one")
        return tensor

    def infer_node(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> float:
        """Add the types of a node's outputs, and their values where they are known. Returns its FLOPs."""
        self._check_operator(node)
        if node.op_type == "Constant":
            self.add_constant(self.constant_value_of(node), types, values)
            return 0.0
        try:
            output_types, flops = self._infer(node, types, values)
        except (IndexError, KeyError, TypeError, ValueError):
            raise self._file.error(f"{_describe(node)} is not complete, or does not fit its inputs") from None
        for each in output_types.values():
            if len(each.shape) > MAX_AXES or num_bytes_of(*each) > MAX_TENSOR_BYTES:
                limits = f"{MAX_AXES} axes or {MAX_TENSOR_BYTES >> 40} TiB"
                raise self._file.error(f"{_describe(node)} makes a tensor of more than {limits}")
        types.update(output_types)
        for tensor in self._evaluate(node, output_types, types, values):
            values[tensor.name] = tensor
        return flops

    def _check_operator(self, node: NodeProto) -> None:
        if _is_contrib(node):
            return
        if node.domain:
            raise self._unsupported(node, f"its domain '{node.domain}' is not supported")
        if "" not in self._opsets:
            raise self._file.error("it names no version of the standard operators")
        if not defs.has(node.op_type, self._opsets[""], ""):
            raise self._unsupported(node, f"it is not in version {self._opsets['']} of the standard operators")

    def _infer(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> tuple[dict[str, TensorType], float]:
        if node.op_type in _CONTROL_FLOW and not node.domain:
            return self._control_flow(node, types, values)
        inputs = [types.get(name) for name in node.input]
        standard = contrib.without_activation(node) if _is_contrib(node) else node
        if standard is not None:
            output_types = self._standard(standard, types, values)
        else:
            output_types = dict(zip(node.output, contrib.output_types(node, inputs) or (), strict=False))
        for name in filter(None, node.output):
            if name not in output_types and name in self._declared:
                output_types[name] = self._declared[name]
            if name not in output_types:
                raise self._unsupported(node, f"the shape of its output {name} is known only at run time")
        output_types.pop("", None)
        shapes = [None if each is None else each.shape for each in inputs]
        return output_types, flops_of(
            node, shapes, [output_types[name].shape if name else None for name in node.output]
        )

    def _standard(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> dict[str, TensorType]:
        """Output types by the shape inference of `onnx`. Outputs whose shape it leaves open are left out."""
        try:
            inferred = infer_shapes(
                self._single_node_model(node, types, values), check_type=True, strict_mode=True
            ).graph
        except (InferenceError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise self._file.error(f"{_describe(node)} does not fit its inputs ({reason})") from None
        outputs: dict[str, TensorType] = {}
        for info in inferred.value_info:
            if not info.type.HasField("tensor_type"):
                raise self._unsupported(node, f"its output {info.name} is not a tensor")
            if (known := tensor_type(info.type, {})) is not None:
                outputs[info.name] = known
        return outputs

    def _single_node_model(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> ModelProto:
        """A model with only this node. Known values are initialisers."""
        model = ModelProto()
        model.CopyFrom(self._header)
        model.graph.name = "node"
        model.graph.node.append(node)
        for name in used_tensors(node):
            if name in values:
                model.graph.initializer.append(values[name])
            else:
                model.graph.input.append(helper.make_tensor_value_info(name, *types[name]))
        return model

    def _evaluate(
        self, node: NodeProto, output_types: Mapping[str, TensorType], types: TensorTypes, values: KnownValues
    ) -> list[TensorProto]:
        """The values of a node's outputs, if they follow from known ones and are small."""
        if _is_contrib(node) or node.op_type in _CONTROL_FLOW or not _is_repeatable(node):
            return []
        if sum(num_bytes_of(*each) for each in output_types.values()) > _MAX_CONSTANTS_BYTES:
            return []
        if node.op_type not in ("Shape", "Size") and not all(name in values for name in used_tensors(node)):
            return []
        model = self._single_node_model(node, types, values)
        model.graph.output.extend(helper.make_tensor_value_info(name, *each) for name, each in output_types.items())
        # Operators that depend only on a shape accept any array of that shape.
        feeds = {each.name: _dummy_array(*types[each.name]) for each in model.graph.input}
        try:
            results = ReferenceEvaluator(model).run(None, feeds)
            arrays = [np.asarray(result) for result in results]
            tensors = [numpy_helper.from_array(array, name) for array, name in zip(arrays, output_types, strict=True)]
        except Exception:  # what the reference evaluator cannot compute is left to the device
            return []
        same = all(TensorType(each.data_type, tuple(each.dims)) == output_types[each.name] for each in tensors)
        return tensors if same else []

    # ---- control flow ---------------------------------------------------------------------------------------------

    def _control_flow(
        self, node: NodeProto, types: TensorTypes, values: KnownValues
    ) -> tuple[dict[str, TensorType], float]:
        rule = {"If": self._if, "Loop": self._loop, "Scan": self._scan}[node.op_type]
        outputs, flops = rule(node, types, values)
        if len(outputs) < len(node.output):
            raise self._file.error(f"{_describe(node)} has more outputs than its body")
        return {name: each for name, each in zip(node.output, outputs, strict=False) if name}, flops

    def _if(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> tuple[list[TensorType], float]:
        """Both branches must give the same shapes; the FLOPs are those of the more expensive one."""
        (first, first_flops, _), (second, second_flops, _) = (
            self._body(body, [], types, values) for body in bodies(node)
        )
        if first != second:
            raise self._unsupported(node, "its branches give different shapes")
        return first, max(first_flops, second_flops)

    def _loop(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> tuple[list[TensorType], float]:
        """The state keeps its shape. Outputs per iteration are stacked, which needs a known number of iterations."""
        (body,) = bodies(node)
        state = [types[name] for name in node.input[2:]]
        scalars = [TensorType(TensorProto.INT64, ()), TensorType(TensorProto.BOOL, ())]
        outputs, flops, inner = self._body(body, [*scalars, *state], types, values)
        if outputs[1 : 1 + len(state)] != state:
            raise self._unsupported(node, "the shape of its state changes between iterations")
        max_rounds, condition = self._scalar(node.input[0], values), (*node.input, "")[1]
        runs_all = (not condition or self._scalar(condition, values) == 1) and self._never_ends(body, inner)
        stacked = outputs[1 + len(state) :]
        if stacked and (max_rounds is None or not runs_all):
            raise self._unsupported(
                node, "the number of its iterations, and so the shape of its outputs, is known only at run time"
            )
        rounds = 1 if max_rounds is None else max(max_rounds, 0)
        return [*state, *(TensorType(each.element_type, (rounds, *each.shape)) for each in stacked)], flops * rounds

    def _never_ends(self, body: GraphProto, inner: KnownValues) -> bool:
        """Whether a loop's body never ends the loop: it returns True, or the condition that it received."""
        again = body.output[0].name
        copies = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
        while again in copies and again not in inner:
            again = copies[again]
        return again == body.input[1].name or self._scalar(again, inner) == 1

    def _scan(self, node: NodeProto, types: TensorTypes, values: KnownValues) -> tuple[list[TensorType], float]:
        (body,) = bodies(node)
        attributes = attributes_of(node)
        num_scanned = int(attributes["num_scan_inputs"])
        given = [types[name] for name in node.input]
        num_state = len(given) - num_scanned
        if self._opsets[""] < 9:
            raise self._unsupported(node, "its form before version 9 of the standard operators is not supported")
        in_axes = attributes.get("scan_input_axes") or [0] * num_scanned
        slices, lengths = [], []
        for each, axis in zip(given[num_state:], in_axes, strict=True):
            axis %= len(each.shape)
            slices.append(TensorType(each.element_type, each.shape[:axis] + each.shape[axis + 1 :]))
            lengths.append(each.shape[axis])
        outputs, flops, _ = self._body(body, [*given[:num_state], *slices], types, values)
        if outputs[:num_state] != given[:num_state]:
            raise self._unsupported(node, "the shape of its state changes between iterations")
        stacked = outputs[num_state:]
        out_axes = attributes.get("scan_output_axes") or [0] * len(stacked)
        for index, (each, axis) in enumerate(zip(stacked, out_axes, strict=True)):
            axis %= len(each.shape) + 1
            stacked[index] = TensorType(each.element_type, (*each.shape[:axis], lengths[0], *each.shape[axis:]))
        return [*given[:num_state], *stacked], flops * lengths[0]

    def _body(
        self, body: GraphProto, inputs: Sequence[TensorType], types: TensorTypes, values: KnownValues
    ) -> tuple[list[TensorType], float, KnownValues]:
        """The types of a body's outputs, the FLOPs of one run, and the values known in it."""
        inner_types: TensorTypes = ChainMap({}, types)
        inner_values: KnownValues = ChainMap({}, values)
        if len(inputs) != len(body.input):
            raise self._file.error(f"the body {body.name} takes {len(body.input)} tensors and gets {len(inputs)}")
        inner_types.update((info.name, each) for info, each in zip(body.input, inputs, strict=True))
        for tensor in body.initializer:
            self.add_constant(tensor, inner_types, inner_values)
        flops = sum(
            self.infer_node(node, inner_types, inner_values) for node in _sorted_nodes(self._file, body, inner_types)
        )
        return [inner_types[each.name] for each in body.output], flops, inner_values

    def _scalar(self, name: str, values: KnownValues) -> int | None:
        return int(numpy_helper.to_array(values[name]).reshape(-1)[0]) if name in values else None

    def _unsupported(self, node: NodeProto, reason: str) -> UnsupportedOperator:
        kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        return UnsupportedOperator(operator=kind, node=node.name or next(iter(node.output), ""), reason=reason)
