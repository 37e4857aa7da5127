"""The operator graph that graph planners partition and place. Pure.

Operators are numbered in topological order. A tensor has one producer and any number of consumers; it is sent once to each
device that has consumers of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Operator(NamedTuple):
    """One node of the graph. `parameters` are indices into `GraphSpec.parameters`; operators may share parameters.

    Operators with the same non-empty `group` can run in parallel: the tiles of one operator, or its formations.
    """

    name: str
    kind: str  # the ONNX operator type, or the Keras class
    flops: float
    parameters: tuple[int, ...] = ()
    group: str = ""


class Parameter(NamedTuple):
    """A weight (an ONNX initialiser)."""

    name: str
    num_bytes: int


class Tensor(NamedTuple):
    """An activation. `source` is the operator that produces it, or None for an input of the graph."""

    name: str
    num_bytes: int
    source: int | None
    consumers: tuple[int, ...]
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    is_output: bool = False  # of the graph


@dataclass(frozen=True)
class GraphSpec:
    """A graph of operators, tensors and parameters.

    Raises ValueError if the operators are not in topological order, or an index is out of range.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...] = ()

    def __post_init__(self) -> None:
        num_operators = len(self.operators)
        for tensor in self.tensors:
            first = 0 if tensor.source is None else tensor.source + 1
            for consumer in tensor.consumers:
                if not first <= consumer < num_operators:
                    raise ValueError(f"tensor {tensor.name} of operator {tensor.source} is used by operator {consumer}")
            if tensor.source is not None and not 0 <= tensor.source < num_operators:
                raise ValueError(f"tensor {tensor.name} comes from operator {tensor.source}, which does not exist")
        for operator in self.operators:
            if any(not 0 <= index < len(self.parameters) for index in operator.parameters):
                raise ValueError(f"operator {operator.name} uses a parameter that does not exist")

    @property
    def num_operators(self) -> int:
        """Number of operators; they are numbered from 0."""
        return len(self.operators)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the graph: tensors that no operator produces."""
        return tuple(tensor for tensor in self.tensors if tensor.source is None)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the graph."""
        return tuple(tensor for tensor in self.tensors if tensor.is_output)

    @cached_property
    def consumed(self) -> tuple[tuple[Tensor, ...], ...]:
        """For each operator, the tensors that it consumes, including inputs of the graph."""
        return self._tensors_by_operator(lambda tensor: tensor.consumers)

    @cached_property
    def produced(self) -> tuple[tuple[Tensor, ...], ...]:
        """For each operator, the tensors that it produces."""
        return self._tensors_by_operator(lambda tensor: () if tensor.source is None else (tensor.source,))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that produce its inputs, in increasing order."""
        return tuple(
            tuple(sorted({tensor.source for tensor in tensors if tensor.source is not None}))
            for tensors in self.consumed
        )

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that consume its outputs, in increasing order."""
        return tuple(
            tuple(sorted({consumer for tensor in tensors for consumer in tensor.consumers}))
            for tensors in self.produced
        )

    def parameter_bytes(self, operators: Iterable[int]) -> int:
        """Bytes of the parameters that these operators use; shared parameters count once."""
        used = {index for operator in operators for index in self.operators[operator].parameters}
        return sum(self.parameters[index].num_bytes for index in used)

    def _tensors_by_operator(self, operators_of: Callable[[Tensor], Iterable[int]]) -> tuple[tuple[Tensor, ...], ...]:
        by_operator: list[list[Tensor]] = [[] for _ in self.operators]
        for tensor in self.tensors:
            for operator in operators_of(tensor):
                by_operator[operator].append(tensor)
        return tuple(map(tuple, by_operator))
