"""Bounds of an ONNX model, checked before any work is done on it: a few KB of nested functions describe billions of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnx import FunctionProto, ModelProto, NodeProto

from coordinator.models.limits import MAX_CALL_DEPTH, MAX_EQUATION, MAX_NESTING, MAX_NODES
from coordinator.models.onnx.nodes import bodies
from hearth.errors import HearthError


def check_size(model: ModelProto, error: Callable[[str], HearthError]) -> None:
    """Raise `error(reason)` for too many nodes, bodies and functions nested too deeply, and an Einsum that is too long."""
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
