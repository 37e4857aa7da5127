"""What the paper says about its throughput planner, for comparison with what is planned: its own rule for partition points,
its bound (Theorem 1), its notebook's form of the joint baseline (Parthasarathy and Krishnamachari); a check of pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.graph.throughput.baselines import nearest
from coordinator.plan.graph.throughput.partitions import Partitioning
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages, stages_at
from hearth.plan.graph_spec import GraphSpec


def published_points(spec: GraphSpec) -> tuple[int, ...]:
    """The paper's own rule, for a graph of one source: u is the next point iff no other operator has its longest path from
    the source (LP) and every path out of the point before goes through it (AP). Several sinks get a virtual one.

    Raises ValueError for several sources.
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
    """These partitions, along the path from each device that always takes the fastest link to an unused one. The start
    with the lowest bottleneck wins. `devices` can each hold any partition, and are as many or more.

    The paper's words (IV) let joint choose its partitions greedily; its authors' notebook gives it those of Algorithm 1.
    """
    found = []
    for start in devices:
        path, unused = [start], set(devices) - {start}
        while len(path) < len(partitioning.last):
            path.append(nearest(problem, path[-1], unused))
            unused.remove(path[-1])
        found.append(stages_at(partitioning.last, path))
    return min(found, key=problem.bottleneck_seconds)


def theorem_bound(problem: PipelineProblem, partitioning: Partitioning) -> float:
    """Theorem 1: the largest transfer over the fastest link. No placement of these partitions is below it; one of other
    partitions may be. 0 for one partition."""
    return max(partitioning.transfers) / float(problem.link_rates.max()) if partitioning.transfers else 0.0


def check_stages(problem: PipelineProblem, stages: Stages) -> None:
    """Raises ValueError unless the stages are a pipeline: each block once, in order, each device once, within memory."""
    if [stage.first for stage in stages] != [0, *(stage.last + 1 for stage in stages[:-1])]:
        raise ValueError("the stages leave out blocks or run them twice")
    if not stages or stages[-1].last != problem.num_blocks - 1:
        raise ValueError("the last block is in no stage")
    if any(stage.last < stage.first for stage in stages):
        raise ValueError("a stage is empty")
    if len({stage.device for stage in stages}) != len(stages):
        raise ValueError("a device has two stages")
    for stage in stages:
        if problem.stage_bytes[stage.first, stage.last] > problem.memory_bytes[stage.device]:
            raise ValueError(f"blocks {stage.first} to {stage.last} do not fit on device {stage.device}")


def _all_pass(successors: Sequence[Sequence[int]], longest: Sequence[int], start: int, goal: int) -> bool:
    """The paper's AP: from `start`, depth first, no operator deeper than `goal` is met before `goal`."""
    todo, seen = [start], {start}
    while todo:
        for each in successors[todo.pop()]:
            if each != goal and longest[each] > longest[goal]:
                return False
            if each != goal and each not in seen:
                seen.add(each)
                todo.append(each)
    return True
