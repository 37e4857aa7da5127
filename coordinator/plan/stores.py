"""The weights that the devices of a plan store, and plans that need no more than the devices' stores can take. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, Protocol, TypeAlias, TypeVar

from coordinator.plan.limits import DeviceWithBudget
from coordinator.plan.solution import PlanningResult
from hearth.errors import ModelDoesNotFit, NoPlacement, StoresTooSmall
from hearth.plan.plan import Plan
from hearth.platform.units import format_bytes

# By device id: the bytes of each chunk that the device stores. The same chunk has the same key in every plan of a model.
Stored: TypeAlias = Mapping[str, Mapping[Hashable, int]]

_MAX_ATTEMPTS = 3  # plans with less memory for the devices whose stores are too small; each is a whole search


class DeviceWithStore(DeviceWithBudget, Protocol):
    """A device with the bytes of weights that its store can take besides those of deployed plans; None: no limit."""

    @property
    def store_room_bytes(self) -> int | None: ...


R = TypeVar("R")
P = TypeVar("P", bound=Plan)


@dataclass(frozen=True)
class StorePlanning(Generic[R, P]):
    """How plans of one kind of model are made. `restrict` sets the budget of each device in bytes; None leaves it out."""

    make: Callable[[R], PlanningResult[P]]  # raises ModelDoesNotFit, NoPlacement, ...
    restrict: Callable[[R, Mapping[str, int | None]], R]
    stored: Callable[[P], Stored]


def lacking(needed: Stored, held: Stored) -> dict[str, dict[Hashable, int]]:
    """The chunks that each device needs and does not hold; devices that lack none are left out."""
    by_device = {
        device: {key: num_bytes for key, num_bytes in chunks.items() if key not in held.get(device, {})}
        for device, chunks in needed.items()
    }
    return {device: chunks for device, chunks in by_device.items() if chunks}


def room_after(devices: Sequence[DeviceWithStore], stored: Stored) -> dict[str, int | None]:
    """What the store of each device, by id, can take besides `stored`, once a plan with these chunks is deployed."""
    return {
        device.device_id: None
        if (room := device.store_room_bytes) is None
        else max(room - sum(stored.get(device.device_id, {}).values()), 0)
        for device in devices
    }


def plan_within_stores(
    planning: StorePlanning[R, P], request: R, devices: Sequence[DeviceWithStore], held: Stored
) -> PlanningResult[P]:
    """The plan for a request whose devices are `devices`, such that each device has room for the chunks that it lacks.

    `held` are the chunks of the deployed plan, which stay on the devices until the new one is loaded. If the best plan needs
    more room than a device has, another one is made, in which that device has less memory or is left out; the notes of the
    result say so. Raises what `planning.make` raises, and StoresTooSmall.
    """
    known = {device.device_id: device for device in devices}
    budgets: dict[str, int | None] = {device.device_id: device.budget_bytes for device in devices}
    wanted: dict[str, int] = {}  # by device id, the bytes of the first plan for which it had no room
    planned = planning.make(request)
    if all(device.store_room_bytes is None for device in devices):
        return planned
    for attempt in count():
        stored = planning.stored(planned.plan)
        lacks = {each: sum(chunks.values()) for each, chunks in lacking(stored, held).items()}
        missing = {
            each: num_bytes - room
            for each, num_bytes in lacks.items()
            if (room := known[each].store_room_bytes) is not None and room < num_bytes
        }
        if not missing:
            break
        wanted = {each: lacks[each] for each in missing} | wanted
        changes = [dict.fromkeys(missing)]
        if attempt < _MAX_ATTEMPTS:
            changes.insert(0, _lowered(planned.plan, stored, missing))
        found: list[tuple[PlanningResult[P], dict[str, int | None]]] = []
        for change in changes:
            again = _try(planning, request, budgets | change)
            if again is not None:
                found.append((again, change))
                if missing.keys() <= {device.device_id for device in again.plan.devices}:
                    break  # otherwise, the search may be better without a device that it does not use
        if not found:
            rooms = ", ".join(_describe(known[each], num_bytes) for each, num_bytes in wanted.items())
            raise StoresTooSmall(model=planned.plan.model.name, missing_bytes=sum(missing.values()), rooms=rooms)
        planned, change = min(found, key=lambda each: each[0].chosen.seconds)
        budgets |= change
    if not wanted:
        return planned
    used = {device.device_id for device in planned.plan.devices}
    gets = {each: "less" if each in used else "none" for each in wanted}
    notes = tuple(f"{_describe(known[each], num_bytes)}: it gets {gets[each]}" for each, num_bytes in wanted.items())
    plan = with_budgets(planned.plan, {each: device.budget_bytes for each, device in known.items()})
    return replace(planned, chosen=replace(planned.chosen, plan=plan), notes=(*planned.notes, *notes))


def _describe(device: DeviceWithStore, num_bytes: int) -> str:
    room = format_bytes(device.store_room_bytes or 0)
    return (
        f"the store of {device.name} has room for {room} of the {format_bytes(num_bytes)} of weights that it would get"
    )


def _lowered(plan: Plan, stored: Stored, missing: Mapping[str, int]) -> dict[str, int | None]:
    """Lower budgets for devices whose chunks take too many bytes: of what grows with a share, the part that has room."""
    memory = {device.device_id: device.memory for device in plan.devices}
    return {
        each: int(
            memory[each].workspace
            + (memory[each].total - memory[each].workspace) * (1 - num_bytes / sum(stored[each].values()))
        )
        for each, num_bytes in missing.items()
    }


def _try(planning: StorePlanning[R, P], request: R, budgets: Mapping[str, int | None]) -> PlanningResult[P] | None:
    """The plan with these budgets; None if there is none."""
    if all(budget is None for budget in budgets.values()):
        return None
    try:
        return planning.make(planning.restrict(request, budgets))
    except (ModelDoesNotFit, NoPlacement):
        return None


def with_budgets(plan: P, budgets: Mapping[str, int]) -> P:
    """The plan that states these budgets of its devices, by id."""
    devices = (device.model_copy(update={"budget_bytes": budgets[device.device_id]}) for device in plan.devices)
    return plan.model_copy(update={"devices": tuple(devices)})
