"""Cut a graph, whose operators are assigned to devices, into segments that can run one after another. Pure.

A segment starts when all its inputs are available, and its outputs are available when all its operators are done. So the
segments must not depend on each other in a cycle. Both methods of cutting rule this out by construction:

- *fewest*: put the operators in a topological order in which operators of one device follow each other as long as
  possible; each run is a segment. Every acyclic grouping is the runs of some such order, so the fewest segments are the
  fewest runs. A run is always as long as possible (moving an operator into an earlier run of its device never adds a run).
  The next device is the one whose ready operators have the longest chain of device changes after them; every device is
  tried as the first, and the best order is kept. With two devices this is optimal: they alternate. With more it is a
  heuristic, since the problem then contains the shortest common supersequence problem.
- *eager*: no result that another device needs waits for an operator that it does not depend on, and no operator waits for
  a transfer that it does not need. Operators of one device are in one segment if and only if they depend on the same
  transfers and the same transfers depend on them. Proof that there is no cycle: along every path the first set never
  shrinks, and it grows with each transfer. Around a cycle it is therefore constant, so the cycle contains no transfer;
  the second set is then constant too, and the whole cycle lies in one segment.

Fewest suits pipelines, where devices are busy anyway; eager suits latency, where branches should overlap.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from coordinator.models.ordering import topological_order
from hearth.errors import BadPlan
from hearth.plan.graph import Segment
from hearth.plan.graph_spec import GraphSpec


def cut(
    spec: GraphSpec, assignment: Sequence[int], *, eager: bool = False, starts: Sequence[float] = ()
) -> tuple[Segment, ...]:
    """The segments in an order in which they can run; `assignment` is the rank of each operator.

    A device runs the first of the segments whose inputs it has. `starts`: the planned start of each operator; segments
    whose operators start earlier come first.

    By default as few segments as the search finds; with `eager`, no result waits for an operator that it does not depend
    on. Raises BadPlan if an operator has no rank.
    """
    if len(assignment) != spec.num_operators:
        raise BadPlan(reason=f"it places {len(assignment)} of {spec.num_operators} operators")
    if bad := [operator for operator, rank in enumerate(assignment) if rank < 0]:
        raise BadPlan(reason=f"operator {_name(spec, bad[0])} is on no device")
    groups = _eager_groups(spec, assignment) if eager else _fewest_groups(spec, assignment)
    if starts:
        groups.sort(key=lambda operators: min(starts[operator] for operator in operators))
    return group_segments(spec, groups, [assignment[operators[0]] for operators in groups])


def group_segments(spec: GraphSpec, groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of a given grouping, in the given order as far as dependencies allow; `ranks` has one for each group.

    Raises BadPlan for an operator that is in no group or in two, and for segments that depend on each other in a cycle.
    """
    where = _group_of(spec, groups)
    needs: list[dict[int, str]] = [{} for _ in groups]  # by group, the groups it depends on, with a tensor of each
    for tensor in spec.tensors:
        for consumer in tensor.consumers:
            if tensor.source is not None and where[consumer] != where[tensor.source]:
                needs[where[consumer]].setdefault(where[tensor.source], tensor.name)
    order = topological_order(needs)
    if len(order) < len(groups):
        raise BadPlan(reason=_describe_cycle(needs, set(range(len(groups))).difference(order), ranks))
    inputs, outputs = _boundaries(spec, where, len(groups))
    return tuple(
        Segment(
            operators=tuple(sorted(groups[index])),
            rank=ranks[index],
            inputs=tuple(inputs[index]),
            outputs=tuple(outputs[index]),
        )
        for index in order
    )


def check_segments(spec: GraphSpec, segments: Sequence[Segment]) -> None:
    """Check that the segments of a plan from a file are a cut of this graph. Raises BadPlan with the first fault."""
    rightly = group_segments(spec, [segment.operators for segment in segments], [segment.rank for segment in segments])
    by_operators = {segment.operators: segment for segment in rightly}
    for index, segment in enumerate(segments):
        expected = by_operators[tuple(sorted(segment.operators))]
        sides = (("takes", segment.inputs, expected.inputs), ("gives", segment.outputs, expected.outputs))
        for what, has, wants in sides:
            if wrong := sorted(set(has).symmetric_difference(wants)):
                name = wrong[0]
                fault = f"{what} {name}, which it does not in" if name in has else f"lacks {name}, which it {what} in"
                raise BadPlan(reason=f"segment {index} {fault} the graph {spec.name}")


