"""One use of an operator, as the rules of tiling see it: attributes, shapes, and the values of constants."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from onnx import NodeProto, TensorProto, numpy_helper

from coordinator.models.onnx.nodes import attributes_of
from coordinator.models.onnx.reader import OnnxModel
from coordinator.models.onnx.tiling.space import Axis, CannotCut, Operand, Shape, whole

# What the formation operator Sum adds.
_SUMMABLE = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}


class Call:
    """A node with the shapes of its tensors."""

    def __init__(self, model: OnnxModel, node: NodeProto) -> None:
        self._model = model
        self.node = node

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.node)

    @cached_property
    def opset(self) -> int:
        """Version of the standard operators."""
        return next((each.version for each in self._model.opsets if not each.domain), 0)

    def has(self, position: int) -> bool:
        return position < len(self.node.input) and bool(self.node.input[position])

    def shape(self, position: int) -> Shape:
        """Shape of an input. Raises CannotCut if it is omitted."""
        if not self.has(position):
            raise CannotCut(f"it lacks input {position}")
        return self._model.graph.types[self.node.input[position]].shape

    @property
    def output_shape(self) -> Shape:
        return self._model.graph.types[self.node.output[0]].shape

    @property
    def can_be_summed(self) -> bool:
        """Whether partial sums of the output can be added up, by a Sum that broadcasts."""
        return self.opset >= 8 and self._model.graph.types[self.node.output[0]].element_type in _SUMMABLE

    def is_weight(self, position: int) -> bool:
        """Whether an input is an initialiser."""
        return self.has(position) and self.node.input[position] in self._model.graph.constants

    def values(self, position: int) -> list[int] | None:
        """The integers of a small constant input; None if it is omitted or not known."""
        tensor = self._model.graph.constants.get(self.node.input[position]) if self.has(position) else None
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        return [int(value) for value in numpy_helper.to_array(tensor).reshape(-1)]

    def operand(self, position: int, axes: tuple[Axis, ...]) -> Operand:
        """An input with its axes. Raises CannotCut if it is omitted."""
        return Operand(self.node.input[position], self.shape(position), axes)

    def whole_inputs(self, first: int) -> tuple[Operand, ...]:
        """The inputs from `first` on, which every tile has whole."""
        types = self._model.graph.types
        return tuple(whole(name, types[name].shape if name else None) for name in list(self.node.input)[first:])

    def output(self, axes: tuple[Axis, ...], position: int = 0) -> Operand:
        name = self.node.output[position]
        return Operand(name, self._model.graph.types[name].shape, axes)

    def only_output(self) -> None:
        """Raise CannotCut unless the node has one output."""
        if any(list(self.node.output)[1:]):
            raise CannotCut("it has several outputs")
