"""Prices of placements: the paper's simulator, and this project's with contention of transfers. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from coordinator.plan.graph.latency.evaluator import Evaluator
from coordinator.plan.graph.latency.problem import PlacementProblem
from tools.learn.episodes import Placement


def published_makespan(problem: PlacementProblem, placement: Placement) -> float:
    """Makespan as in the authors' simulator: devices are first-in-first-out queues, transfers are delays.

    Operators queue when they become ready; transfers do not contend. The order of the placement is not used.
    """
    assignment = placement.assignment
    free_at = [0.0] * problem.num_devices
    ready_at = [0.0] * problem.num_operators
    missing = [len(flows) for flows in problem.incoming]
    queue = [(0.0, i) for i, count in enumerate(missing) if count == 0]  # in order of becoming ready
    while queue:
        ready, operator = heapq.heappop(queue)
        device = assignment[operator]
        end = free_at[device] = max(ready, free_at[device]) + problem.seconds[operator][device]
        for index in problem.outgoing[operator]:
            flow = problem.flows[index]
            for target in flow.targets:
                receiver = assignment[target]
                delay = (
                    0.0 if receiver == device else flow.seconds[device][receiver] + problem.latency[device][receiver]
                )
                ready_at[target] = max(ready_at[target], end + delay)
                missing[target] -= 1
                if missing[target] == 0:
                    heapq.heappush(queue, (ready_at[target], target))
    return max(free_at)


def published_times(problem: PlacementProblem, placements: Sequence[Placement]) -> list[float]:
    """The makespan of each placement in the authors' simulator."""
    return [published_makespan(problem, placement) for placement in placements]


def work_conserving_times(problem: PlacementProblem, placements: Sequence[Placement]) -> list[float]:
    """The makespan of each placement in this project's simulator; the order of placing decides between ready items."""
    evaluator = Evaluator(problem)
    return [evaluator.work_conserving(placement.assignment, placement.order) for placement in placements]
