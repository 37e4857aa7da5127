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
from typing import NamedTuple

from coordinator.plan.graph.throughput.baselines import joint_stages, random_stages
from coordinator.plan.graph.throughput.exact import Answer, best_stages, relaxed_bound
from coordinator.plan.graph.throughput.points import candidate_chain, fine_chain
from coordinator.plan.graph.throughput.problem import (
    Matrix,
    PipelinePlacement,
    PipelineProblem,
    Stage,
    Stages,
    pipeline_problem,
)
from coordinator.plan.graph.throughput.published import published_stages
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec

__all__ = [
    "PLANNERS", "PipelinePlacement", "PipelineProblem", "Planner", "SearchOptions", "pipeline_problem", "plan_pipeline",
]  # fmt: skip


class SearchOptions(NamedTuple):
    """`clock` returns seconds; the search ends when `time_limit_seconds` have passed on it. `seed` makes it repeatable."""

    time_limit_seconds: float
    seed: int
    clock: Callable[[], float]


# Raises ModelDoesNotFit.
Planner = Callable[[PipelineProblem, SearchOptions], PipelinePlacement]


def plan_pipeline(
    spec: GraphSpec,
    seconds: Matrix,
    memory_bytes: Sequence[int],
    rate: Matrix,
    strategy: str,
    options: SearchOptions,
) -> PipelinePlacement:
    """A graph on K devices by one of `PLANNERS`; the rest as in `pipeline_problem`. Raises ModelDoesNotFit.

    The bottleneck counts what crosses a cut at that cut; on devices some of it goes past the next stage, straight to where
    it is taken. So that no pipeline of these cuts is below the bound on devices either, it counts only what cannot.
    `stages` of `pipeline-exact` count operators (of `fine_chain`), those of the others blocks.
    """
    coarse = pipeline_problem(spec, seconds, memory_bytes, rate, chain=candidate_chain(spec))
    chain = fine_chain(spec)
    fine = pipeline_problem(spec, seconds, memory_bytes, rate, chain=chain)
    least = replace(fine, boundary_bytes=tuple(map(float, chain.adjacent_bytes(spec))))
    if strategy != "pipeline-exact":
        placed = PLANNERS[strategy](coarse, options)
        bound = relaxed_bound(least, refined(coarse, placed.stages))
    else:
        began = options.clock()
        try:
            known = [refined(coarse, published_stages(coarse, Random(options.seed)))]
        except ModelDoesNotFit:
            known = []
        placed = plan_exact(fine, options, known)
        left = options._replace(time_limit_seconds=began + options.time_limit_seconds - options.clock())
        bound = plan_exact(least, left, [placed.stages]).bound_seconds
        placed = replace(placed, planning_seconds=options.clock() - began)
    bound = min(bound, placed.bottleneck_seconds)
    return replace(placed, bound_seconds=bound, proven_optimal=bound >= placed.bottleneck_seconds)


def refined(coarse: PipelineProblem, stages: Stages) -> Stages:
    """The same stages on a chain of the same operators, each a block of its own."""
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    return tuple(Stage(ends[stage.first], ends[stage.last + 1] - 1, stage.device) for stage in stages)


def plan_published(problem: PipelineProblem, options: SearchOptions) -> PipelinePlacement:
    return _timed(problem, lambda: published_stages(problem, Random(options.seed)), options.clock)


def plan_exact(problem: PipelineProblem, options: SearchOptions, known: Sequence[Stages] = ()) -> PipelinePlacement:
    """Never worse than the `known` ones. Without any it starts from, and is never worse than, `pipeline` with this seed."""
    began = options.clock()
    deadline = began + options.time_limit_seconds
    answer = best_stages(problem, Random(options.seed), lambda: options.clock() > deadline, known)
    return _placement(problem, answer, options.clock() - began)


def plan_random(problem: PipelineProblem, options: SearchOptions) -> PipelinePlacement:
    return _timed(problem, lambda: random_stages(problem, Random(options.seed)), options.clock)


def plan_joint(problem: PipelineProblem, options: SearchOptions) -> PipelinePlacement:
    return _timed(problem, lambda: joint_stages(problem), options.clock)


PLANNERS: dict[str, Planner] = {
    "pipeline": plan_published,
    "pipeline-exact": plan_exact,
    "random": plan_random,
    "joint": plan_joint,
}


def _timed(problem: PipelineProblem, search: Callable[[], Stages], clock: Callable[[], float]) -> PipelinePlacement:
    """The bound is computed afterwards, so its time does not count as the planner's."""
    began = clock()
    stages = search()
    seconds = clock() - began
    return _placement(problem, Answer(stages, relaxed_bound(problem, stages)), seconds)


def _placement(problem: PipelineProblem, answer: Answer, seconds: float) -> PipelinePlacement:
    problem.check(answer.stages)
    bottleneck = problem.bottleneck_seconds(answer.stages)
    bound = min(answer.bound_seconds, bottleneck)
    return PipelinePlacement(
        stages=answer.stages,
        assignment=problem.assignment(answer.stages),
        bottleneck_seconds=bottleneck,
        bound_seconds=bound,
        proven_optimal=bound >= bottleneck,
        planning_seconds=seconds,
    )
