"""Planners of throughput pipelines: `hearth plan --objective throughput --strategy pipeline` and `pipeline-exact`. Pure.

`pipeline` is the published planner (published.py). It cuts a graph at operators that every path passes through
(`candidate_chain`), as in the paper. `pipeline-exact` also cuts it where several tensors cross (`fine_chain`), a superset of
these cuts, and finds the pipeline with the lowest bottleneck, proven optimal or with a lower bound:

    minimise  max( seconds of each stage on its device,  bytes across each cut / rate of its link )
    over cuts, and over assignments of stages to different devices that can hold them; devices may stay unused.

The minimum is one of finitely many values: the times of all stages and of all transfers. Whether a pipeline within a given
value exists is decided exactly (search.py). The search runs between the best known value and a lower bound. The former is
the published planner's, so the result is never worse; the latter is the optimum if devices may be used more than once.

The search decides about single parts, and therefore leaves shared media out: its bound stays one, because media only add to
the bottleneck. Of all pipelines that it finds, the best with media is kept. It is repeated with fewer devices on media, since
a pipeline with fewer cuts over a medium is often better.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np

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
from coordinator.plan.graph.throughput.search import FeasibilityProblem, SearchLimitReached, StageLimits
from coordinator.plan.solution import OperatorAssignment, SearchOptions, Solution
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec

PIPELINE_EXACT, PIPELINE = "pipeline-exact", "pipeline"
# Ratio of values at which the search ends if the values below are undecided: far below the error of a prediction.
_UNDECIDED_RATIO = 1.002
_MAX_SUBSETS = 16  # of the devices on media that are searched too: more than all of four devices have


def plan_pipeline(
    spec: GraphSpec,
    seconds: FloatTableLike,
    memory_bytes: Sequence[int],
    rate: FloatTableLike,
    strategy: str,
    options: SearchOptions,
    media: MediaCrossed = (),
) -> Solution[OperatorAssignment]:
    """The device of each operator, by `PIPELINE_EXACT` or `PIPELINE`; other arguments as in `pipeline_problem`.

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
        problem, stages = coarse, published_stages(as_published, Random(options.seed))
        took = options.clock() - began  # without the bound, which is not part of this planner
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


# ---- the exact planner ---------------------------------------------------------------------------------------------------


def best_stages(
    problem: PipelineProblem, rng: Random, stop: Callable[[], bool], known: Sequence[Stages] = ()
) -> Solution[Stages]:
    """Search until the optimum is proven, or until `stop()`. Raises ModelDoesNotFit.

    `known` are pipelines to start from, and should include the published planner's; if empty, that one is computed here.
    """
    if not problem.media:
        return _best_without_media(problem, rng, stop, known, [])
    seen: list[Stages] = []
    searched = _best_without_media(replace(problem, media=()), rng, stop, known, seen)
    for devices in _fewer_on_media(problem):
        if stop() or min(map(problem.bottleneck_seconds, seen)) <= searched.bound:
            break
        found: list[Stages] = []
        with suppress(ModelDoesNotFit):
            _best_without_media(problem.on_devices(devices), rng, stop, (), found)
        seen += (tuple(each._replace(device=devices[each.device]) for each in stages) for stages in found)
    best = min(seen, key=problem.bottleneck_seconds)
    value = problem.bottleneck_seconds(best)
    return Solution(best, value, searched.bound, searched.bound >= value)


def _fewer_on_media(problem: PipelineProblem) -> Iterator[list[int]]:
    """All devices on no medium, with subsets of the others, smallest first."""
    on_media = [device for device in range(problem.num_devices) if problem.media[device][device]]
    subsets = itertools.chain.from_iterable(itertools.combinations(on_media, size) for size in range(len(on_media)))
    for subset in itertools.islice(subsets, _MAX_SUBSETS):
        devices = [each for each in range(problem.num_devices) if each in subset or each not in on_media]
        if devices:
            yield devices


