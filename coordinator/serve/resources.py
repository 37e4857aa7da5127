"""What the deployments of a coordinator take: memory by their plans, processor time and links as measured.

A plan of one deployment is made for what the others leave.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Generic, TypeVar

from coordinator.devices.other_models import Taken, TakenByOthers
from coordinator.devices.registry import Device
from coordinator.devices.shared_media import Pair
from coordinator.plan.stores import with_budgets
from hearth.errors import MemoryTaken
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.units import format_bytes

# Between two looks at the workers' processor time, of which the kernel counts hundredths of a second, and at what they sent.
_SAMPLE_SECONDS = 5.0
_NEWEST_WEIGHT = 0.2  # of the newest sample in the moving average, which follows two thirds of a change within 25 s
# Of a device's processor time, the most that counts as taken: the scheduler gives equal shares to workers that always compute.
_MAX_LOAD = 0.9

P = TypeVar("P", bound=Plan)
K = TypeVar("K", bound=Hashable)


class _Rates(Generic[K]):
    """Rates of the workers' counters, as moving averages by deployment and place (a device or a link)."""

    def __init__(self, highest: float = math.inf) -> None:
        self.averages: dict[tuple[str, K], float] = {}
        self._highest = highest  # of a rate; a counter may lag behind, and then jump
        self._counters: dict[tuple[str, K, int], tuple[float, float]] = {}  # at a time, that of the worker of an epoch

    def sample(self, counters: Mapping[tuple[str, K, int], float], now: float) -> None:
        """Take note of all counters, by deployment, place and epoch. One that is not among them has ended."""
        # Of all workers of a deployment: two, while its plan changes.
        sums: dict[tuple[str, K], float] = defaultdict(float)
        for key, count in counters.items():
            before_at, before = self._counters.get(key, (now, count))
            if now > before_at and count >= before:
                sums[key[:2]] += (count - before) / (now - before_at)
        averages: dict[tuple[str, K], float] = {}
        for place, rate in sums.items():
            average = self.averages.get(place, 0.0)
            averages[place] = average + _NEWEST_WEIGHT * (min(rate, self._highest) - average)
        self._counters, self.averages = {key: (now, count) for key, count in counters.items()}, averages


class Resources:
    """The plans of all deployments by name, with the load that their workers cause."""

    def __init__(self) -> None:
        self._planned: dict[str, dict[str, int]] = {}  # by deployment and device id: bytes
        self._loads: _Rates[str] = _Rates(highest=1.0)  # shares of the processor time, by device id
        self._traffic: _Rates[Pair] = _Rates()  # bytes/s between devices
        self._loads_at_plan: dict[tuple[str, str], float] = {}  # of the other deployments, when this one was planned

    def take(self, name: str, plans: Iterable[Plan]) -> None:
        """Record the plans that a deployment has now: the one that runs, and the one that replaces it; or none."""
        devices = [device for plan in plans for device in plan.devices]
        planned = {each.device_id: 0 for each in devices}
        for each in devices:
            planned[each.device_id] = max(planned[each.device_id], each.memory.total)
        if planned != self._planned.get(name):
            self._planned[name] = planned
            for device_id in planned:
                self._loads_at_plan[name, device_id] = self._load_of_others(name, device_id)

    def by_others(self, name: str) -> TakenByOthers:
        """What the other deployments take of devices and links, whenever it is asked for."""
        return TakenByOthers(partial(self._taken, name), partial(self._traffic_of_others, name))

    def traffic(self, name: str) -> float:
        """The bytes/s that the workers of a deployment send to each other."""
        return sum(rate for (deployment, _), rate in self._traffic.averages.items() if deployment == name)

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
        budgets = {each.device_id: each.budget_bytes for each in plan.devices}
        budgets |= {device_id: min(budgets[device_id], room) for device_id, room in rooms.items()}
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
        """Measure load and traffic of all workers, until cancelled."""
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            self.sample(devices.values(), loop_time())

    def sample(self, devices: Iterable[Device], now: float) -> None:
        """Take note of the workers' processor time and of what they sent, as of the devices' latest heartbeats."""
        busy: dict[tuple[str, str, int], float] = {}
        sent: dict[tuple[str, Pair, int], float] = {}
        for device in devices:
            num_threads = device.telemetry.num_threads if device.telemetry is not None else 1
            for worker in device.state.workers if device.state is not None else ():
                busy[worker.deployment, device.device_id, worker.epoch] = worker.busy_seconds / max(num_threads, 1)
                for target, num_bytes in worker.sent_bytes.items():
                    sent[worker.deployment, (device.device_id, target), worker.epoch] = num_bytes
        self._loads.sample(busy, now)
        self._traffic.sample(sent, now)

    def _room_bytes(self, name: str, device: Device) -> int:
        """The memory of a device that the others leave, including what this deployment holds there."""
        own_bytes = device.telemetry.memory_held_bytes.get(name, 0) if device.telemetry is not None else 0
        return max(device.budget_bytes + own_bytes - self._taken(name, device).num_bytes, 0)

    def _taken(self, name: str, device: Device) -> Taken:
        held = device.telemetry.memory_held_bytes if device.telemetry is not None else {}
        planned = {other: plans.get(device.device_id, 0) for other, plans in self._planned.items() if other != name}
        num_bytes = sum(max(num_planned - held.get(other, 0), 0) for other, num_planned in planned.items())
        return Taken(num_bytes, self._load_of_others(name, device.device_id))

    def _load_of_others(self, name: str, device_id: str) -> float:
        loads = self._loads.averages.items()
        others = (load for (other, device), load in loads if device == device_id and other != name)
        return min(sum(others), _MAX_LOAD)

    def _traffic_of_others(self, name: str) -> dict[Pair, float]:
        traffic: dict[Pair, float] = defaultdict(float)
        for (other, pair), rate in self._traffic.averages.items():
            if other != name:
                traffic[pair] += rate
        return traffic
