"""The pipeline with the lowest bottleneck, proven optimal or with a lower bound. Pure.

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

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, islice
from random import Random

import numpy as np

from coordinator.plan.graph.throughput.baselines import joint_stages
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages
from coordinator.plan.graph.throughput.published import published_stages
from coordinator.plan.graph.throughput.search import FeasibilityProblem, SearchLimitReached, StageLimits
from coordinator.plan.solution import Solution
from hearth.errors import ModelDoesNotFit

# Ratio of values at which the search ends if the values below are undecided: far below the error of a prediction.
_UNDECIDED_RATIO = 1.002
_MAX_SUBSETS = 16  # of the devices on media that are searched too: more than all of four devices have


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
    subsets = chain.from_iterable(combinations(on_media, size) for size in range(len(on_media)))
    for subset in islice(subsets, _MAX_SUBSETS):
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
        lambda: joint_stages(problem),
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
