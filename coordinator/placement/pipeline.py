"""Planners of throughput pipelines, by name: what `hearth plan --objective throughput --strategy NAME` calls.

pipeline        as published (pipeline_published)
pipeline-exact  the lowest bottleneck of compute and transfers, proven where time allows (pipeline_exact)
random, joint   the paper's baselines (pipeline_baselines)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from coordinator.placement.pipeline_baselines import joint_stages, random_stages
from coordinator.placement.pipeline_exact import Answer, best_stages, relaxed_bound
from coordinator.placement.pipeline_problem import PipelinePlacement, PipelineProblem, Stages, pipeline_problem
from coordinator.placement.pipeline_published import published_stages

__all__ = ["PLANNERS", "PipelinePlacement", "PipelineProblem", "Planner", "pipeline_problem"]

# Of a problem, a time limit in seconds and a seed. Raises ModelDoesNotFit.
Planner = Callable[[PipelineProblem, float, int], PipelinePlacement]


def plan_published(problem: PipelineProblem, time_limit: float, seed: int) -> PipelinePlacement:
    return _timed(problem, lambda: published_stages(problem, random.Random(seed)))


def plan_exact(problem: PipelineProblem, time_limit: float, seed: int) -> PipelinePlacement:
    """Never worse than `pipeline` with the same seed, which it starts from."""
    began = time.perf_counter()
    deadline = began + time_limit
    answer = best_stages(problem, random.Random(seed), lambda: time.perf_counter() > deadline)
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
