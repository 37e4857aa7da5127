"""Planners of throughput pipelines, by name: what `hearth plan --objective throughput --strategy NAME` calls.

The published planner and its baselines cut a graph where a single operator carries all (`candidate_chain`), as the paper
has it; `pipeline-exact` cuts it also where several tensors pass (`fine_chain`), of which the former are a part.

pipeline        as published (pipeline_published)
pipeline-exact  the lowest bottleneck of compute and transfers, proven where time allows (pipeline_exact)
random, joint   the paper's baselines (pipeline_baselines)
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

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

__all__ = ["PLANNERS", "PipelinePlacement", "PipelineProblem", "Planner", "pipeline_problem", "plan_pipeline"]

# Of a problem, a time limit in seconds and a seed. Raises ModelDoesNotFit.
Planner = Callable[[PipelineProblem, float, int], PipelinePlacement]


def plan_pipeline(
    spec: GraphSpec,
    seconds: Matrix,
    memory_bytes: Sequence[int],
    rate: Matrix,
    strategy: str,
    time_limit: float,
    seed: int,
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
        placed = PLANNERS[strategy](coarse, time_limit, seed)
        bound = relaxed_bound(least, refined(coarse, placed.stages))
    else:
        began = time.perf_counter()
        try:
            known = [refined(coarse, published_stages(coarse, random.Random(seed)))]
        except ModelDoesNotFit:
            known = []
        placed = plan_exact(fine, time_limit, seed, known)
        left = began + time_limit - time.perf_counter()
        bound = plan_exact(least, left, seed, [placed.stages]).bound_seconds
        placed = replace(placed, planning_seconds=time.perf_counter() - began)
    bound = min(bound, placed.bottleneck_seconds)
    return replace(placed, bound_seconds=bound, proven_optimal=bound >= placed.bottleneck_seconds)


def refined(coarse: PipelineProblem, stages: Stages) -> Stages:
    """The same stages on a chain of the same operators, each a block of its own."""
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    return tuple(Stage(ends[stage.first], ends[stage.last + 1] - 1, stage.device) for stage in stages)


def plan_published(problem: PipelineProblem, time_limit: float, seed: int) -> PipelinePlacement:
    return _timed(problem, lambda: published_stages(problem, random.Random(seed)))


def plan_exact(
    problem: PipelineProblem, time_limit: float, seed: int, known: Sequence[Stages] = ()
) -> PipelinePlacement:
    """Never worse than those that are known; without any than `pipeline` with the same seed, which it starts from then."""
    began = time.perf_counter()
    deadline = began + time_limit
    answer = best_stages(problem, random.Random(seed), lambda: time.perf_counter() > deadline, known)
    return _placement(problem, answer, time.perf_counter() - began)


def plan_random(problem: PipelineProblem, time_limit: float, seed: int) -> PipelinePlacement:
    return _timed(problem, lambda: random_stages(problem, random.Random(seed)))


def plan_joint(problem: PipelineProblem, time_limit: float, seed: int) -> PipelinePlacement:
    return _timed(problem, lambda: joint_stages(problem))


PLANNERS: dict[str, Planner] = {
    "pipeline": plan_published,
    "pipeline-exact": plan_exact,
    "random": plan_random,
    "joint": plan_joint,
}


def _timed(problem: PipelineProblem, search: Callable[[], Stages]) -> PipelinePlacement:
    """The bound is looked for afterwards, and its time is not the planner's."""
    began = time.perf_counter()
    stages = search()
    seconds = time.perf_counter() - began
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
