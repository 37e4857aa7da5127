"""Helpers for ONNX nodes: the tensors that a node and its bodies use, renaming, hoisting of large weights, ordering, bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from coordinator.models.limits import MAX_CALL_DEPTH, MAX_EQUATION, MAX_NESTING, MAX_NODES
from coordinator.models.ordering import topological_order
from hearth.errors import HearthError


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name, as Python values."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def bodies(node: NodeProto) -> list[GraphProto]:
    """The bodies of a control-flow node: the branches of If, the body of Loop and Scan."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found += attribute.graphs
    return found


def used_tensors(node: NodeProto) -> list[str]:
    """The tensors that a node uses, each once, including those that its bodies capture from outside."""
    names = dict.fromkeys(name for name in node.input if name)
    for body in bodies(node):
        names.update(dict.fromkeys(captured_tensors(body)))
    return list(names)


def captured_tensors(body: GraphProto) -> list[str]:
    """The tensors that a body captures from outside."""
    own = {each.name for each in body.input} | {each.name for each in body.initializer}
    for node in body.node:
        own.update(node.output)
    names = [name for node in body.node for name in used_tensors(node)]
    names += [each.name for each in body.output]
    return [name for name in dict.fromkeys(names) if name not in own]


def rename_uses(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> None:
    """Rename tensors in the inputs of nodes, and in their bodies where the tensor is captured from outside."""
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for body in bodies(node):
            captured_names = {name: names[name] for name in captured_tensors(body) if name in names}
            if captured_names:
                rename_uses(body.node, captured_names)
                for output in body.output:
                    output.name = captured_names.get(output.name, output.name)


def all_names(graph: GraphProto) -> set[str]:
    """Every tensor name in a graph and its bodies."""
    names = {each.name for each in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        names.update(node.input, node.output)
        for body in bodies(node):
            names |= all_names(body)
    return names


def unique_name(name: str, used_names: set[str]) -> str:
    """`name`, with a number appended if it is taken. The result is added to `used_names`."""
    candidate, number = name, 0
    while candidate in used_names:
        number += 1
        candidate = f"{name}__{number}"
    used_names.add(candidate)
    return candidate


def constant_value(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant node, under the name of its output; None for a sparse one."""
    attribute = node.attribute[0] if node.attribute else AttributeProto()
    if attribute.name == "value":
        return _renamed(attribute.t, node.output[0])
    kinds = {
        "value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT, "value_int": TensorProto.INT64,
        "value_ints": TensorProto.INT64, "value_string": TensorProto.STRING, "value_strings": TensorProto.STRING,
    }  # fmt: skip
    if attribute.name not in kinds:
        return None
    value = helper.get_attribute_value(attribute)
    shape = [len(value)] if attribute.name.endswith("s") else []
    return helper.make_tensor(node.output[0], kinds[attribute.name], shape, value if shape else [value])


def hoist_weights(graph: GraphProto, num_inline_bytes: int, used_names: set[str]) -> None:
    """Move the large initialisers and constants of bodies into the graph itself, where weights are expected.

    A body may use any tensor of the enclosing graph. Bodies may use the same name for different tensors, so each moved
    tensor gets a unique name.
    """
    for node in graph.node:
        for body in bodies(node):
            graph.initializer.extend(_extract_large(body, num_inline_bytes, used_names))


def _extract_large(body: GraphProto, num_inline_bytes: int, used_names: set[str]) -> Iterator[TensorProto]:
    for node in body.node:
        for inner in bodies(node):
            yield from _extract_large(inner, num_inline_bytes, used_names)
    large = {each.name: each for each in body.initializer if _is_large(each, num_inline_bytes)}
    for node in body.node:
        if node.op_type == "Constant" and (tensor := constant_value(node)) and _is_large(tensor, num_inline_bytes):
            large[tensor.name] = tensor
    if not large:
        return
    kept_tensors = [each for each in body.initializer if each.name not in large]
    kept_nodes = [node for node in body.node if not (len(node.output) == 1 and node.output[0] in large)]
    names = {name: unique_name(name, used_names) for name in large}
    del body.initializer[:]
    body.initializer.extend(kept_tensors)
    del body.node[:]
    body.node.extend(kept_nodes)
    # They are no longer defined in the body, so they count as captured from outside.
    rename_uses(body.node, names)
    for output in {each.name for each in body.output}.intersection(names):  # onnxruntime wants a node inside the body
        body.node.append(helper.make_node("Identity", [names[output]], [output]))
    for name, tensor in large.items():
        yield _renamed(tensor, names[name])


def _renamed(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy


def _is_large(tensor: TensorProto, num_inline_bytes: int) -> bool:
    if tensor.data_location == TensorProto.EXTERNAL:
        return True
    return tensor.data_type != TensorProto.STRING and numpy_helper.to_array(tensor).nbytes > num_inline_bytes


def sort_topologically(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes in topological order, which is the file's order if that is one. Nodes on a cycle are left out."""
    source = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [[source[name] for name in used_tensors(node) if name in source] for node in nodes]
    return [nodes[index] for index in topological_order(needs)]


def check_size(model: ModelProto, error: Callable[[str], HearthError]) -> None:
    """Raise `error(reason)` for too many nodes, bodies and functions nested too deeply, and an Einsum that is too long.

    Checked before any work is done on the model: a few KB of nested functions describe billions of nodes.
    """
    functions = {(_domain(each), each.name): each for each in model.functions}
    sizes: dict[tuple[str, str], int] = {}  # nodes of each function, with those of the functions that it calls

    def count(nodes: Iterable[NodeProto], nesting: int = 0, call_depth: int = 0) -> int:
        if nesting > MAX_NESTING:
            raise error(f"its control flow is nested more than {MAX_NESTING} deep")
        if call_depth > MAX_CALL_DEPTH:
            raise error(f"its functions call each other more than {MAX_CALL_DEPTH} deep")
        total = 0
        for node in nodes:
            called = (_domain(node), node.op_type)
            if called in functions and called not in sizes:
                sizes[called] = count(functions[called].node, 0, call_depth + 1)
            total += sizes.get(called, 1) + sum(count(body.node, nesting + 1, call_depth) for body in bodies(node))
            if total > MAX_NODES:
                raise error(f"it has more than {MAX_NODES} nodes, with those of its functions wherever they are called")
            if node.op_type == "Einsum" and any(len(each.s) > MAX_EQUATION for each in node.attribute):
                raise error(f"its Einsum '{node.name}' has more than {MAX_EQUATION} characters")
        return total

    for part in (model.graph, *model.functions):
        count(part.node)


def _domain(each: NodeProto | FunctionProto) -> str:
    return "" if each.domain == "ai.onnx" else str(each.domain)
