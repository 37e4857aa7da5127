"""Interchangeable devices: equal times, links, media and memory. Pure.

Exchanging them turns a schedule into an equal one, so that a search need only look at one of these: the one in which
they are first used in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from coordinator.plan.graph.latency.problem import FloatTable, PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule

DeviceClass = tuple[int, ...]  # at least two devices, in increasing order


def interchangeable_devices(
    problem: PlacementProblem, pinned: Collection[int] = (), by_operator: Iterable[FloatTable] = ()
) -> list[DeviceClass]:
    """Classes of devices that may be exchanged; devices of no class are left out.

    `pinned` devices may not be exchanged. `by_operator` are further tables [n][K] that tell devices apart.
    """
    columns = list(zip(*chain(problem.seconds, *by_operator), strict=True))
    matrices: set[tuple[tuple[object, ...], ...]] = {problem.latency, *(flow.seconds for flow in problem.flows)}
    if problem.media:
        matrices.add(problem.media)
    classes: list[list[int]] = []
    for device in set(range(problem.num_devices)).difference(pinned):
        for members in classes:
            first = members[0]
            if (
                columns[first] == columns[device]
                and problem.budget_bytes[first] == problem.budget_bytes[device]
                and all(_may_exchange(matrix, first, device) for matrix in matrices)
            ):
                members.append(device)
                break
        else:
            classes.append([device])
    return [tuple(members) for members in classes if len(members) > 1]


def _may_exchange(matrix: Sequence[Sequence[object]], a: int, b: int) -> bool:
    """Whether the matrix of links stays the same when two devices are exchanged."""
    others = [k for k in range(len(matrix)) if k not in (a, b)]
    return (
        matrix[a][b] == matrix[b][a]
        and all(matrix[a][k] == matrix[b][k] for k in others)
        and all(matrix[k][a] == matrix[k][b] for k in others)
    )


def in_order_of_first_use(schedule: Schedule, classes: Sequence[DeviceClass]) -> Schedule:
    """The schedule with the devices of each class exchanged such that operators first use them in increasing order."""
    renamed: dict[int, int] = {}
    for members in classes:
        used = [device for device in dict.fromkeys(schedule.assignment) if device in members]
        unused = [device for device in members if device not in used]
        renamed.update(zip([*used, *unused], members, strict=True))
    return replace(
        schedule,
        assignment=tuple(renamed.get(device, device) for device in schedule.assignment),
        transfers=tuple(
            each._replace(source=renamed.get(each.source, each.source), device=renamed.get(each.device, each.device))
            for each in schedule.transfers
        ),
    )
