"""m-SCT of Baechi: earliest start first, but a device waits for the favourite child of its last operator. Pure.

Favourite children come from the linear relaxation of the program for Small Communication Times (Hanen and Munier): each
operator has at most one successor, and at most one predecessor, without a transfer in between.
"""

from __future__ import annotations

import highspy
import numpy as np

from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, mean_seconds, mean_transfer_seconds
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.linear import LinearProgram

# Edges with a relaxed transfer variable below this count as without transfer; the default of Baechi's published code.
_FAVOURITE_THRESHOLD = 0.5


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
            child = favourite.get(last[device]) if last[device] is not None else None
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
