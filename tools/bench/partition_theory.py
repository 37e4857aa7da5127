"""Published rules of Parthasarathy and Krishnamachari, for comparison with Hearth's planners.

Their rule for partition points, their bound (Theorem 1) and their notebook's version of the joint baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.graph.throughput.baselines import fastest_neighbour
from coordinator.plan.graph.throughput.partitions import Partitioning
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages, stages_from
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


def nearest_stages(problem: PipelineProblem, partitioning: Partitioning, devices: Sequence[int]) -> Stages:
    """The joint baseline: place these partitions along a greedy path, which always takes the fastest link to an unused device.

    Tries every start device and returns the placement with the lowest bottleneck. Each of `devices` must be able to hold any
    partition, and there must be at least as many as partitions. In the paper (section IV), joint chooses its partitions
    greedily; in the authors' notebook it uses those of Algorithm 1.
    """
    found = []
    for start in devices:
        path, unused = [start], set(devices) - {start}
        while len(path) < len(partitioning.last):
            path.append(fastest_neighbour(problem, path[-1], unused))
            unused.remove(path[-1])
        found.append(stages_from(partitioning.last, path))
    return min(found, key=problem.bottleneck_seconds)


def theorem_bound(problem: PipelineProblem, partitioning: Partitioning) -> float:
    """Theorem 1: the largest transfer over the fastest link; 0 for one partition.

    A lower bound for placements of these partitions, but not for other partitions.
    """
    return max(partitioning.transfers) / float(problem.link_rates.max()) if partitioning.transfers else 0.0


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
