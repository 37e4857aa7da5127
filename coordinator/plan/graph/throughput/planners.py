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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from coordinator.plan.solution import IDLE_SHARE, OperatorAssignment, SearchOptions, Solution, Stop
from hearth.errors import ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec

PIPELINE_EXACT, PIPELINE = "pipeline-exact", "pipeline"
_MAX_SUBSETS = 16  # of the devices on media that are searched too: more than all of four devices have
# Of the time limit, when the exact search ends, and when its bound does. The rest is for moving the cuts (placing.py).
_SEARCH_SHARE, _BOUND_SHARE = 0.7, 0.8
_MAX_VALUES = 2_000_000  # possible bottlenecks that are listed: sorting them takes a quarter of a second


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
    began = options.clock()

    def stop_after(share: float) -> Stop:
        return lambda: options.clock() >= began + share * options.time_limit_seconds

    chain = fine_chain(spec)
    coarse = pipeline_problem(spec, seconds, memory_bytes, rate, candidate_chain(spec), media)
    fine = pipeline_problem(spec, seconds, memory_bytes, rate, chain, media)
    as_published = replace(coarse, media=())  # the paper knows no media
    # A bound leaves media out, because its search does.
    adjacent_only = replace(fine, boundary_bytes=tuple(map(float, chain.adjacent_bytes(spec))), media=())
    stop, stop_bound = stop_after(_SEARCH_SHARE), stop_after(_BOUND_SHARE)
    note = ""
    if strategy == PIPELINE_EXACT:
        try:
            known = [to_fine_chain(coarse, published_stages(as_published, Random(options.seed), stop=stop))]
        except ModelDoesNotFit:
            known = []
        problem, stages = fine, best_stages(fine, Random(options.seed), stop, known).assignment
        bound = best_stages(adjacent_only, Random(options.seed), stop_bound, [stages]).bound
        took = options.clock() - began
    else:
        problem, stages = coarse, published_stages(as_published, Random(options.seed), stop=stop)
        took = options.clock() - began  # without the bound, which is not part of this planner
        bound = relaxed_bound(adjacent_only, to_fine_chain(coarse, stages), stop_bound)
        note = search_note(stages)
    stages = without_idle_devices(problem, stages)
    value = problem.bottleneck_seconds(stages)
    bound = min(bound, value)
    assignment = OperatorAssignment(problem.assignment(stages))
    return Solution(assignment, value, bound, bound >= value, took, (note,) if note else ())


def without_idle_devices(problem: PipelineProblem, stages: Stages) -> Stages:
    """The pipeline without stages that have less than 1 % of the work, where that makes its bottleneck no longer."""
    work = problem.seconds.min(axis=1)
    for device in [stage.device for stage in stages]:
        index = next(index for index, each in enumerate(stages) if each.device == device)
        small, merged = stages[index], list[Stages]()
        if work[small.first : small.last + 1].sum() >= IDLE_SHARE * work.sum():
            continue
        for other, part in ((index - 1, {"last": small.last}), (index + 1, {"first": small.first})):
            if 0 <= other < len(stages):
                longer = stages[other]._replace(**part)
                if problem.stage_bytes[longer.first, longer.last] <= problem.memory_bytes[longer.device]:
                    changed = (longer if each is stages[other] else each for each in stages if each is not small)
                    merged.append(tuple(changed))
        best = min(merged, key=problem.bottleneck_seconds, default=stages)
        stages = best if problem.bottleneck_seconds(best) <= problem.bottleneck_seconds(stages) else stages
    return stages


def to_fine_chain(coarse: PipelineProblem, stages: Stages) -> Stages:
    """The same stages on a chain of the same operators in which each operator is one block."""
    ends = [0, *itertools.accumulate(map(len, coarse.blocks))]
    return tuple(Stage(ends[stage.first], ends[stage.last + 1] - 1, stage.device) for stage in stages)


# ---- the exact planner ---------------------------------------------------------------------------------------------------


def best_stages(problem: PipelineProblem, rng: Random, stop: Stop, known: Sequence[Stages] = ()) -> Solution[Stages]:
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
    problem: PipelineProblem, rng: Random, stop: Stop, known: Sequence[Stages], seen: list[Stages]
) -> Solution[Stages]:
    """As `best_stages`, for a problem without media. `known` and all pipelines that are found are added to `seen`."""
    limits = StageLimits(problem)
    seen += known or _starting_pipelines(limits, rng, stop)
    search = _Search(limits, seen, stop)
    search.run()
    return Solution(search.best, search.value, search.proven, search.proven >= search.value)


