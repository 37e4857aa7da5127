"""Read a GraphSpec from an ONNX file: operators that can be placed, the tensors between them, and the weights they use.

Constants, and tensors computed from constants alone, belong to the operators that use them and are never sent between
devices. Functions are inlined; a control-flow node is one operator with its bodies. Every shape is known after reading: the
caller gives the dimensions that the file leaves open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnx import ModelProto, NodeProto, OperatorSetIdProto, TensorProto, helper, inliner

from coordinator.models.limits import MAX_AXES
from coordinator.models.onnx.contrib import TensorType
from coordinator.models.onnx.file import INLINE_BYTES, OnnxFile, dtype_name, num_bytes_of
from coordinator.models.onnx.nodes import all_names, bodies, hoist_weights, rename_uses, unique_name, used_tensors
from coordinator.models.onnx.shapes import CONTRIB_DOMAIN, ResolvedGraph, resolve_types, tensor_type
from hearth.errors import BadSetting, DynamicShape
from hearth.plan.graph import CutOperator
from hearth.plan.graph_spec import GraphSpec, Operator, Parameter, Tensor

_STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class OnnxModel:
    """A model with every shape known; its weights stay in the file until one is read.

    The nodes of `graph` are the operators of `spec`, one for one. `tiles` says how the graph of the file was rewritten; it is
    empty for that graph itself.
    """

    spec: GraphSpec
    file: OnnxFile
    dims: Mapping[str, int]
    ir_version: int
    opsets: tuple[OperatorSetIdProto, ...]
    graph: ResolvedGraph
    tiles: tuple[CutOperator, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file, its external data, dimensions and tiles: identifies the model that a plan is for."""
        dims = ",".join(f"{name}={size}" for name, size in sorted(self.dims.items()))
        tiles = " ".join(f"{cut.operator}:{','.join(map(str, cut.pieces))}" for cut in self.tiles)
        settings = f" {dims}" * bool(dims) + f" tiles {tiles}" * bool(tiles)
        return hashlib.sha256(f"{self.file.digest}{settings}".encode()).hexdigest() if settings else self.file.digest


def read_onnx(path: str | Path, dims: Mapping[str, int] | None = None) -> OnnxModel:
    """Read a model and fix its open dimensions: {"batch": 1}, or {"images.0": 1} for an axis without a name.

    Raises BadModelFile (damaged, weights missing), DynamicShape (a dimension without a value), UnsupportedOperator,
    BadSetting (a value for a dimension that is not open).
    """
    file, dims = OnnxFile(Path(path)), dict(dims or {})
    model = _inlined(file)
    graph = model.graph
    if graph.sparse_initializer:
        raise file.error("it has sparse weights, which are not supported")
    _normalise_domains(graph.node)
    weights = {tensor.name for tensor in graph.initializer}
    if len(weights) < len(graph.initializer):
        raise file.error("two of its weights have the same name")
    inputs = _input_types(file, model, weights, dims)
    typed = ((info.name, tensor_type(info.type, dims)) for info in (*graph.value_info, *graph.output))
    declared = {name: found for name, found in typed if found is not None}
    used_names = all_names(graph)
    hoist_weights(graph, INLINE_BYTES, used_names)
    resolved = resolve_types(file, model, inputs, declared, used_names)
    outputs = [info.name for info in graph.output]
    _check_outputs(file, outputs, resolved)
    _make_constant_outputs(resolved, outputs, inputs, used_names)
    _drop_dead_operators(resolved, outputs)
    versions = {CONTRIB_DOMAIN: 1} | {entry.domain: entry.version for entry in model.opset_import}
    return OnnxModel(
        spec=graph_spec(Path(path).stem, resolved, inputs, outputs),
        file=file,
        dims=dims,
        ir_version=model.ir_version,
        opsets=tuple(
            helper.make_opsetid(domain, versions[domain]) for domain in ("", CONTRIB_DOMAIN) if domain in versions
        ),
        graph=resolved,
    )


def _inlined(file: OnnxFile) -> ModelProto:
    """The model with its functions inlined, and with one domain name for the standard operators."""
    model: ModelProto = file.proto
    if model.functions:
        try:
            model = inliner.inline_local_functions(model)
        except Exception as error:  # the library's own errors are of many types
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise file.error(f"its functions cannot be inlined ({reason})") from None
    for entry in model.opset_import:
        if entry.domain in _STANDARD_DOMAINS:
            entry.domain = ""
    return model


