"""Choose the pieces of every operator of a graph for the least moved bytes, by dynamic programming along the graph. Pure.

After EinDecomp (einsummable, which Doppler's graphs come from): forwards, the least cost of producing a tensor in each
layout; backwards, each operator takes the pieces that suit its producers' costs and its consumers' choices. On a tree this
is optimal. Where a tensor has several consumers its cost is divided among them, so a few rounds follow that change one
operator at a time as long as bytes are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.models.onnx.tiling.space import IndexSpace, Operand, Pieces, volume, whole
from coordinator.plan.graph.tiles.moved_bytes import Spread, TiledOperator, Traffic
from coordinator.plan.graph.tiles.options import Options
from hearth.plan.graph_spec import GraphSpec

# What another operator costs (its start, its message, its place in the plan) in the bytes that a link of 1 Gbit/s carries in
# 50 microseconds, so that small operators are cut only where that saves more.
_BYTES_PER_OPERATOR = 6_000
_MAX_ROUNDS = 4  # of improvement; each is one pass over the graph
# What a byte of weights on a device costs, in bytes moved by a request. Weights do not travel with it, so while there is room
# they only decide between pieces that move the same bytes.
WEIGHTS_ARE_FREE, WEIGHTS_ARE_DEAR = 1e-6, 1.0


class _Edge(NamedTuple):
    """A tensor from one operator to another: output and input numbers in their index spaces, bytes per element."""

    source: int
    output: int
    target: int
    input: int
    item_bytes: float


def choose_pieces(
    spec: GraphSpec,
    spaces: Sequence[IndexSpace | str],
    options: Options,
    num_devices: int,
    weight_factor: float = WEIGHTS_ARE_FREE,
) -> dict[int, Pieces]:
    """By operator, the pieces among its `options`; operators that stay whole are left out."""
    chosen = _Choice(spec, spaces, options, num_devices, weight_factor).run()
    picked = {operator: options[operator][number] for operator, number in enumerate(chosen)}
    return {operator: pieces for operator, pieces in picked.items() if max(pieces, default=1) > 1}


def moved_bytes(
    spec: GraphSpec, spaces: Sequence[IndexSpace | str], pieces: dict[int, Pieces], num_devices: int
) -> float:
    """The bytes that these pieces move, with the costs of their operators: what `choose_pieces` minimises."""
    return _fixed(spec, spaces, pieces, num_devices, WEIGHTS_ARE_FREE).total([0] * spec.num_operators)


def held_bytes(spec: GraphSpec, spaces: Sequence[IndexSpace | str], pieces: dict[int, Pieces], num_devices: int) -> int:
    """The weights on all devices together: those that several devices need for their tiles count several times."""
    return _fixed(spec, spaces, pieces, num_devices, WEIGHTS_ARE_FREE).held_bytes


def _fixed(
    spec: GraphSpec, spaces: Sequence[IndexSpace | str], pieces: dict[int, Pieces], num_devices: int, factor: float
) -> _Choice:
    """A choice without alternatives."""
    uncut = [() if isinstance(space, str) else space.uncut for space in spaces]
    options = tuple((pieces.get(operator, each),) for operator, each in enumerate(uncut))
    return _Choice(spec, spaces, options, num_devices, factor)


class _Choice:
    def __init__(
        self,
        spec: GraphSpec,
        spaces: Sequence[IndexSpace | str],
        options: Options,
        num_devices: int,
        weight_factor: float,
    ) -> None:
        self._traffic = Traffic()
        self._weight_factor = weight_factor
        self._spec, self._options = spec, options
        self._spaces = [
            _whole_space(spec, operator) if isinstance(each, str) else each for operator, each in enumerate(spaces)
        ]
        tiled = [
            [TiledOperator(space, pieces, num_devices) for pieces in choices]
            for space, choices in zip(self._spaces, options, strict=True)
        ]
        number = self._traffic.number
        self._reads = [
            [[number(each.reads(position)) for position in range(len(space.inputs))] for each in choices]
            for space, choices in zip(self._spaces, tiled, strict=True)
        ]
        self._writes = [
            [[number(each.writes(position)) for position in range(len(space.outputs))] for each in choices]
            for space, choices in zip(self._spaces, tiled, strict=True)
        ]
        self._edges = self._find_edges()
        self._into: list[list[_Edge]] = [[] for _ in spaces]
        self._from: list[list[_Edge]] = [[] for _ in spaces]
        for edge in self._edges:
            self._into[edge.target].append(edge)
            self._from[edge.source].append(edge)
        self._held = [[self._held_bytes(operator, each) for each in choices] for operator, choices in enumerate(tiled)]
        self._own = [
            [self._own_bytes(operator, number, each) for number, each in enumerate(choices)]
            for operator, choices in enumerate(tiled)
        ]

    @property
    def held_bytes(self) -> int:
        """The weights on all devices for the first option of every operator."""
        return sum(held[0] for held in self._held)

    def run(self) -> list[int]:
        """The number of the option chosen for each operator."""
        least: list[list[float]] = []  # by operator and option, the least cost of everything up to it
        for operator, choices in enumerate(self._options):
            costs = []
            for number in range(len(choices)):
                costs.append(
                    self._own[operator][number]
                    + sum(
                        min(
                            least[edge.source][source] / len(self._from[edge.source])
                            + self._bytes(edge, source, number)
                            for source in range(len(self._options[edge.source]))
                        )
                        for edge in self._into[operator]
                    )
                )
            least.append(costs)
        chosen = [0] * len(self._options)
        for operator in reversed(range(len(self._options))):
            chosen[operator] = self._best(operator, chosen, least[operator], backwards=True)
        for _ in range(_MAX_ROUNDS):
            before = list(chosen)
            for operator in range(len(self._options)):
                chosen[operator] = self._best(operator, chosen, self._own[operator], backwards=False)
            if chosen == before:
                break
        return chosen

    def total(self, chosen: Sequence[int]) -> float:
        """Bytes moved by a choice, with the costs of operators."""
        own = sum(self._own[operator][number] for operator, number in enumerate(chosen))
        return own + sum(self._bytes(edge, chosen[edge.source], chosen[edge.target]) for edge in self._edges)

    def _best(self, operator: int, chosen: Sequence[int], costs: Sequence[float], backwards: bool) -> int:
        """The cheapest option given the choices of its consumers and, unless `backwards`, of its producers; ties: the first."""

        def cost(number: int) -> float:
            after = sum(self._bytes(edge, number, chosen[edge.target]) for edge in self._from[operator])
            if backwards:
                return costs[number] + after
            return (
                costs[number]
                + after
                + sum(self._bytes(edge, chosen[edge.source], number) for edge in self._into[operator])
            )

        return min(range(len(self._options[operator])), key=cost)

    def _bytes(self, edge: _Edge, source: int, target: int) -> float:
        written = self._writes[edge.source][source][edge.output]
        return edge.item_bytes * self._traffic.elements(written, self._reads[edge.target][target][edge.input])

    def _find_edges(self) -> list[_Edge]:
        found = []
        for tensor in self._spec.tensors:
            if tensor.source is None or not tensor.num_bytes:
                continue
            output = _position(self._spaces[tensor.source].outputs, tensor.name)
            for target in dict.fromkeys(tensor.consumers):
                position = _position(self._spaces[target].inputs, tensor.name)
                found.append(
                    _Edge(tensor.source, output, target, position, tensor.num_bytes / max(_count(tensor.shape), 1))
                )
        return found

    def _own_bytes(self, operator: int, number: int, tiled: TiledOperator) -> float:
        """Partial sums, the number of operators, outputs that are joined on one device, and the weights that are held."""
        outputs = {tensor.name: tensor for tensor in self._spec.produced[operator]}
        space, moved = self._spaces[operator], 0.0
        for position, output in enumerate(space.outputs):
            tensor = outputs.get(output.name)
            if tensor is None:
                continue
            item_bytes = tensor.num_bytes / max(_count(tensor.shape), 1)
            moved += item_bytes * tiled.summed_elements
            if tensor.is_output:
                joined = self._traffic.number(Spread.whole(output.shape))
                moved += item_bytes * self._traffic.elements(self._traffic.number(tiled.writes(position)), joined)
        return (
            moved + self._weight_factor * self._held[operator][number] + _BYTES_PER_OPERATOR * (tiled.num_operators - 1)
        )

    def _held_bytes(self, operator: int, tiled: TiledOperator) -> int:
        """The weights of an operator on all devices that run its tiles."""
        used = [self._spec.parameters[index] for index in self._spec.operators[operator].parameters]
        sizes = {weight.name: weight.num_bytes for weight in used}
        return sum(
            sizes[read.name] * tiled.reads(position).elements // max(_count(read.shape), 1)
            for position, read in enumerate(self._spaces[operator].inputs)
            if read.name in sizes
        )


def _whole_space(spec: GraphSpec, operator: int) -> IndexSpace:
    """The index space of an operator that cannot be cut: it reads and writes whole tensors."""
    return IndexSpace(
        sizes=(),
        inputs=tuple(whole(tensor.name, tensor.shape) for tensor in spec.consumed[operator]),
        outputs=tuple(whole(tensor.name, tensor.shape) for tensor in spec.produced[operator]),
    )


def _position(operands: Sequence[Operand], name: str) -> int:
    return next(position for position, operand in enumerate(operands) if operand.name == name)


def _count(shape: tuple[int, ...]) -> int:
    return volume(tuple((0, size) for size in shape))
