"""Bytes that devices hold while operators move between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.graph.latency.problem import PlacementProblem


class MemoryLedger:
    """The bytes on each device; shared weights count once per device."""

    def __init__(self, problem: PlacementProblem, assignment: Sequence[int]) -> None:
        self._problem = problem
        self._used = list(problem.used_bytes(assignment))
        self._weights: list[list[int]] = [[] for _ in assignment]  # by operator, indices of its shared weights
        self._users = [[0] * problem.num_devices for _ in problem.shared]  # by shared weights and device
        for index, group in enumerate(problem.shared):
            for operator in set(group.operators):
                self._weights[operator].append(index)
                self._users[index][assignment[operator]] += 1
        all_bytes = sum(problem.memory_bytes) + sum(group.num_bytes for group in problem.shared)
        self.is_binding = all_bytes > min(problem.budget_bytes)  # False: every assignment fits

    @property
    def fits(self) -> bool:
        return all(used <= budget for used, budget in zip(self._used, self._problem.budget_bytes, strict=True))

    def move(self, operator: int, source: int, target: int) -> None:
        """Move an operator from device `source` to `target`."""
        num_bytes = self._problem.memory_bytes[operator]
        self._used[source] -= num_bytes
        self._used[target] += num_bytes
        for index in self._weights[operator]:
            users, num_bytes = self._users[index], self._problem.shared[index].num_bytes
            users[source] -= 1
            if users[source] == 0:
                self._used[source] -= num_bytes
            if users[target] == 0:
                self._used[target] += num_bytes
            users[target] += 1