def _eager_groups(spec: GraphSpec, assignment: Sequence[int]) -> list[list[int]]:
    """The groups of the eager method. Sets of transfers are bit masks; a transfer is a tensor sent to one other device."""
    arrives, departs = [0] * spec.num_operators, [0] * spec.num_operators
    bits: dict[tuple[str, int], int] = {}

    def transfer(tensor: str, source: int, target: int) -> int:
        if assignment[source] == assignment[target]:
            return 0
        return 1 << bits.setdefault((tensor, assignment[target]), len(bits))

    for operator in range(spec.num_operators):
        for tensor in spec.consumed[operator]:
            if tensor.source is not None:
                arrives[operator] |= arrives[tensor.source] | transfer(tensor.name, tensor.source, operator)
    for operator in reversed(range(spec.num_operators)):
        for tensor in spec.produced[operator]:
            for consumer in tensor.consumers:
                departs[operator] |= departs[consumer] | transfer(tensor.name, operator, consumer)
    groups: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for operator, rank in enumerate(assignment):
        groups[rank, arrives[operator], departs[operator]].append(operator)
    return list(groups.values())


def _fewest_groups(spec: GraphSpec, assignment: Sequence[int]) -> list[list[int]]:
    changes = [0] * spec.num_operators  # device changes on the worst path from an operator to the end
    for operator in reversed(range(spec.num_operators)):
        for successor in spec.successors[operator]:
            changed = assignment[operator] != assignment[successor]
            changes[operator] = max(changes[operator], changes[successor] + changed)
    first_ranks = sorted({assignment[operator] for operator, before in enumerate(spec.predecessors) if not before})
    return min((_runs(spec, assignment, changes, first) for first in first_ranks), key=len, default=[])


def _runs(spec: GraphSpec, assignment: Sequence[int], changes: Sequence[int], first: int) -> list[list[int]]:
    """An order of all operators, as runs of operators of one device; `first` is the rank of the first run."""
    waits_for = [len(before) for before in spec.predecessors]
    # By rank, the operators that can run now: those with most device changes after them first.
    ready: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def add(operator: int) -> None:
        heapq.heappush(ready[assignment[operator]], (-changes[operator], operator))

    for operator, count in enumerate(waits_for):
        if not count:
            add(operator)
    runs: list[list[int]] = []
    while any(ready.values()):
        rank = min((rank for rank in ready if ready[rank]), key=lambda rank: (ready[rank][0][0], rank))
        if not runs:
            rank = first
        runs.append([])
        while ready[rank]:
            _, operator = heapq.heappop(ready[rank])
            runs[-1].append(operator)
            for successor in spec.successors[operator]:
                waits_for[successor] -= 1
                if not waits_for[successor]:
                    add(successor)
    return runs


def _group_of(spec: GraphSpec, groups: Sequence[Sequence[int]]) -> list[int]:
    where = [-1] * spec.num_operators
    for index, operators in enumerate(groups):
        if not operators:
            raise BadPlan(reason=f"segment {index} is empty")
        for operator in operators:
            if not 0 <= operator < spec.num_operators:
                raise BadPlan(reason=f"operator {operator} does not exist: {spec.name} has {spec.num_operators}")
            if where[operator] >= 0:
                raise BadPlan(reason=f"operator {_name(spec, operator)} is in two segments")
            where[operator] = index
    if missing := [operator for operator, index in enumerate(where) if index < 0]:
        raise BadPlan(reason=f"operator {_name(spec, missing[0])} is in no segment")
    return where


def _describe_cycle(needs: Sequence[dict[int, str]], left: set[int], ranks: Sequence[int]) -> str:
    """Describe a cycle: follow dependencies among the groups that cannot be ordered, until a group is repeated."""
    path: list[int] = []
    index = min(left)
    while index not in path:
        path.append(index)
        index = min(other for other in needs[index] if other in left)
    path = path[path.index(index) :]
    steps = [
        f"segment {one} (rank {ranks[one]}) needs {needs[one][other]} of segment {other}"
        for one, other in zip(path, [*path[1:], path[0]], strict=True)
    ]
    return "its segments depend on each other in a cycle: " + ", ".join(steps)


def _boundaries(spec: GraphSpec, where: Sequence[int], num_groups: int) -> tuple[list[list[str]], list[list[str]]]:
    """By group, its input and output tensors, in the graph's order."""
    inputs: list[list[str]] = [[] for _ in range(num_groups)]
    outputs: list[list[str]] = [[] for _ in range(num_groups)]
    for tensor in spec.tensors:
        source = None if tensor.source is None else where[tensor.source]
        consumer_groups = {where[consumer] for consumer in tensor.consumers} - {source}
        for consumer_group in sorted(consumer_groups):
            if consumer_group is not None:
                inputs[consumer_group].append(tensor.name)
        if source is not None and (consumer_groups or tensor.is_output):
            outputs[source].append(tensor.name)
    return inputs, outputs


def _name(spec: GraphSpec, operator: int) -> str:
    return f"{operator} ({spec.operators[operator].name})"
