"""Starts of a search, with the probabilities of its moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.plan.graph.latency.list_scheduling import contended_heft
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from hearth.errors import NoPlacement


class Start(NamedTuple):
    """A schedule within memory, and the probability [n][K] with which moves propose each device (default: uniform)."""

    schedule: Schedule
    probabilities: Sequence[Sequence[float]] | None = None

    @property
    def makespan(self) -> float:
        return self.schedule.makespan


def best_starts(starts: Sequence[Start]) -> list[Start]:
    """Those with different assignments, by increasing makespan; the first of equal ones."""
    found: dict[tuple[int, ...], Start] = {}
    for each in sorted(starts, key=lambda each: each.makespan):
        found.setdefault(each.schedule.assignment, each)
    return list(found.values())


def repaired(problem: PlacementProblem, devices: Mapping[int, int]) -> list[Start]:
    """A plan of which some devices are gone: operators without a device go where HEFT with contention ends them first."""
    try:
        return [Start(contended_heft(problem, devices))]
    except NoPlacement:
        return []
