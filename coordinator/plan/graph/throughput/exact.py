"""The pipeline with the lowest bottleneck, proven, or with a bound and the gap that is left. Pure.

    minimise  max( seconds of each stage on its device,  bytes across each cut / rate of its link )
    over cuts, and a different device for each stage that can hold it; devices may stay unused.

The minimum is one of finitely many values: the times of all stages and of all transfers. Whether a pipeline within such a
value exists is decided exactly (pipeline_search); the values are searched from the best that is known (the published
planner's, so this is never worse) down to a bound, which is the least value at which devices that are used again and again
would do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

import numpy as np

from coordinator.plan.graph.throughput.baselines import joint_stages
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stages
from coordinator.plan.graph.throughput.published import published_stages
from coordinator.plan.graph.throughput.search import Decision, Reaches, TooMuchWork
from coordinator.plan.solution import Solution
from hearth.errors import ModelDoesNotFit

_CLOSE = 1.002  # where nothing can be proven, the search ends this close to what is open


def best_stages(
    problem: PipelineProblem, chance: Random, stop: Callable[[], bool], known: Sequence[Stages] = ()
) -> Solution[Stages]:
    """Search until the best is proven, or until `stop()`. Raises ModelDoesNotFit.

    `known` are pipelines to start from, of which the published planner's should be one; without, it is made here.
    """
    reaches = Reaches(problem)
    best = min(known or _simple(reaches, chance, stop), key=problem.bottleneck_seconds)
    values = _values(problem, problem.bottleneck_seconds(best))
    # No pipeline is below values[proven]; `best` is at values[high].
    proven, high = _first_with_walk(reaches, values), len(values) - 1
    critical: set[int] = set()
    low, step, top = proven, 0, high
    while low < high and not stop():  # the bound is often the answer, or close to it: from there in growing steps
        if low > proven and values[high] <= values[low] * _CLOSE:
            break  # between open questions, closer than they are worth
        middle = min(low + step, (low + high) // 2)
        try:
            found = Decision(reaches, values[middle]).pipeline(critical, stop)
        except TooMuchWork:
            low, top, step = middle + 1, min(top, middle), high
            continue
        if found is None:
            low = middle + 1
            proven = max(proven, low)
            step = max(2 * step, 1)
        else:
            best, high = found, bisect_left(values, problem.bottleneck_seconds(found))
    top = min(top, high)
    while proven < top and not stop():  # questions stayed open: what can still be said about the bound
        middle = (proven + top) // 2
        try:
            found = Decision(reaches, values[middle]).pipeline(critical, stop)
        except TooMuchWork:
            top = middle
            continue
        if found is None:
            proven = middle + 1
        else:
            best, top = found, bisect_left(values, problem.bottleneck_seconds(found))
    value = problem.bottleneck_seconds(best)
    bound = min(values[proven], value)
    return Solution(best, value, bound, bound >= value)


def relaxed_bound(problem: PipelineProblem, stages: Stages) -> float:
    """What no pipeline can be below: the lowest bottleneck if devices could be used again and again. Some pipeline must be
    known."""
    values = _values(problem, problem.bottleneck_seconds(stages))
    return values[_first_with_walk(Reaches(problem), values)]


def _first_with_walk(reaches: Reaches, values: Sequence[float]) -> int:
    """The last value has a pipeline, so it has a walk."""
    return bisect_left(range(len(values) - 1), True, key=lambda index: Decision(reaches, values[index]).has_walk)


def _values(problem: PipelineProblem, upper: float) -> list[float]:
    """What a bottleneck of at most `upper` can be: sorted, each once; `upper` is one."""
    rates = np.unique(problem.link_rates)
    found = [np.array([0.0, upper])]
    for size in sorted(set(problem.boundary_bytes)):
        found.append(size / rates[rates > 0])
    if problem.seconds.any():
        for first in range(problem.num_blocks):
            found.append((problem.elapsed[first + 1 :] - problem.elapsed[first]).ravel())
    values: list[float] = np.unique(np.concatenate([part[part <= upper] for part in found])).tolist()
    return values


def _simple(reaches: Reaches, chance: Random, stop: Callable[[], bool]) -> list[Stages]:
    problem = reaches.problem
    found = []
    searches: Sequence[Callable[[], Stages]] = (
        lambda: published_stages(problem, chance),
        lambda: joint_stages(problem),
    )
    for search in searches:
        with suppress(ModelDoesNotFit):  # the published one counts every device as large as the smallest
            found.append(search())
    if found:
        return found
    with suppress(TooMuchWork):
        any_at_all = Decision(reaches, math.inf).pipeline(set(), stop)
        if any_at_all is not None:
            return [any_at_all]
    raise ModelDoesNotFit(model=problem.name, missing_bytes=problem.missing_bytes(problem.memory_bytes))
