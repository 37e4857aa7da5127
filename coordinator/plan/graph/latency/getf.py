"""GETF, Generalised Earliest Time First (Su, Ren, Vardi, Wierman: arXiv 2004.14639), for devices of different speed. Pure.

Devices form groups of similar speed. A linear program without transfer times assigns each operator to a group; then the
ready operator that can start first is placed on a device of its group, repeatedly.
"""

from __future__ import annotations

import math

import highspy
import numpy as np

from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, upward_ranks
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.linear import LinearProgram, Vector


def getf(problem: PlacementProblem) -> Schedule:
    """Schedule with GETF. Ties go to the higher upward rank; an operator leaves its group if that has no memory left.

    Raises NoPlacement.
    """
    group_of = _assigned_groups(problem)
    partial = PartialSchedule(problem, "getf")
    ranks = upward_ranks(problem)
    while partial.ready:
        start, _, operator, device = min(
            (partial.earliest_start(i, k), -ranks[i], i, k)
            for i in partial.ready
            for k in partial.candidates(i, group_of[i])
        )
        partial.place(operator, device, start)
    return partial.to_schedule()


def _assigned_groups(problem: PlacementProblem) -> list[list[int]]:
    """By operator, the devices of its group (section 3 of the paper).

    The linear program puts at least half of the operator on groups from some speed upwards; among these groups, take the
    one with the greatest total speed.
    """
    speeds = _speeds(problem)
    groups = _groups(speeds)
    fractions = _fractions(problem)
    assigned = []
    for i in range(problem.num_operators):
        mass, slowest_group = 0.0, 0
        for index in reversed(range(len(groups))):
            mass += sum(fractions[i, device] for device in groups[index])
            if mass >= 0.5:
                slowest_group = index
                break
        assigned.append(max(groups[slowest_group:], key=lambda group: sum(speeds[device] for device in group)))
    return assigned


def _speeds(problem: PlacementProblem) -> list[float]:
    """One speed per device, as in the paper: the fastest device's time for the whole graph, divided by this device's."""
    totals = [sum(row[device] for row in problem.seconds) for device in range(problem.num_devices)]
    fastest_total = min(totals)
    return [fastest_total / total if total > 0 else 1.0 for total in totals]


def _groups(speeds: list[float]) -> list[list[int]]:
    """Groups from slow to fast, each within a factor of log m / log log m.

    Devices with less than 1/m of the fastest device's speed are left out.
    """
    m = len(speeds)
    factor = max(2.0, math.log2(m) / math.log2(math.log2(m))) if m > 2 else 2.0
    fast_enough = [device for device in range(m) if speeds[device] * m >= 1]
    slowest = min(speeds[device] for device in fast_enough)
    by_group: dict[int, list[int]] = {}
    for device in fast_enough:
        by_group.setdefault(int(math.log(speeds[device] / slowest, factor) + 1e-9), []).append(device)
    return [by_group[index] for index in sorted(by_group)]


def _fractions(problem: PlacementProblem) -> Vector:
    """[n, K]: the fraction of each operator on each device in the best fractional schedule, ignoring transfers and memory."""
    n, num_devices = problem.num_operators, problem.num_devices
    share, end, makespan = 0, n * num_devices, n * num_devices + n
    program = LinearProgram(makespan + 1)
    for i, seconds in enumerate(problem.seconds):
        work = {share + i * num_devices + k: seconds[k] for k in range(num_devices)}
        program.add_equal(dict.fromkeys(work, 1.0), 1.0)
        negative_work = {variable: -coefficient for variable, coefficient in work.items()}
        program.add_at_least({end + i: 1.0, **negative_work}, 0.0)
        for before in problem.predecessors[i]:
            program.add_at_least({end + i: 1.0, end + before: -1.0, **negative_work}, 0.0)
        program.add_at_least({makespan: 1.0, end + i: -1.0}, 0.0)
    for k in range(num_devices):
        load = {share + i * num_devices + k: -problem.seconds[i][k] for i in range(n)}
        program.add_at_least({makespan: 1.0, **load}, 0.0)
    cost = np.zeros(makespan + 1)
    cost[makespan] = 1.0
    return program.minimise(cost, np.full(makespan + 1, highspy.kHighsInf))[: n * num_devices].reshape(n, num_devices)
