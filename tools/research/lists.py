"""List schedulers that the papers compare with: GETF and Baechi's m-SCT, both with a linear program. Pure.

GETF, Generalised Earliest Time First (Su, Ren, Vardi, Wierman: arXiv 2004.14639), for devices of different speed: devices form
groups of similar speed. A linear program without transfer times assigns each operator to a group; then the ready operator
that can start first is placed on a device of its group, repeatedly.

m-SCT of Baechi (SoCC 2020): earliest start first, but a device waits for the favourite child of its last operator. Favourite
children come from the linear relaxation of the program for Small Communication Times (Hanen and Munier): each operator has at
most one successor, and at most one predecessor, without a transfer in between.
"""

from __future__ import annotations

import math

import highspy
import numpy as np

from coordinator.plan.graph.latency.baselines import list_schedules
from coordinator.plan.graph.latency.list_scheduling import (
    PartialSchedule,
    mean_seconds,
    mean_transfer_seconds,
    upward_ranks,
)
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.linear import LinearProgram, Vector

# Edges with a relaxed transfer variable below this count as without transfer; the default of Baechi's published code.
_FAVOURITE_THRESHOLD = 0.5


def best_list_schedule(problem: PlacementProblem, seconds: float) -> Schedule:
    """The best schedule of Hearth's list schedulers, contended HEFT included. Raises as `list_schedules`."""
    return min(list_schedules(problem, seconds, "best-list"), key=lambda each: each.makespan)


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
    fastest_from = [max(groups[g:], key=lambda group: sum(speeds[k] for k in group)) for g in range(len(groups))]
    of_group = np.array([fractions[:, group].sum(axis=1) for group in groups])
    has_half = of_group[::-1].cumsum(axis=0)[::-1] >= 0.5  # [groups, n]: on each group and the faster ones
    return [fastest_from[max(count - 1, 0)] for count in has_half.sum(axis=0)]


def _speeds(problem: PlacementProblem) -> list[float]:
    """One speed per device, as in the paper: the fastest device's time for the whole graph, divided by this device's."""
    totals = [sum(column) for column in zip(*problem.seconds, strict=True)]
    return [min(totals) / total if total > 0 else 1.0 for total in totals]


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


# ---- m-SCT -------------------------------------------------------------------------------------------------------------


def m_sct(problem: PlacementProblem) -> Schedule:
    """Schedule with Baechi's m-SCT (SoCC 2020).

    Baechi assumes identical devices, so the linear program uses times averaged over the devices. Raises NoPlacement.
    """
    favourite = favourite_children(problem)
    partial = PartialSchedule(problem, "m-sct")
    worst = [max(map(max, flow.seconds)) + max(map(max, problem.latency)) for flow in problem.flows]
    last: list[int | None] = [None] * problem.num_devices  # operator that the device ran last
    now = 0.0
    while partial.ready:
        later: list[float] = []
        urgent_at = {
            i: max((partial.ends[problem.flows[f].source] + worst[f] for f in problem.incoming[i]), default=0.0)
            for i in partial.ready
        }
        chosen: tuple[int, int] | None = None
        for device in range(problem.num_devices):
            if partial.free_at(device) > now:
                later.append(partial.free_at(device))
                continue
            starts = {
                i: partial.inputs_ready_at(i, device) for i in sorted(partial.ready) if device in partial.candidates(i)
            }
            child = favourite.get(last[device])
            waits = child in starts and all(
                starts[child] <= partial.inputs_ready_at(child, other) for other in partial.candidates(child)
            )
            # A device that waits for its favourite child only runs operators that could run on any device by now.
            when = {i: urgent_at[i] for i in starts} if waits else dict(starts)
            if waits and child is not None:
                when[child] = min(when[child], starts[child])
            later += [time for time in when.values() if time > now]
            due = [i for i, time in when.items() if time <= now]
            if due:
                chosen = min(due, key=lambda i: (when[i], i)), device
                break
        if chosen is None:
            now = min(later)
            continue
        operator, device = chosen
        partial.place(operator, device, max(now, partial.inputs_ready_at(operator, device)))
        last[device] = operator
    return partial.to_schedule()


def favourite_children(problem: PlacementProblem) -> dict[int | None, int]:
    """By operator, the successor that should follow it on the same device."""
    edges = [(f, flow.source, target) for f, flow in enumerate(problem.flows) for target in flow.targets]
    seconds, transfer_seconds = mean_seconds(problem), mean_transfer_seconds(problem)
    n, m = problem.num_operators, len(edges)
    program = LinearProgram(m + n + 1)  # x of each edge (1: the transfer is paid), start of each operator, makespan
    for index, (flow, i, j) in enumerate(edges):
        program.add_at_least({m + j: 1.0, m + i: -1.0, index: -transfer_seconds[flow]}, seconds[i])
    for i in range(n):
        program.add_at_least({m + n: 1.0, m + i: -1.0}, seconds[i])
        for side in (1, 2):
            incident = [index for index, edge in enumerate(edges) if edge[side] == i]
            if len(incident) > 1:
                program.add_at_least(dict.fromkeys(incident, 1.0), len(incident) - 1.0)
    upper = np.full(m + n + 1, highspy.kHighsInf)
    upper[:m] = 1.0
    cost = np.zeros(m + n + 1)
    cost[-1] = 1.0
    values = program.minimise(cost, upper)
    favourites: dict[int | None, int] = {}
    taken: set[int] = set()
    for index in np.argsort(values[:m], kind="stable").tolist():
        _, i, j = edges[index]
        if values[index] < _FAVOURITE_THRESHOLD and i not in favourites and j not in taken:
            favourites[i] = j
            taken.add(j)
    return favourites