class _Search:
    """Search for the least bottleneck between a bound, `proven`, and `value`, that of the best pipeline.

    Pipelines that are found are added to `seen`, which holds one at least.
    """

    def __init__(self, limits: StageLimits, seen: list[Stages], stop: Stop) -> None:
        self._limits, self._problem, self._seen, self._stop = limits, limits.problem, seen, stop
        self._critical: set[int] = set()
        self.best = min(seen, key=self._problem.bottleneck_seconds)
        self.value = self._problem.bottleneck_seconds(self.best)
        self.proven = _least_walk(limits, self.value, stop)

    def run(self) -> None:
        """Lower the value, then raise the bound, until the optimum is proven, or until `stop()`."""
        for if_undecided in (False, True):
            holds = partial(self._has_pipeline, if_undecided)
            bound = _least_value(self._problem, self.proven, self.value, holds, self._stop)
        self.proven = min(bound, self.value)

    def _has_pipeline(self, if_undecided: bool, beta: float) -> bool:
        """Whether there is a pipeline within `beta`. Keeps the one that is found."""
        if not self.proven <= beta < self.value:
            return beta >= self.value
        try:
            found = FeasibilityProblem(self._limits, beta).find_pipeline(self._critical, self._stop)
        except SearchLimitReached:
            return if_undecided
        if found is None:
            self.proven = math.nextafter(beta, math.inf)
            return False
        self.best, self.value = found, self._problem.bottleneck_seconds(found)
        self._seen.append(found)
        return True


def relaxed_bound(problem: PipelineProblem, stages: Stages, stop: Stop = lambda: False) -> float:
    """A lower bound on the bottleneck: the optimum if devices could be used more than once, or less if `stop()` comes first.

    `stages` is any known pipeline.
    """
    return _least_walk(StageLimits(problem), problem.bottleneck_seconds(stages), stop)


def _least_walk(limits: StageLimits, upper: float, stop: Stop) -> float:
    """The least possible bottleneck with a walk (a pipeline that may repeat devices), or a lower bound; `upper` has one."""
    return _least_value(limits.problem, 0.0, upper, lambda beta: FeasibilityProblem(limits, beta).has_walk, stop)


def _least_value(
    problem: PipelineProblem, lower: float, upper: float, holds: Callable[[float], bool], stop: Stop
) -> float:
    """The least possible bottleneck from `lower` to `upper` for which `holds` is true, as for `upper`; less after `stop()`."""
    low, high = lower, upper
    while _num_stages_between(problem, low, high) > _MAX_VALUES:
        if stop():
            return low
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    values = _possible_bottlenecks(problem, low, high)
    first, last = 0, len(values) - 1
    while first < last and not stop():
        index = (first + last) // 2
        first, last = (first, index) if holds(values[index]) else (index + 1, last)
    return values[first]


def _num_stages_between(problem: PipelineProblem, lower: float, upper: float) -> int:
    """About how many stages take from `lower` to `upper`."""
    return sum(
        int((np.searchsorted(column, column + upper, "right") - np.searchsorted(column, column + lower)).sum())
        for column in problem.cumulative_seconds.T
    )


def _possible_bottlenecks(problem: PipelineProblem, lower: float, upper: float) -> list[float]:
    """The possible values of a bottleneck from `lower` to `upper`, sorted and unique; `upper` is one."""
    rates, elapsed = np.unique(problem.link_rates), problem.cumulative_seconds
    arrays = [np.array([0.0, upper]), np.divide.outer(np.unique(problem.boundary_bytes), rates[rates > 0]).ravel()]
    if problem.seconds.any():
        arrays += [(elapsed[first + 1 :] - elapsed[first]).ravel() for first in range(problem.num_blocks)]
    kept = np.concatenate([part[(lower <= part) & (part <= upper)] for part in arrays])
    values: list[float] = np.unique(kept).tolist()
    return values


def _starting_pipelines(limits: StageLimits, rng: Random, stop: Stop) -> list[Stages]:
    problem = limits.problem
    pipelines = []
    searches: Sequence[Callable[[], Stages]] = (
        lambda: published_stages(problem, rng, stop=stop),
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