def _best_without_media(
    problem: PipelineProblem, rng: Random, stop: Callable[[], bool], known: Sequence[Stages], seen: list[Stages]
) -> Solution[Stages]:
    """As `best_stages`, for a problem without media. `known` and all pipelines that are found are added to `seen`."""
    limits = StageLimits(problem)
    seen += known or _starting_pipelines(limits, rng, stop)
    best = min(seen, key=problem.bottleneck_seconds)
    values = _possible_bottlenecks(problem, problem.bottleneck_seconds(best))
    # No pipeline is below values[proven]; `best` is at values[high].
    proven, high = _first_with_walk(limits, values), len(values) - 1
    critical: set[int] = set()
    low, step, top = proven, 0, high
    while low < high and not stop():  # the optimum is often at or near the bound: go up from there in growing steps
        if low > proven and values[high] <= values[low] * _UNDECIDED_RATIO:
            break  # the values below are undecided, and the rest of the interval is too small to matter
        middle = min(low + step, (low + high) // 2)
        try:
            found = FeasibilityProblem(limits, values[middle]).find_pipeline(critical, stop)
        except SearchLimitReached:
            low, top, step = middle + 1, min(top, middle), high
            continue
        if found is None:
            low = middle + 1
            proven = max(proven, low)
            step = max(2 * step, 1)
        else:
            best, high = found, bisect_left(values, problem.bottleneck_seconds(found))
            seen.append(found)
    top = min(top, high)
    while proven < top and not stop():  # some values stayed undecided: try to raise the bound
        middle = (proven + top) // 2
        try:
            found = FeasibilityProblem(limits, values[middle]).find_pipeline(critical, stop)
        except SearchLimitReached:
            top = middle
            continue
        if found is None:
            proven = middle + 1
        else:
            best, top = found, bisect_left(values, problem.bottleneck_seconds(found))
            seen.append(found)
    value = problem.bottleneck_seconds(best)
    bound = min(values[proven], value)
    return Solution(best, value, bound, bound >= value)


def relaxed_bound(problem: PipelineProblem, stages: Stages) -> float:
    """A lower bound on the bottleneck: the optimum if devices could be used more than once.

    `stages` is any known pipeline.
    """
    values = _possible_bottlenecks(problem, problem.bottleneck_seconds(stages))
    return values[_first_with_walk(StageLimits(problem), values)]


def _first_with_walk(limits: StageLimits, values: Sequence[float]) -> int:
    """The index of the least value with a walk (a pipeline that may repeat devices). The last value has one."""
    return bisect_left(
        range(len(values) - 1), True, key=lambda index: FeasibilityProblem(limits, values[index]).has_walk
    )


def _possible_bottlenecks(problem: PipelineProblem, upper: float) -> list[float]:
    """All possible values of a bottleneck of at most `upper`, sorted and unique; `upper` is included."""
    rates = np.unique(problem.link_rates)
    arrays = [np.array([0.0, upper])]
    for size in sorted(set(problem.boundary_bytes)):
        arrays.append(size / rates[rates > 0])
    if problem.seconds.any():
        for first in range(problem.num_blocks):
            arrays.append((problem.cumulative_seconds[first + 1 :] - problem.cumulative_seconds[first]).ravel())
    values: list[float] = np.unique(np.concatenate([part[part <= upper] for part in arrays])).tolist()
    return values


def _starting_pipelines(limits: StageLimits, rng: Random, stop: Callable[[], bool]) -> list[Stages]:
    problem = limits.problem
    pipelines = []
    searches: Sequence[Callable[[], Stages]] = (
        lambda: published_stages(problem, rng),
        lambda: largest_first(problem),
    )
    for search in searches:
        with suppress(ModelDoesNotFit):  # the published one assumes that every device has the memory of the smallest
            pipelines.append(search())
    if pipelines:
        return pipelines
    with suppress(SearchLimitReached):
        any_at_all = FeasibilityProblem(limits, math.inf).find_pipeline(set(), stop)
        if any_at_all is not None:
            return [any_at_all]
    raise ModelDoesNotFit(model=problem.name, missing_bytes=problem.missing_bytes(problem.memory_bytes))


def largest_first(problem: PipelineProblem) -> Stages:
    """Fill each device with as many blocks as it can hold, largest device first. Raises ModelDoesNotFit."""
    stages: list[Stage] = []
    first = 0
    for device in sorted(range(problem.num_devices), key=lambda each: (-problem.memory_bytes[each], each)):
        last = problem.last_block(first, problem.memory_bytes[device])
        if last < first:
            break
        stages.append(Stage(first, last, device))
        first = last + 1
        if first == problem.num_blocks:
            return tuple(stages)
    raise ModelDoesNotFit(model=problem.name, missing_bytes=problem.missing_bytes(problem.memory_bytes))
