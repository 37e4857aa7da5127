"""Planners of throughput pipelines by name: the strategies of `hearth plan --objective throughput --strategy NAME`.

The published planner and its baselines cut a graph at operators that every path passes through (`candidate_chain`), as in
the paper. `pipeline-exact` also cuts it where several tensors cross (`fine_chain`), a superset of these cuts.

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
from coordinator.plan.graph.throughput.problem import (
    FloatTableLike,
    MediaCrossed,
    PipelineProblem,
    Stage,
    Stages,
    pipeline_problem,
)
from coordinator.plan.graph.throughput.published import published_stages, search_note
from coordinator.plan.solution import OperatorAssignment, SearchOptions, Solution
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec

PIPELINE_EXACT = "pipeline-exact"
PIPELINE = "pipeline"
# Planners that cut only at candidate points. They raise ModelDoesNotFit.
PUBLISHED: Mapping[str, Callable[[PipelineProblem, Random], Stages]] = {
    PIPELINE: published_stages,
    "random": random_stages,
    "joint": lambda problem, rng: joint_stages(problem),
}


def plan_pipeline(
    spec: GraphSpec,
    seconds: FloatTableLike,
    memory_bytes: Sequence[int],
    rate: FloatTableLike,
    strategy: str,
    options: SearchOptions,
    media: MediaCrossed = (),
) -> Solution[OperatorAssignment]:
    """The device of each operator, by `PIPELINE_EXACT` or one of `PUBLISHED`; other arguments as in `pipeline_problem`.

    The bottleneck charges all bytes that cross a cut to the link at that cut. On devices, a tensor may skip stages and go
    straight to its consumer. For a bound that also holds on devices, only tensors between adjacent blocks are
    counted. `pipeline-exact` is never worse than `pipeline` with the same seed. Raises ModelDoesNotFit.
    """
    chain = fine_chain(spec)
    coarse = pipeline_problem(spec, seconds, memory_bytes, rate, candidate_chain(spec), media)
    fine = pipeline_problem(spec, seconds, memory_bytes, rate, chain, media)
    as_published = replace(coarse, media=())  # the paper knows no media
    # A bound leaves media out, because its search does.
    adjacent_only = replace(fine, boundary_bytes=tuple(map(float, chain.adjacent_bytes(spec))), media=())
    began = options.clock()

    def stop() -> bool:
        return options.clock() > began + options.time_limit_seconds

    if strategy == PIPELINE_EXACT:
        try:
            known = [to_fine_chain(coarse, published_stages(as_published, Random(options.seed)))]
        except ModelDoesNotFit:
            known = []
        problem, stages = fine, best_stages(fine, Random(options.seed), stop, known).assignment
        bound = best_stages(adjacent_only, Random(options.seed), stop, [stages]).bound
        took = options.clock() - began
    else:
        problem, stages = coarse, PUBLISHED[strategy](as_published, Random(options.seed))
        took = options.clock() - began  # without the bound, which is not part of these planners
        bound = relaxed_bound(adjacent_only, to_fine_chain(coarse, stages))
    value = problem.bottleneck_seconds(stages)
    bound = min(bound, value)
    note = search_note(stages) if strategy == PIPELINE else ""
    assignment = OperatorAssignment(problem.assignment(stages))
    return Solution(assignment, value, bound, bound >= value, took, (note,) if note else ())


def to_fine_chain(coarse: PipelineProblem, stages: Stages) -> Stages:
    """The same stages on a chain of the same operators in which each operator is one block."""
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    return tuple(Stage(ends[stage.first], ends[stage.last + 1] - 1, stage.device) for stage in stages)
