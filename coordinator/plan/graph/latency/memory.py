"""Memory for weights: the bytes that devices hold under an assignment, and an assignment within all budgets. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.plan.graph.latency.problem import PlacementProblem
from hearth.errors import ModelDoesNotFit, NoPlacement

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

# By CP-SAT's own count of work, so that a run repeats exactly. It leaves most of a search's default time limit to the search.
_MAX_DETERMINISTIC_SECONDS = 10.0
_ROUNDING_BYTES = 1e-6  # the solver's bound is a float; this close to a whole number of bytes, it means that number


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
        self.is_binding = total_bytes(problem) > min(problem.budget_bytes)  # False: every assignment fits
        for operator, device in enumerate(assignment):
            self.place(operator, device)

    @property
    def fits(self) -> bool:
        return all(used <= budget for used, budget in zip(self._used, self._problem.budget_bytes, strict=True))

    def left_bytes(self, operator: int) -> list[int]:
        """By device, the bytes left if an operator that is on no device went there; negative where it has no room."""
        own = self._problem.memory_bytes[operator]
        left = [budget - used - own for used, budget in zip(self._used, self._problem.budget_bytes, strict=True)]
        for index in self._weights[operator]:
            for device, users in enumerate(self._users[index]):
                left[device] -= 0 if users else self._problem.shared[index].num_bytes
        return left

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


def held_bytes(
    model: cp_model.CpModel, problem: PlacementProblem, on: Sequence[Mapping[int, cp_model.IntVar]], device: int
) -> cp_model.LinearExprT:
    """Bytes held on a device; `on[i][k]` is whether operator i runs on device k. Shared weights count once."""
    used = [problem.memory_bytes[i] * where[device] for i, where in enumerate(on) if device in where]
    for group in problem.shared:
        held = model.new_bool_var("")
        for i in group.operators:
            if device in on[i]:
                model.add_implication(on[i][device], held)
        used.append(group.num_bytes * held)
    return sum(used)


def total_bytes(problem: PlacementProblem) -> int:
    """Bytes of the whole graph; shared weights count once."""
    return sum(problem.memory_bytes) + sum(group.num_bytes for group in problem.shared)


def with_fitting(problem: PlacementProblem, seconds: float, strategy: str) -> PlacementProblem:
    """The problem with an assignment within all budgets, so that list schedulers keep room for it.

    Raises ModelDoesNotFit with the missing bytes, or NoPlacement if it could not be decided within `seconds`.
    """
    from ortools.sat.python import cp_model  # takes 0.3 s, which few problems need

    model, ranks, total = cp_model.CpModel(), range(problem.num_devices), total_bytes(problem)
    on = [{k: model.new_bool_var("") for k in ranks} for _ in problem.operators]
    for where in on:
        model.add_exactly_one(where.values())
    over = [model.new_int_var(0, max(total, 1), "") for _ in ranks]
    for k in ranks:
        model.add(held_bytes(model, problem, on, k) <= problem.budget_bytes[k] + over[k])
    model.minimize(sum(over))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_time_in_seconds = max(seconds, 0.0)
    solver.parameters.max_deterministic_time = _MAX_DETERMINISTIC_SECONDS
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) and round(solver.objective_value) == 0:
        fitting = tuple(next(k for k in ranks if solver.boolean_value(where[k])) for where in on)
        return replace(problem, fitting=fitting)
    proven = math.ceil(solver.best_objective_bound - _ROUNDING_BYTES) if status != cp_model.UNKNOWN else 0
    missing = max(proven, total - sum(problem.budget_bytes), 0)
    if missing == 0:
        raise NoPlacement(graph=problem.name, strategy=strategy)
    raise ModelDoesNotFit(model=problem.name, missing_bytes=missing)
