"""From an assignment of operators to devices to segments that can run one after another. Pure.

A segment starts when all its inputs are there and gives its outputs when all its operators are done, so segments may not
need each other in a circle. Both ways of cutting here rule that out by construction:

- *fewest*: operators are put in one order in which they can run, a device's operators following each other as long as
  possible; each run is a segment. Every cycle-free grouping is the runs of some such order, so the fewest segments are the
  fewest runs. A run is always as long as it can be (an operator moved into an earlier run of its device never adds one).
  Which device comes next is decided by the longest chain of device changes that waits behind its operators; every device
  is tried as the first, and the best order kept. With two devices that is optimal: they alternate. With more it is a
  heuristic, as the problem then contains the shortest common supersequence.
- *eager*: no result that another device needs waits for an operator that it does not depend on, and no operator waits for
  a transfer that it does not need. Operators of one device are together iff they depend on the same transfers and the same
  transfers depend on them. Along every path the former set never shrinks, and grows with each transfer, so it
  is the same all around a cycle, which then has no transfer in it, and one set of the second kind: it is one segment.

Fewest suits pipelines, where devices are busy anyway; eager suits latency, where branches shall overlap.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from coordinator.models.ordering import topological_order
from hearth.errors import BadPlan
from hearth.plan.graph import Segment
from hearth.plan.graph_spec import GraphSpec


def cut(spec: GraphSpec, assignment: Sequence[int], *, eager: bool = False) -> tuple[Segment, ...]:
    """Segments in an order in which they can run; `assignment` gives each operator's rank.

    As few as possible; with `eager`, no result waits for an operator that it does not depend on.
    Raises BadPlan when an operator has no rank.
    """
    if len(assignment) != spec.num_operators:
        raise BadPlan(reason=f"it places {len(assignment)} of {spec.num_operators} operators")
    if bad := [operator for operator, rank in enumerate(assignment) if rank < 0]:
        raise BadPlan(reason=f"operator {_name(spec, bad[0])} is on no device")
    groups = _eager_groups(spec, assignment) if eager else _fewest_groups(spec, assignment)
    return group(spec, groups, [assignment[operators[0]] for operators in groups])


def group(spec: GraphSpec, groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of a given grouping, in the given order as far as they can run in it; `ranks` has one for each group.

    Raises BadPlan for an operator that stands nowhere or twice, and for segments that need each other, with the cycle.
    """
    where = _group_of(spec, groups)
    needs: list[dict[int, str]] = [{} for _ in groups]  # by group, those it depends on, with a tensor of each
    for tensor in spec.tensors:
        for consumer in tensor.consumers:
            if tensor.source is not None and where[consumer] != where[tensor.source]:
                needs[where[consumer]].setdefault(where[tensor.source], tensor.name)
    order = topological_order(needs)
    if len(order) < len(groups):
        raise BadPlan(reason=_cycle(needs, set(range(len(groups))).difference(order), ranks))
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
    """That segments (of a plan from a file) are a cut of this graph. Raises BadPlan with the first thing that is not."""
    rightly = group(spec, [segment.operators for segment in segments], [segment.rank for segment in segments])
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
    """Sets of transfers are bits of an integer; a transfer is a tensor on its way to one other device."""
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
    changes = [0] * spec.num_operators  # on the worst path from an operator to the end
    for operator in reversed(range(spec.num_operators)):
        for successor in spec.successors[operator]:
            changed = assignment[operator] != assignment[successor]
            changes[operator] = max(changes[operator], changes[successor] + changed)
    first_ranks = sorted({assignment[operator] for operator, before in enumerate(spec.predecessors) if not before})
    return min((_runs(spec, assignment, changes, first) for first in first_ranks), key=len, default=[])


def _runs(spec: GraphSpec, assignment: Sequence[int], changes: Sequence[int], first: int) -> list[list[int]]:
    """An order of all operators, as the runs of operators of one device; `first` names the device of the first run."""
    waits_for = [len(before) for before in spec.predecessors]
    # By rank, what can run now: most changes behind it first.
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
                raise BadPlan(reason=f"operator {_name(spec, operator)} stands in two segments")
            where[operator] = index
    if missing := [operator for operator, index in enumerate(where) if index < 0]:
        raise BadPlan(reason=f"operator {_name(spec, missing[0])} stands in no segment")
    return where


def _cycle(needs: Sequence[dict[int, str]], left: set[int], ranks: Sequence[int]) -> str:
    """Follow needs among the groups that cannot be ordered, until one comes again."""
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
    return "its segments need each other in a circle: " + ", ".join(steps)


def _boundaries(spec: GraphSpec, where: Sequence[int], num_groups: int) -> tuple[list[list[str]], list[list[str]]]:
    """By group, the tensors that it takes and gives, in the graph's order."""
    inputs: list[list[str]] = [[] for _ in range(num_groups)]
    outputs: list[list[str]] = [[] for _ in range(num_groups)]
    for tensor in spec.tensors:
        source = None if tensor.source is None else where[tensor.source]
        takers = {where[consumer] for consumer in tensor.consumers} - {source}
        for taker in sorted(takers):
            if taker is not None:
                inputs[taker].append(tensor.name)
        if source is not None and (takers or tensor.is_output):
            outputs[source].append(tensor.name)
    return inputs, outputs


def _name(spec: GraphSpec, operator: int) -> str:
    return f"{operator} ({spec.operators[operator].name})"
