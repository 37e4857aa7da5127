"""Planners of throughput pipelines, by name: what `hearth plan --objective throughput --strategy NAME` calls.

The published planner and its baselines cut a graph where a single operator carries all (`candidate_chain`), as the paper
has it; `pipeline-exact` cuts it also where several tensors pass (`fine_chain`), of which the former are a part.

pipeline        as published (published)
pipeline-exact  the lowest bottleneck of compute and transfers, proven where time allows (exact)
random, joint   the paper's baselines (baselines)

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from coordinator.plan.graph.throughput.baselines import joint_stages, random_stages
from coordinator.plan.graph.throughput.exact import best_stages, relaxed_bound
from coordinator.plan.graph.throughput.points import candidate_chain, fine_chain
from coordinator.plan.graph.throughput.problem import Matrix, PipelineProblem, Stage, Stages, pipeline_problem
from coordinator.plan.graph.throughput.published import published_stages
from coordinator.plan.solution import Assigned, SearchOptions, Solution
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec

EXACT = "pipeline-exact"
# Those that cut at single operators. Raise ModelDoesNotFit.
PUBLISHED: Mapping[str, Callable[[PipelineProblem, Random], Stages]] = {
    "pipeline": published_stages,
    "random": random_stages,
    "joint": lambda problem, chance: joint_stages(problem),
}


def plan_pipeline(
    spec: GraphSpec, seconds: Matrix, memory_bytes: Sequence[int], rate: Matrix, strategy: str, options: SearchOptions
) -> Solution[Assigned]:
    """The device of each operator, by `EXACT` or one of `PUBLISHED`; the rest as in `pipeline_problem`.

    The bottleneck counts what crosses a cut at that cut; on devices some of it goes past the next stage, straight to where
    it is taken. So that no pipeline of these cuts is below the bound on devices either, it counts only what cannot.
    `pipeline-exact` is never worse than `pipeline` with the same seed. Raises ModelDoesNotFit.
    """
    chain = fine_chain(spec)
    coarse = pipeline_problem(spec, seconds, memory_bytes, rate, candidate_chain(spec))
    fine = pipeline_problem(spec, seconds, memory_bytes, rate, chain)
    least = replace(fine, boundary_bytes=tuple(map(float, chain.adjacent_bytes(spec))))
    began = options.clock()

    def stop() -> bool:
        return options.clock() > began + options.time_limit_seconds

    if strategy == EXACT:
        try:
            known = [refined(coarse, published_stages(coarse, Random(options.seed)))]
        except ModelDoesNotFit:
            known = []
        problem, stages = fine, best_stages(fine, Random(options.seed), stop, known).assignment
        bound = best_stages(least, Random(options.seed), stop, [stages]).bound
        took = options.clock() - began
    else:
        problem, stages = coarse, PUBLISHED[strategy](coarse, Random(options.seed))
        took = options.clock() - began  # without the bound, which these do not give themselves
        bound = relaxed_bound(least, refined(coarse, stages))
    value = problem.bottleneck_seconds(stages)
    bound = min(bound, value)
    return Solution(Assigned(problem.assignment(stages)), value, bound, bound >= value, took)


def refined(coarse: PipelineProblem, stages: Stages) -> Stages:
    """The same stages on a chain of the same operators, each a block of its own."""
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    return tuple(Stage(ends[stage.first], ends[stage.last + 1] - 1, stage.device) for stage in stages)
