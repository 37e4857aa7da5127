"""Does a graph fit in the devices' memory at all, and how? Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from ortools.sat.python import cp_model

from coordinator.plan.graph.latency.problem import PlacementProblem

_DETERMINISTIC_SECONDS = 10.0


class Fit(NamedTuple):
    """`missing_bytes`: over budget at the least, as far as is proven; 0 with an assignment that fits."""

    assignment: tuple[int, ...] | None
    missing_bytes: int


def fit(problem: PlacementProblem, seconds: float, num_workers: int = 1) -> Fit:
    """An assignment within all budgets, if one is found; else what is missing."""
    model, ranks = cp_model.CpModel(), range(problem.num_devices)
    on = [[model.new_bool_var("") for _ in ranks] for _ in problem.operators]
    for row in on:
        model.add_exactly_one(row)
    total = sum(problem.memory_bytes) + sum(group.num_bytes for group in problem.shared)
    over = [model.new_int_var(0, max(total, 1), "") for _ in ranks]
    for k in ranks:
        used = [size * row[k] for size, row in zip(problem.memory_bytes, on, strict=True) if size]
        for group in problem.shared:
            held = model.new_bool_var("")
            for i in group.operators:
                model.add_implication(on[i][k], held)
            used.append(group.num_bytes * held)
        model.add(sum(used) <= problem.budget_bytes[k] + over[k])
    model.minimize(sum(over))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = num_workers, 0
    solver.parameters.max_time_in_seconds = max(seconds, 0.0)
    solver.parameters.max_deterministic_time = _DETERMINISTIC_SECONDS
    status = solver.solve(model)
    missing = max(0, math.ceil(solver.best_objective_bound - 1e-6)) if status != cp_model.UNKNOWN else 0
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or round(solver.objective_value) > 0:
        return Fit(None, max(missing, total - sum(problem.budget_bytes), 0))
    return Fit(tuple(next(k for k in ranks if solver.boolean_value(row[k])) for row in on), 0)
