"""The index space of each ONNX operator that can be cut: the rules by operator type, and their common part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.models.onnx.file import is_packed
from coordinator.models.onnx.reader import OnnxModel
from coordinator.models.onnx.tiling.call import Call
from coordinator.models.onnx.tiling.layouts import LAYOUT_RULES
from coordinator.models.onnx.tiling.products import PRODUCT_RULES
from coordinator.models.onnx.tiling.rows import ROW_RULES
from coordinator.models.onnx.tiling.space import CannotCut, IndexSpace

_RULES: Mapping[str, Callable[[Call], IndexSpace]] = {**PRODUCT_RULES, **ROW_RULES, **LAYOUT_RULES}


def index_space(model: OnnxModel, operator: int) -> IndexSpace:
    """The index space of an operator. Raises CannotCut with the reason why it stays whole."""
    graph = model.graph
    node = graph.nodes[operator]
    if node.op_type not in _RULES:
        raise CannotCut(f"operators of type {node.op_type} have no rule")
    for name in node.input:
        tensor = graph.constants.get(name)
        if tensor is not None and is_packed(tensor.data_type):
            raise CannotCut(f"its weight {name} stores several values in one byte")
    if any(0 in graph.types[name].shape for name in (*node.input, *node.output) if name):
        raise CannotCut("one of its tensors is empty")
    space = _RULES[node.op_type](Call(model, node))
    followed = {axis.index_axis for output in space.outputs for axis in output.axes if axis is not None}
    assert followed | set(space.summed) == set(range(len(space.sizes)))
    if all(size < 2 for size in space.sizes):
        raise CannotCut("no axis of it can be cut")
    return space


def index_spaces(model: OnnxModel) -> list[IndexSpace | str]:
    """By operator its index space, or the reason why it stays whole."""

    def one(operator: int) -> IndexSpace | str:
        try:
            return index_space(model, operator)
        except CannotCut as reason:
            return str(reason)

    return [one(operator) for operator in range(model.spec.num_operators)]
