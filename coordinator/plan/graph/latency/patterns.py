"""Bound similar segments together: the makespan of their pattern is a lower bound for each of them. Pure.

The blocks of a network repeat, but profiled times differ a little from block to block. The pattern of a group of segments
has the minimum of their times, operator by operator and flow by flow, so its lower bound holds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.plan.graph.latency.problem import Matrix, PlacementProblem

_ALIKE = 0.95  # fraction of each segment's work, and of its transfers, that its pattern must keep


@dataclass
class _Group:
    pattern: PlacementProblem
    most_work: float
    most_sent: float
    members: list[int]


def patterns_of(problems: Sequence[PlacementProblem]) -> list[PlacementProblem | None]:
    """The pattern of each problem; None for a problem that resembles no other, or only identical ones."""
    groups: dict[Any, list[_Group]] = {}
    for index, problem in enumerate(problems):
        shape = (
            problem.num_operators,
            problem.latency,
            problem.congestion,
            tuple((flow.source, flow.targets) for flow in problem.flows),
        )
        alike = groups.setdefault(shape, [])
        if not any(_joins(group, problem, index) for group in alike):
            alike.append(_Group(problem, _work(problem), _sent(problem), [index]))
    found: list[PlacementProblem | None] = [None] * len(problems)
    for group in (group for alike in groups.values() for group in alike):
        if any(problems[index] != group.pattern for index in group.members):
            for index in group.members:
                found[index] = group.pattern
    return found


def _joins(group: _Group, problem: PlacementProblem, index: int) -> bool:
    pattern = replace(
        group.pattern,
        seconds=_least(group.pattern.seconds, problem.seconds),
        flows=tuple(
            ours._replace(seconds=_least(ours.seconds, theirs.seconds))
            for ours, theirs in zip(group.pattern.flows, problem.flows, strict=True)
        ),
    )
    most_work, most_sent = max(group.most_work, _work(problem)), max(group.most_sent, _sent(problem))
    if _work(pattern) < _ALIKE * most_work or _sent(pattern) < _ALIKE * most_sent:
        return False
    group.pattern, group.most_work, group.most_sent = pattern, most_work, most_sent
    group.members.append(index)
    return True


def _least(ours: Matrix, theirs: Matrix) -> Matrix:
    return tuple(tuple(map(min, row, other)) for row, other in zip(ours, theirs, strict=True))


def _work(problem: PlacementProblem) -> float:
    """Total seconds with each operator on its fastest device: slower devices contribute little to the bound."""
    return sum(map(min, problem.seconds))


def _sent(problem: PlacementProblem) -> float:
    return sum(sum(map(sum, flow.seconds)) for flow in problem.flows)
