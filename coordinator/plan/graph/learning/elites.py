"""The plans that are worth a trial: priced close to the best, and different from the deployed one and each other. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from hearth.plan.plan import GraphPlan

MAX_ELITES = 8  # trials at a time: more would differ by less than can be measured
MIN_DIFFERENCE = 0.05  # of the operators: plans that differ by less take the same time within what can be measured
MAX_PRICE = 1.10  # times the best price: errors of the simulator that are left after calibration are smaller


class Elite(NamedTuple):
    """A plan and its predicted seconds, on the calibrated cluster."""

    plan: GraphPlan
    seconds: float


def devices_of_operators(plan: GraphPlan) -> dict[int, str]:
    """The id of the device of each operator."""
    return {operator: plan.devices[rank].device_id for operator, rank in plan.body.ranks_of_operators().items()}


def difference(one: GraphPlan, other: GraphPlan) -> float:
    """The share of operators that two plans of a graph have on different devices."""
    devices, others = devices_of_operators(one), devices_of_operators(other)
    return sum(others[operator] != device for operator, device in devices.items()) / len(devices)


def placement_key(plan: GraphPlan) -> str:
    """Identifies where a plan runs each operator and how it cuts the graph, in every version of the plan."""
    segments = [(plan.devices[each.rank].device_id, each.operators) for each in plan.body.segments]
    return hashlib.sha256(repr(segments).encode()).hexdigest()[:16]


def choose_elites(found: Iterable[Elite], incumbent: Elite, tried: Collection[str] = ()) -> list[Elite]:
    """The plans to try against the deployed one, cheapest first. `tried`: keys of placements that had their trial."""
    by_price = sorted(found, key=lambda each: each.seconds)
    best_seconds = min([incumbent.seconds, *(each.seconds for each in by_price)])
    chosen: list[Elite] = []
    for each in by_price:
        if len(chosen) == MAX_ELITES or each.seconds > MAX_PRICE * best_seconds:
            break
        others = (incumbent, *chosen)
        if placement_key(each.plan) not in tried and all(
            difference(each.plan, other.plan) >= MIN_DIFFERENCE for other in others
        ):
            chosen.append(each)
    return chosen


def fits_beside(plan: GraphPlan, running: GraphPlan, budget_bytes: Mapping[str, int]) -> bool:
    """Whether each device has memory for its worker of `plan` while that of `running` stays loaded.

    `budget_bytes`: by device id, the memory for workers, including what the running one holds.
    """
    held = {device.device_id: device.memory.total for device in running.devices}
    return all(
        device.memory.total + held.get(device.device_id, 0) <= budget_bytes.get(device.device_id, 0)
        for device in plan.devices
    )
