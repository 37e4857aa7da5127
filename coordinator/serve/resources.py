"""What the deployments of a coordinator take of the devices: memory by their plans, processor time as measured.

A plan of one deployment is made for what the others leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from coordinator.deploy.beside import trial_name
from coordinator.devices.registry import Device
from coordinator.devices.taken import Taken
from coordinator.plan.stores import with_budgets
from hearth.errors import MemoryTaken
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.units import format_bytes

# Between two looks at the workers' processor time, of which the kernel counts hundredths of a second.
_SAMPLE_SECONDS = 5.0
_NEWEST_WEIGHT = 0.2  # of the newest sample in the moving average, which follows two thirds of a change within 25 s
# Of a device's processor time, the most that counts as taken: the scheduler gives equal shares to workers that always compute.
_MAX_LOAD = 0.9

P = TypeVar("P", bound=Plan)


class Resources:
    """The plans of all deployments by name, with the load that their workers cause."""

    def __init__(self) -> None:
        self._planned: dict[str, dict[str, int]] = {}  # by deployment and device id: bytes
        self._loads: dict[tuple[str, str], float] = {}  # by deployment and device id
        self._loads_at_plan: dict[tuple[str, str], float] = {}  # of the other deployments, when this one was planned
        self._busy: dict[tuple[str, str, int], tuple[float, float]] = {}  # at a time, the processor seconds of a worker

    def take(self, name: str, plans: Iterable[Plan]) -> None:
        """Record the plans that a deployment has now: the one that runs, and the one that replaces it."""
        devices = [device for plan in plans for device in plan.devices]
        planned = {each.device_id: 0 for each in devices}
        for each in devices:
            planned[each.device_id] = max(planned[each.device_id], each.memory.total)
        if planned != self._planned.get(name):
            self._planned[name] = planned
            for device_id in planned:
                self._loads_at_plan[name, device_id] = self._load_of_others(name, device_id)

    def release(self, name: str) -> None:
        """A deployment has no workers any more."""
        self._planned.pop(name, None)

    def by_others(self, name: str) -> Callable[[Device], Taken]:
        """What the other deployments take of a device."""
        return partial(self._taken, name)

    def check(self, name: str, plan: Plan, devices: Mapping[str, Device]) -> None:
        """Raise MemoryTaken if the plan needs memory that other deployments hold; they may have taken it while it was made."""
        missing_bytes = 0
        for each in plan.devices:
            device = devices.get(each.device_id)
            if device is None or device.telemetry is None or not self.holders(name, [each.device_id]):
                continue
            missing_bytes += max(each.memory.total - self._room_bytes(name, device), 0)
        if missing_bytes:
            holders = self.holders(name, [each.device_id for each in plan.devices])
            raise MemoryTaken(model=plan.model.name, missing_bytes=missing_bytes, holders=holders)

    def with_room(self, name: str, plan: P, devices: Mapping[str, Device]) -> P:
        """A plan of this deployment that states as budgets what the other deployments leave now."""
        rooms = {
            each.device_id: self._room_bytes(name, devices[each.device_id])
            for each in plan.devices
            if each.device_id in devices and self.holders(name, [each.device_id])
        }
        budgets = {
            each.device_id: min(each.budget_bytes, rooms.get(each.device_id, each.budget_bytes))
            for each in plan.devices
        }
        return with_budgets(plan, budgets) if rooms else plan

    def held_bytes(self, name: str) -> int:
        """The memory that a deployment's plans take, over all devices."""
        return sum(self._planned.get(name, {}).values())

    def holders(self, name: str, device_ids: Iterable[str] | None = None) -> str:
        """Which other deployments hold how much memory on these devices, or on all; empty if none does."""
        ids = None if device_ids is None else set(device_ids)
        sums = {
            other: sum(num_bytes for device_id, num_bytes in planned.items() if ids is None or device_id in ids)
            for other, planned in self._planned.items()
            if other != name
        }
        return ", ".join(f"{other} holds {format_bytes(num_bytes)}" for other, num_bytes in sums.items() if num_bytes)

    def load_growth(self, name: str, device_id: str) -> float:
        """The factor by which other deployments have slowed down a device since this one was planned."""
        before = self._loads_at_plan.get((name, device_id), 0.0)
        return (1.0 - before) / (1.0 - self._load_of_others(name, device_id))

    async def watch(self, devices: Mapping[str, Device]) -> None:
        """Measure the load of all workers, until cancelled."""
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            self.sample(devices.values(), loop_time())

    def sample(self, devices: Iterable[Device], now: float) -> None:
        """Take note of the workers' processor time, as of the devices' latest heartbeats."""
        busy: dict[tuple[str, str, int], tuple[float, float]] = {}
        shares: dict[tuple[str, str], float] = {}  # of all workers of a deployment: two, while its plan changes
        for device in devices:
            num_threads = device.telemetry.num_threads if device.telemetry is not None else 1
            for worker in device.state.workers if device.state is not None else ():
                key = worker.deployment, device.device_id, worker.epoch
                busy[key] = now, worker.busy_seconds
                before_at, before_seconds = self._busy.get(key, busy[key])
                if now > before_at and worker.busy_seconds >= before_seconds:
                    share = (worker.busy_seconds - before_seconds) / (now - before_at) / max(num_threads, 1)
                    shares[key[:2]] = shares.get(key[:2], 0.0) + share
        loads: dict[tuple[str, str], float] = {}
        for place, share in shares.items():
            average = self._loads.get(place, 0.0)
            loads[place] = average + _NEWEST_WEIGHT * (min(share, 1.0) - average)
        self._busy, self._loads = busy, loads

    def _room_bytes(self, name: str, device: Device) -> int:
        """The memory of a device that the others leave, including what this deployment holds there."""
        own_bytes = device.telemetry.memory_held_bytes.get(name, 0) if device.telemetry is not None else 0
        return max(device.budget_bytes + own_bytes - self._taken(name, device).num_bytes, 0)

    def _taken(self, name: str, device: Device) -> Taken:
        held = device.telemetry.memory_held_bytes if device.telemetry is not None else {}
        num_bytes = sum(
            max(planned.get(device.device_id, 0) - held.get(other, 0), 0)
            for other, planned in self._planned.items()
            if other != name
        )
        return Taken(num_bytes, self._load_of_others(name, device.device_id))

    def _load_of_others(self, name: str, device_id: str) -> float:
        own = (name, trial_name(name))
        loads = (load for (other, device), load in self._loads.items() if device == device_id and other not in own)
        return min(sum(loads), _MAX_LOAD)