def _normalise_domains(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        if node.domain in _STANDARD_DOMAINS:
            node.domain = ""
        for body in bodies(node):
            _normalise_domains(body.node)


def _input_types(
    file: OnnxFile, model: ModelProto, weights: set[str], dims: Mapping[str, int]
) -> dict[str, TensorType]:
    """The types of the graph's inputs, with open dimensions fixed. An input with a default value is a weight."""
    found: dict[str, TensorType] = {}
    open_dims: dict[str, None] = {}
    missing: dict[str, tuple[str, int]] = {}
    for info in model.graph.input:
        if info.name in weights:
            continue
        kind = info.type.tensor_type
        if not info.type.HasField("tensor_type") or kind.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
            raise file.error(f"its input {info.name} is not a tensor of numbers")
        if not kind.HasField("shape"):
            raise file.error(f"it does not say how many axes its input {info.name} has")
        if len(kind.shape.dim) > MAX_AXES:
            raise file.error(f"its input {info.name} has more than {MAX_AXES} axes")
        shape = []
        for axis, dim in enumerate(kind.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                shape.append(dim.dim_value)
                continue
            one = f"{info.name}.{axis}"
            name = dim.dim_param or one
            open_dims.update({name: None, one: None})
            if one not in dims and name not in dims:
                missing.setdefault(name, (info.name, axis))
            shape.append(dims.get(one, dims.get(name, 0)))
        found[info.name] = TensorType(kind.elem_type, tuple(shape))
    for name, size in dims.items():
        if size < 1:
            raise BadSetting(setting=f"--dim {name}={size}", reason="a dimension is at least 1")
        if name not in open_dims:
            those = f"only {', '.join(open_dims)}" if open_dims else "none"
            raise BadSetting(setting=f"--dim {name}={size}", reason=f"dimensions that the model leaves open: {those}")
    if missing:
        tensor, axis = next(iter(missing.values()))
        raise DynamicShape(tensor=tensor, axis=axis, options=" ".join(f"--dim {name}=1" for name in missing))
    return found


def _check_outputs(file: OnnxFile, outputs: list[str], resolved: ResolvedGraph) -> None:
    if not outputs or len(set(outputs)) < len(outputs):
        raise file.error("it has no outputs" if not outputs else "two of its outputs have the same name")
    if missing := [name for name in outputs if name not in resolved.types]:
        raise file.error(f"no node produces its output {missing[0]}")


def _make_constant_outputs(
    resolved: ResolvedGraph, outputs: list[str], inputs: Mapping[str, TensorType], used_names: set[str]
) -> None:
    """Add an Identity operator for each output that is a constant, so that some device produces it."""
    for name in outputs:
        if name not in resolved.constants and name not in resolved.derived:
            continue
        inner = unique_name(f"{name}__constant", used_names)
        derived = {id(node): node for node in resolved.derived.values()}  # each node once, even with several outputs
        rename_uses([*resolved.nodes, *derived.values()], {name: inner})
        resolved.types[inner] = resolved.types[name]
        if name in resolved.constants:
            tensor = resolved.constants.pop(name)
            tensor.name = inner
            resolved.constants[inner] = tensor
        else:
            node = resolved.derived.pop(name)
            node.output[list(node.output).index(name)] = inner
            resolved.derived[inner] = node
        resolved.nodes.append(
            helper.make_node("Identity", [inner], [name], name=unique_name(f"{name}__output", used_names))
        )
        resolved.flops.append(0.0)


def _drop_dead_operators(resolved: ResolvedGraph, outputs: list[str]) -> None:
    """Remove operators that no output depends on."""
    needed, kept = set(outputs), []
    for node, flops in zip(reversed(resolved.nodes), reversed(resolved.flops), strict=True):
        if needed.intersection(node.output):
            needed.update(used_tensors(node))
            kept.append((node, flops))
    resolved.nodes = [node for node, _ in reversed(kept)]
    resolved.flops = [flops for _, flops in reversed(kept)]


def graph_spec(name: str, resolved: ResolvedGraph, inputs: Mapping[str, TensorType], outputs: list[str]) -> GraphSpec:
    """The graph as planners see it, with these inputs and outputs."""
    consumers: dict[str, list[int]] = {}
    parameters: dict[str, int] = {}
    operators = []
    names: set[str] = set()
    for index, (node, flops) in enumerate(zip(resolved.nodes, resolved.flops, strict=True)):
        for input_name in used_tensors(node):
            consumers.setdefault(input_name, []).append(index)
        constants, _ = resolved.constant_inputs(used_tensors(node))
        used = sorted(parameters.setdefault(constant, len(parameters)) for constant in constants)
        title = unique_name(node.name or f"{node.op_type}_{index}", names)
        operators.append(Operator(title, node.op_type, flops, tuple(used)))
    sources: list[tuple[str, int | None]] = [(name, None) for name in inputs]
    sources += [(name, index) for index, node in enumerate(resolved.nodes) for name in node.output]
    tensors = []
    for tensor, source in sources:
        tensor_consumers = tuple(consumers.get(tensor, ()))
        if tensor and (tensor_consumers or tensor in outputs or source is None):
            element_type, shape = resolved.types[tensor]
            size = num_bytes_of(element_type, shape)
            tensors.append(
                Tensor(tensor, size, source, tensor_consumers, dtype_name(element_type), shape, tensor in outputs)
            )
    weights = tuple(Parameter(name, num_bytes_of(*resolved.types[name])) for name in parameters)
    return GraphSpec(name, tuple(operators), tuple(tensors), weights)
