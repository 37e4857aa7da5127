"""Bound similar segments together: the makespan of their pattern is a lower bound for each of them. Pure.

The blocks of a network repeat, but profiled times differ a little from block to block. The pattern of a group of segments
has the minimum of their times, operator by operator and flow by flow, so its lower bound holds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem

# Of each segment's work, and of its transfers, that its pattern must keep: a pattern with less would give a weak bound.
_MIN_KEPT_FRACTION = 0.95


@dataclass
class _Group:
    pattern: PlacementProblem
    max_work: float
    max_transfers: float
    members: list[int]


def segment_patterns(problems: Sequence[PlacementProblem]) -> list[PlacementProblem | None]:
    """The pattern of each problem; None for a problem that resembles no other, or only identical ones."""
    groups: dict[Any, list[_Group]] = {}
    for index, problem in enumerate(problems):
        shape = (
            problem.num_operators,
            problem.latency,
            problem.congestion,
            tuple((flow.source, flow.targets) for flow in problem.flows),
        )
        same_shape = groups.setdefault(shape, [])
        if not any(_try_to_join(group, problem, index) for group in same_shape):
            same_shape.append(_Group(problem, _work_ticks(problem), _transfer_ticks(problem), [index]))
    patterns: list[PlacementProblem | None] = [None] * len(problems)
    for group in (group for same_shape in groups.values() for group in same_shape):
        if any(problems[index] != group.pattern for index in group.members):
            for index in group.members:
                patterns[index] = group.pattern
    return patterns


def _try_to_join(group: _Group, problem: PlacementProblem, index: int) -> bool:
    pattern = replace(
        group.pattern,
        seconds=_elementwise_min(group.pattern.seconds, problem.seconds),
        flows=tuple(
            ours._replace(seconds=_elementwise_min(ours.seconds, theirs.seconds))
            for ours, theirs in zip(group.pattern.flows, problem.flows, strict=True)
        ),
    )
    max_work, max_transfers = (
        max(group.max_work, _work_ticks(problem)),
        max(group.max_transfers, _transfer_ticks(problem)),
    )
    if (
        _work_ticks(pattern) < _MIN_KEPT_FRACTION * max_work
        or _transfer_ticks(pattern) < _MIN_KEPT_FRACTION * max_transfers
    ):
        return False
    group.pattern, group.max_work, group.max_transfers = pattern, max_work, max_transfers
    group.members.append(index)
    return True


def _elementwise_min(ours: FloatTable, theirs: FloatTable) -> FloatTable:
    return tuple(tuple(map(min, row, other)) for row, other in zip(ours, theirs, strict=True))


def _work_ticks(problem: PlacementProblem) -> float:
    """Total seconds with each operator on its fastest device: slower devices contribute little to the bound."""
    return sum(map(min, problem.seconds))


def _transfer_ticks(problem: PlacementProblem) -> float:
    return sum(sum(map(sum, flow.seconds)) for flow in problem.flows)
