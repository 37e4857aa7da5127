"""Candidate partition points: where an operator graph can be cut into a pipeline (Parthasarathy and Krishnamachari, III-A).

A point is an operator on every path from the graph's main source to its main sink. The paper finds these by longest paths
and a depth-first search. Here they are the post-dominators of the source: the same set if there is one source and one
sink, and defined for other graphs too:

- with several sinks, the main one is the one that needs most of the graph; a side head stays with the block that feeds
  it, and its outputs cross no cut;
- with several sources, the main one is the one with most points after it. Tensors from other sources (BERT's mask) are
  side inputs: they are carried along with the boundary tensor as long as they are still needed;
- small integer tensors (shapes) never decide where a graph can be cut. They are carried along too.

Parallel branches contain no point, but they can still be cut between any two operators of a topological order; several
tensors then cross the cut. `fine_chain` includes these cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from coordinator.plan.graph.bits import reachable_sets, set_bits
from hearth.plan.graph_spec import GraphSpec, Tensor

# Integer tensors of up to this many bytes (128 of int64) carry shapes and indices, not activations.
_MAX_SHAPE_BYTES = 1024


class Chain(NamedTuple):
    """N blocks of operators, each ending with its point, and N - 1 cuts between them.

    `crossing[b]` are the tensors (indices into `spec.tensors`) that blocks after b need from block b and those before it:
    the boundary tensor, side inputs, and inputs of the graph. Each counts once, however many consumers it has.
    """

    points: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    crossing: tuple[tuple[int, ...], ...]

    def boundary_bytes(self, spec: GraphSpec) -> tuple[int, ...]:
        return tuple(sum(spec.tensors[index].num_bytes for index in crossing) for crossing in self.crossing)

    def adjacent_bytes(self, spec: GraphSpec) -> tuple[int, ...]:
        """Bytes across each cut of the tensors from the block just before it to the block just after it.

        These go from one stage to the next, whatever the stages are. Other tensors may skip stages, straight to their
        consumer.
        """
        block_of = {operator: index for index, block in enumerate(self.blocks) for operator in block}
        num_bytes_by_cut = [0] * len(self.crossing)
        for tensor in spec.tensors:
            if tensor.source is not None:
                source_block = block_of[tensor.source]
                if source_block + 1 in {block_of[consumer] for consumer in tensor.consumers}:
                    num_bytes_by_cut[source_block] += tensor.num_bytes
        return tuple(num_bytes_by_cut)


def candidate_chain(spec: GraphSpec) -> Chain:
    """The graph as a chain of blocks that end at its candidate points. A graph without points is one block.

    Every operator goes into the first block in which its inputs are available. Operators whose inputs are no larger than
    their results (a constant, a mask that is widened) instead go into the block of their first consumer.
    """
    points = candidate_points(spec)
    block, is_point = [0] * spec.num_operators, set(points)
    last = max(len(points) - 1, 0)
    for operator, before in enumerate(spec.predecessors):
        block[operator] = min(max((block[each] + (each in is_point) for each in before), default=0), last)
    main = _operators_between(spec, points)
    for operator in range(spec.num_operators - 1, -1, -1):
        after = spec.successors[operator]
        if operator not in main and after:
            input_bytes = sum(tensor.num_bytes for tensor in spec.consumed[operator])
            if input_bytes <= sum(tensor.num_bytes for tensor in spec.produced[operator]):
                block[operator] = min(block[each] for each in after)
    blocks: list[list[int]] = [[] for _ in range(last + 1)]
    for operator, index in enumerate(block):
        blocks[index].append(operator)
    return Chain(points, tuple(map(tuple, blocks)), _crossing_tensors(spec, block, last))


def fine_chain(spec: GraphSpec) -> Chain:
    """The graph as a chain of single operators: cut at its points, and between them across several tensors.

    Within a block, branches follow one another in an order that keeps few bytes alive: the next operator is the ready one
    that adds least to the tensors still needed.
    """
    order = [operator for block in candidate_chain(spec).blocks for operator in _low_memory_order(spec, block)]
    place = [0] * spec.num_operators
    for index, operator in enumerate(order):
        place[operator] = index
    num_cuts = max(len(order) - 1, 0)
    return Chain(tuple(order), tuple((operator,) for operator in order), _crossing_tensors(spec, place, num_cuts))


def candidate_points(spec: GraphSpec) -> tuple[int, ...]:
    """The operators, in order, on every path from the main source to the main sink, both included."""
    if not spec.num_operators:
        return ()
    successors = _data_successors(spec)
    sink = _main_sink(spec, successors)
    # Immediate post-dominators, with the sink as the root: the first operator common to all paths onwards.
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


def _low_memory_order(spec: GraphSpec, block: Sequence[int]) -> list[int]:
    inside = set(block)
    waits_for = {operator: sum(each in inside for each in spec.predecessors[operator]) for operator in block}
    tensors = {each.name: each for operator in block for each in (*spec.consumed[operator], *spec.produced[operator])}
    # Operators of this block that still need each tensor, plus one if other blocks need it: that one never dies here.
    needed = {
        name: sum(each in inside for each in tensor.consumers) + any(each not in inside for each in tensor.consumers)
        for name, tensor in tensors.items()
    }
    order: list[int] = []
    ready: dict[int, int] = {}  # the step since which it is ready
    # Among equals, the one that became ready last comes first: a branch is followed to its end. An operator has an entry
    # for each value that its bytes have had; they only get less, so that the newest entry comes first.
    queue: list[tuple[int, int, int]] = []

    def enqueue(operator: int) -> None:
        heappush(queue, (_added_bytes(spec, operator, needed), -ready[operator], operator))

    def make_ready(operators: Iterable[int]) -> None:
        for operator in operators:
            ready[operator] = len(order)
            enqueue(operator)

    make_ready(operator for operator in block if not waits_for[operator])
    while queue:
        operator = heappop(queue)[-1]
        if operator not in ready:
            continue
        del ready[operator]
        order.append(operator)
        for tensor in spec.consumed[operator]:
            needed[tensor.name] -= 1
            for last in tensor.consumers if needed[tensor.name] == 1 else ():
                if last in ready:
                    enqueue(last)
        after = [each for each in spec.successors[operator] if each in inside]
        for each in after:
            waits_for[each] -= 1
        make_ready(each for each in after if not waits_for[each])
    return order


def _added_bytes(spec: GraphSpec, operator: int, needed: Mapping[str, int]) -> int:
    new_bytes = sum(tensor.num_bytes for tensor in spec.produced[operator] if tensor.consumers)
    return new_bytes - sum(tensor.num_bytes for tensor in spec.consumed[operator] if needed[tensor.name] == 1)


def _crossing_tensors(spec: GraphSpec, block: Sequence[int], num_cuts: int) -> tuple[tuple[int, ...], ...]:
    crossing: list[list[int]] = [[] for _ in range(num_cuts)]
    for index, tensor in enumerate(spec.tensors):
        if tensor.consumers:
            source_block = 0 if tensor.source is None else block[tensor.source]
            for cut in range(source_block, max(block[consumer] for consumer in tensor.consumers)):
                crossing[cut].append(index)
    return tuple(map(tuple, crossing))


def _data_successors(spec: GraphSpec) -> list[tuple[int, ...]]:
    """By operator, the consumers of its activations; shape tensors do not count."""
    return [
        tuple(sorted({consumer for tensor in tensors if not _is_shape(tensor) for consumer in tensor.consumers}))
        for tensors in spec.produced
    ]


def _is_shape(tensor: Tensor) -> bool:
    return tensor.num_bytes <= _MAX_SHAPE_BYTES and tensor.dtype.startswith(("int", "uint", "bool"))


def _main_sink(spec: GraphSpec, successors: Sequence[tuple[int, ...]]) -> int:
    """The operator without successors that depends on most operators; the last of equals. Sinks of activations first."""
    needed = [1 << operator for operator in range(spec.num_operators)]
    for operator, after in enumerate(successors):
        for each in after:
            needed[each] |= needed[operator]
    carries = [any(not _is_shape(tensor) for tensor in tensors) for tensors in spec.produced]
    sinks = [each for each in range(spec.num_operators) if not successors[each]]
    return max(sinks, key=lambda each: (carries[each], needed[each].bit_count(), each))


def _operators_between(spec: GraphSpec, points: Sequence[int]) -> set[int]:
    """The operators on paths from the first point to the last."""
    if not points:
        return set()
    first, last = points[0], points[-1]
    after = reachable_sets(spec.successors, reversed(range(spec.num_operators)))[first] | 1 << first
    before = reachable_sets(spec.predecessors, range(spec.num_operators))[last] | 1 << last
    return set(set_bits(after & before))
