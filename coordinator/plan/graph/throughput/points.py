"""Where a graph of operators can be cut into a pipeline: candidate partition points (Parthasarathy and Krishnamachari, III-A).

A point is an operator through which every path from the graph's main source to its main sink goes. The paper finds these
by longest paths and a depth-first search; here they are the post-dominators of the source, which is the same set where
there is one source and one sink, and reaches further:

- with several sinks the main one is the one that needs most of the graph; a head on the side stays with the block that
  feeds it, and its outputs cross no cut;
- with several sources the main one is the one with most points after it. What does not come from it (BERT's mask) is a
  side input: its tensors are carried along with the boundary tensor wherever they are still needed;
- small integer tensors (shapes) never decide where a graph can be cut. They are carried along too.

Where branches run side by side there is no point, and yet there are cuts: between any two operators of an order in which
they can run, across which several tensors pass. `fine_chain` has these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.plan.graph.bits import members, reached
from hearth.plan.graph_spec import GraphSpec, Tensor

# Integers up to this size carry shapes and indices of a graph, not activations.
_SHAPE_BYTES = 1024


class Chain(NamedTuple):
    """N blocks of operators, each ending with its point, and N - 1 cuts between them.

    `crossing[b]` are the tensors (indices into `spec.tensors`) that blocks after b need from block b and those before it:
    the boundary tensor, side inputs, and inputs of the graph. Each is counted once, however many operators take it.
    """

    points: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    crossing: tuple[tuple[int, ...], ...]

    def boundary_bytes(self, spec: GraphSpec) -> tuple[int, ...]:
        return tuple(sum(spec.tensors[index].num_bytes for index in crossing) for crossing in self.crossing)

    def adjacent_bytes(self, spec: GraphSpec) -> tuple[int, ...]:
        """Of them, those that the block before a cut makes and the one after it takes: they go from the one stage to the
        other, whatever stages there are. The rest may go past the next stage, straight to the one that takes it."""
        block_of = {operator: index for index, block in enumerate(self.blocks) for operator in block}
        found = [0] * len(self.crossing)
        for tensor in spec.tensors:
            if tensor.source is not None:
                made = block_of[tensor.source]
                if made + 1 in {block_of[consumer] for consumer in tensor.consumers}:
                    found[made] += tensor.num_bytes
        return tuple(found)


def candidate_chain(spec: GraphSpec) -> Chain:
    """The graph as a chain of blocks at its candidate points. A graph without any is one block.

    Every operator goes into the first block in which all that it needs is there; only operators that are no heavier to
    bring than their results (a constant, a mask that is widened) wait for the first that takes them.
    """
    points = candidate_points(spec)
    block, is_point = [0] * spec.num_operators, set(points)
    last = max(len(points) - 1, 0)
    for operator, before in enumerate(spec.predecessors):
        block[operator] = min(max((block[each] + (each in is_point) for each in before), default=0), last)
    main = _between(spec, points)
    for operator in range(spec.num_operators - 1, -1, -1):
        after = spec.successors[operator]
        if operator not in main and after:
            taken = sum(tensor.num_bytes for tensor in spec.consumed[operator])
            if taken <= sum(tensor.num_bytes for tensor in spec.produced[operator]):
                block[operator] = min(block[each] for each in after)
    blocks: list[list[int]] = [[] for _ in range(last + 1)]
    for operator, index in enumerate(block):
        blocks[index].append(operator)
    return Chain(points, tuple(map(tuple, blocks)), _crossing(spec, block, last))


def fine_chain(spec: GraphSpec) -> Chain:
    """The graph as a chain of single operators: cut at its points, and between them across several tensors.

    In a block one branch follows the other, in the order that keeps little alive: of the operators that can run the one
    next that adds least to what is still needed.
    """
    order = [operator for block in candidate_chain(spec).blocks for operator in _thrifty(spec, block)]
    place = [0] * spec.num_operators
    for index, operator in enumerate(order):
        place[operator] = index
    num_cuts = max(len(order) - 1, 0)
    return Chain(tuple(order), tuple((operator,) for operator in order), _crossing(spec, place, num_cuts))


def candidate_points(spec: GraphSpec) -> tuple[int, ...]:
    """The operators, in order, that are on every path from the main source to the main sink; both of these included."""
    if not spec.num_operators:
        return ()
    successors = _data_successors(spec)
    sink = _main_sink(spec, successors)
    # Immediate post-dominators with the sink as the root: what all ways on have in common.
    parent, depth = {sink: sink}, {sink: 0}
    for operator in range(sink - 1, -1, -1):
        after = [each for each in successors[operator] if each in depth]
        if not after:
            continue
        meeting = after[0]
        for other in after[1:]:
            while meeting != other:
                if depth[meeting] >= depth[other]:
                    meeting = parent[meeting]
                else:
                    other = parent[other]
        parent[operator], depth[operator] = meeting, depth[meeting] + 1
    fed = {each for operator in depth for each in successors[operator]}
    point = min((operator for operator in depth if operator not in fed), key=lambda each: (-depth[each], each))
    points = [point]
    while point != sink:
        point = parent[point]
        points.append(point)
    return tuple(points)


def _thrifty(spec: GraphSpec, block: Sequence[int]) -> list[int]:
    inside = set(block)
    waits_for = {operator: sum(each in inside for each in spec.predecessors[operator]) for operator in block}
    # Operators of this block that still need each tensor; one that others need too never dies here.
    needed = {
        tensor.name: sum(each in inside for each in tensor.consumers)
        + any(each not in inside for each in tensor.consumers)
        for operator in block
        for tensor in (*spec.consumed[operator], *spec.produced[operator])
    }
    order: list[int] = []
    ready = {operator: 0 for operator in block if not waits_for[operator]}  # since which step
    while ready:
        # Of equals the one that could not run for longest: a branch is followed to its end.
        operator = min(ready, key=lambda each: (_added_bytes(spec, each, needed), -ready[each], each))
        del ready[operator]
        order.append(operator)
        for tensor in spec.consumed[operator]:
            needed[tensor.name] -= 1
        for after in spec.successors[operator]:
            if after in inside:
                waits_for[after] -= 1
                if not waits_for[after]:
                    ready[after] = len(order)
    return order


def _added_bytes(spec: GraphSpec, operator: int, needed: Mapping[str, int]) -> int:
    made = sum(tensor.num_bytes for tensor in spec.produced[operator] if tensor.consumers)
    return made - sum(tensor.num_bytes for tensor in spec.consumed[operator] if needed[tensor.name] == 1)


def _crossing(spec: GraphSpec, block: Sequence[int], num_cuts: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(num_cuts)]
    for index, tensor in enumerate(spec.tensors):
        if tensor.consumers:
            made = 0 if tensor.source is None else block[tensor.source]
            for cut in range(made, max(block[consumer] for consumer in tensor.consumers)):
                found[cut].append(index)
    return tuple(map(tuple, found))


def _data_successors(spec: GraphSpec) -> list[tuple[int, ...]]:
    """By operator, who takes its activations; shapes do not count."""
    return [
        tuple(sorted({consumer for tensor in tensors if not _is_shape(tensor) for consumer in tensor.consumers}))
        for tensors in spec.produced
    ]


def _is_shape(tensor: Tensor) -> bool:
    return tensor.num_bytes <= _SHAPE_BYTES and tensor.dtype.startswith(("int", "uint", "bool"))


def _main_sink(spec: GraphSpec, successors: Sequence[tuple[int, ...]]) -> int:
    """The operator without successors that needs most others; of several the last."""
    needed = [1 << operator for operator in range(spec.num_operators)]
    for operator, after in enumerate(successors):
        for each in after:
            needed[each] |= needed[operator]
    carries = [any(not _is_shape(tensor) for tensor in tensors) for tensors in spec.produced]
    sinks = [each for each in range(spec.num_operators) if not successors[each]]
    return max(sinks, key=lambda each: (carries[each], needed[each].bit_count(), each))


def _between(spec: GraphSpec, points: Sequence[int]) -> set[int]:
    """The operators on ways from the first point to the last."""
    if not points:
        return set()
    first, last = points[0], points[-1]
    after = reached(spec.successors, reversed(range(spec.num_operators)))[first] | 1 << first
    before = reached(spec.predecessors, range(spec.num_operators))[last] | 1 << last
    return set(members(after & before))
