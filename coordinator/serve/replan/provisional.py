"""Measures in the background what a plan was made from provisionally: results of equal devices, and links as last used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, TypeAlias

from coordinator.devices.registry import Device
from coordinator.serve.kinds.kind import ModelKind, SharedServices
from coordinator.serve.requests.admission import Admission
from coordinator.serve.requests.runner import as_hearth_error
from hearth.plan.plan import Plan

# Until the next attempt, after one that a request disturbed or that failed: requests are slow for the seconds of a profile.
_AGAIN_SECONDS = 60.0
# Memory that must be free on a device with a worker: a profiler took up to 790 MiB (24 layers, hidden size 1024, int4).
_PROFILER_BYTES = 1 << 30

_Ends: TypeAlias = tuple[Device, ...]  # one device, or the two ends of a link


class ProvisionalMeasurer:
    """Measures one device or one pair of links at a time; on machines that serve, only while no request runs."""

    def __init__(
        self, kind: ModelKind[Any], services: SharedServices, admission: Admission[Any], clock: Callable[[], float]
    ) -> None:
        self._kind = kind
        self._fleet = services.fleet
        self._profiler = services.profiler
        self._traffic = services.taken.traffic
        self._report = services.report
        self._admission = admission
        self._clock = clock
        self._next_attempt = -math.inf
        self._measured: set[str] = set()

    async def measure_next(self, devices: Sequence[Device], plan: Plan) -> frozenset[str]:
        """Measure the next one that can be measured now.

        Returns the ids of the devices that were measured, once, when nothing is left to measure. An error is reported, and the
        measurement is tried again later.
        """
        provisional: list[_Ends] = [ends for ends in combinations(devices, 2) if self._is_link_provisional(*ends)]
        provisional += [(each,) for each in devices if self._profiler.is_provisional(each, self._kind.workload)]
        if not provisional:
            measured, self._measured = frozenset(self._measured), set()
            return measured
        if self._clock() < self._next_attempt:
            return frozenset()
        planned = {device.device_id for device in plan.devices}
        serving = {device.host_id for device in devices if device.device_id in planned}
        for ends in provisional:
            serves = not serving.isdisjoint(device.host_id for device in ends)
            if not serves or not (self._admission.num_running or self._admission.num_waiting):
                await self._measure(ends, serves)
                break
        return frozenset()

    async def _measure(self, ends: _Ends, serves: bool) -> None:
        num_admitted = self._admission.num_admitted
        try:
            if len(ends) == 2:
                await self._profiler.measure_provisional_links(ends, self._traffic)
            elif not await self._measure_device(
                ends[0], serves, lambda: serves and self._admission.num_admitted != num_admitted
            ):
                self._next_attempt = self._clock() + _AGAIN_SECONDS
                return
            self._measured |= {device.device_id for device in ends}
        except Exception as error:
            self._report(f"{ends[0].name} could not be measured yet: {as_hearth_error(error)}")
            self._next_attempt = self._clock() + _AGAIN_SECONDS

    async def _measure_device(self, device: Device, serves: bool, is_disturbed: Callable[[], bool]) -> bool:
        """Returns whether the device was measured: it has room for the profiler, and no request came meanwhile."""
        if serves:
            await self._fleet.refresh_telemetry()
            telemetry = self._fleet.devices[device.device_id].telemetry
            if telemetry is None or telemetry.memory_available_bytes < _PROFILER_BYTES:
                return False
        return await self._profiler.measure_provisional(device, self._kind.workload, is_disturbed)

    def _is_link_provisional(self, one: Device, other: Device) -> bool:
        a, b = one.device_id, other.device_id
        return not self._profiler.provisional_links.isdisjoint({(a, b), (b, a)})
