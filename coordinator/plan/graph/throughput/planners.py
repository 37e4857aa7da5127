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
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from coordinator.plan.graph.throughput.baselines import joint_stages, random_stages
from coordinator.plan.graph.throughput.exact import best_stages, relaxed_bound
from coordinator.plan.graph.throughput.points import candidate_chain, fine_chain
from coordinator.plan.graph.throughput.problem import (
    Matrix,
    PipelineProblem,
    Stage,
    Stages,
    pipeline_problem,
)
from coordinator.plan.graph.throughput.published import published_stages
from coordinator.plan.solution import SearchOptions, Solution
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec

__all__ = [
    "PLANNERS", "PipelineProblem", "Planner", "SearchOptions", "pipeline_problem", "plan_pipeline",
]  # fmt: skip


# Raises ModelDoesNotFit.
Planner = Callable[[PipelineProblem, SearchOptions], Solution[Stages]]


def plan_pipeline(
    spec: GraphSpec,
    seconds: Matrix,
    memory_bytes: Sequence[int],
    rate: Matrix,
    strategy: str,
    options: SearchOptions,
) -> Solution[tuple[int, ...]]:
    """The device of each operator, by one of `PLANNERS`; the rest as in `pipeline_problem`. Raises ModelDoesNotFit.

    The bottleneck counts what crosses a cut at that cut; on devices some of it goes past the next stage, straight to where
    it is taken. So that no pipeline of these cuts is below the bound on devices either, it counts only what cannot.
    """
    coarse = pipeline_problem(spec, seconds, memory_bytes, rate, chain=candidate_chain(spec))
    chain = fine_chain(spec)
    fine = pipeline_problem(spec, seconds, memory_bytes, rate, chain=chain)
    least = replace(fine, boundary_bytes=tuple(map(float, chain.adjacent_bytes(spec))))
    if strategy != "pipeline-exact":
        problem, placed = coarse, PLANNERS[strategy](coarse, options)
        bound = relaxed_bound(least, refined(coarse, placed.assignment))
    else:
        began = options.clock()
        try:
            known = [refined(coarse, published_stages(coarse, Random(options.seed)))]
        except ModelDoesNotFit:
            known = []
        problem, placed = fine, plan_exact(fine, options, known)
        left = options._replace(time_limit_seconds=began + options.time_limit_seconds - options.clock())
        bound = plan_exact(least, left, [placed.assignment]).bound
        placed = replace(placed, seconds=options.clock() - began)
    bound = min(bound, placed.value)
    return Solution(problem.assignment(placed.assignment), placed.value, bound, bound >= placed.value, placed.seconds)


def refined(coarse: PipelineProblem, stages: Stages) -> Stages:
    """The same stages on a chain of the same operators, each a block of its own."""
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    return tuple(Stage(ends[stage.first], ends[stage.last + 1] - 1, stage.device) for stage in stages)


def plan_published(problem: PipelineProblem, options: SearchOptions) -> Solution[Stages]:
    return _timed(problem, lambda: published_stages(problem, Random(options.seed)), options.clock)


def plan_exact(problem: PipelineProblem, options: SearchOptions, known: Sequence[Stages] = ()) -> Solution[Stages]:
    """Never worse than the `known` ones. Without any it starts from, and is never worse than, `pipeline` with this seed."""
    began = options.clock()
    deadline = began + options.time_limit_seconds
    best = best_stages(problem, Random(options.seed), lambda: options.clock() > deadline, known)
    return _checked(problem, best.assignment, best.bound, options.clock() - began)


def plan_random(problem: PipelineProblem, options: SearchOptions) -> Solution[Stages]:
    return _timed(problem, lambda: random_stages(problem, Random(options.seed)), options.clock)


def plan_joint(problem: PipelineProblem, options: SearchOptions) -> Solution[Stages]:
    return _timed(problem, lambda: joint_stages(problem), options.clock)


PLANNERS: dict[str, Planner] = {
    "pipeline": plan_published,
    "pipeline-exact": plan_exact,
    "random": plan_random,
    "joint": plan_joint,
}


def _timed(problem: PipelineProblem, search: Callable[[], Stages], clock: Callable[[], float]) -> Solution[Stages]:
    """The bound is computed afterwards, so its time does not count as the planner's."""
    began = clock()
    stages = search()
    seconds = clock() - began
    return _checked(problem, stages, relaxed_bound(problem, stages), seconds)


def _checked(problem: PipelineProblem, stages: Stages, bound: float, seconds: float) -> Solution[Stages]:
    problem.check(stages)
    bottleneck = problem.bottleneck_seconds(stages)
    bound = min(bound, bottleneck)
    return Solution(stages, bottleneck, bound, bound >= bottleneck, seconds)
