"""Bytes that devices hold while operators are placed, or move between devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.graph.latency.problem import PlacementProblem


class MemoryLedger:
    """The bytes on each device; shared weights count once per device. Without an assignment, nothing is placed."""

    def __init__(self, problem: PlacementProblem, assignment: Sequence[int] = ()) -> None:
        self._problem = problem
        self._used = [0] * problem.num_devices
        self._weights: list[list[int]] = [[] for _ in problem.operators]  # by operator, indices of its shared weights
        self._users = [[0] * problem.num_devices for _ in problem.shared]  # by shared weights and device
        for index, group in enumerate(problem.shared):
            for operator in set(group.operators):
                self._weights[operator].append(index)
        all_bytes = sum(problem.memory_bytes) + sum(group.num_bytes for group in problem.shared)
        self.is_binding = all_bytes > min(problem.budget_bytes)  # False: every assignment fits
        for operator, device in enumerate(assignment):
            self.place(operator, device)

    @property
    def fits(self) -> bool:
        return all(used <= budget for used, budget in zip(self._used, self._problem.budget_bytes, strict=True))

    def place(self, operator: int, device: int) -> None:
        """Add an operator that is on no device."""
        self._used[device] += self._problem.memory_bytes[operator]
        for index in self._weights[operator]:
            users = self._users[index]
            if users[device] == 0:
                self._used[device] += self._problem.shared[index].num_bytes
            users[device] += 1

    def remove(self, operator: int, device: int) -> None:
        """Take an operator off its device."""
        self._used[device] -= self._problem.memory_bytes[operator]
        for index in self._weights[operator]:
            users = self._users[index]
            users[device] -= 1
            if users[device] == 0:
                self._used[device] -= self._problem.shared[index].num_bytes

    def move(self, operator: int, source: int, target: int) -> None:
        """Move an operator from device `source` to `target`."""
        self.remove(operator, source)
        self.place(operator, target)
