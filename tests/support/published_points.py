"""Partition points of an operator graph by the rule of Parthasarathy and Krishnamachari (III-A)."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.plan.graph_spec import GraphSpec


def published_points(spec: GraphSpec) -> tuple[int, ...]:
    """Partition points by the paper's rule, for a graph with one source. Several sinks get a virtual one.

    u is the next point if no other operator has the same longest path length from the source (LP) and every path from the
    previous point goes through u (AP). Raises ValueError for several sources.
    """
    sources = [index for index, before in enumerate(spec.predecessors) if not before]
    if len(sources) != 1:
        raise ValueError(f"the rule is for one source; {spec.name} has {len(sources)}")
    virtual = spec.num_operators
    successors = [after or (virtual,) for after in spec.successors] + [()]
    longest = [0] * (virtual + 1)
    for operator, after in enumerate(successors):
        for each in after:
            longest[each] = max(longest[each], longest[operator] + 1)
    alone = {each for each in range(virtual) if longest.count(longest[each]) == 1}
    points = sources
    for operator in sorted(range(virtual), key=lambda each: (longest[each], each)):
        if operator in alone and operator not in points and _all_pass(successors, longest, points[-1], operator):
            points = [*points, operator]
    return tuple(points)


def _all_pass(successors: Sequence[Sequence[int]], longest: Sequence[int], start: int, goal: int) -> bool:
    """The paper's AP: depth first from `start`, no operator deeper than `goal` is reached before `goal`."""
    todo, seen = [start], {start}
    while todo:
        for each in successors[todo.pop()]:
            if each != goal and longest[each] > longest[goal]:
                return False
            if each != goal and each not in seen:
                seen.add(each)
                todo.append(each)
    return True
