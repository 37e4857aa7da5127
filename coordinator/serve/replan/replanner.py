"""Looks for a better plan in the background when devices drift, join or are measured. Changes it only for a clear gain.

It also measures what a plan was made from provisionally: results of equal devices, and links as last used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, TypeAlias

from coordinator.deploy.deployment import Deployment
from coordinator.devices.registry import Device
from coordinator.serve.goal import allowed_devices
from coordinator.serve.kinds.kind import ModelKind, SharedServices
from coordinator.serve.replan.drift import (
    COMPUTE_DRIFT,
    DriftMonitor,
    ReplanReasons,
    ReplanTrigger,
    describe_reasons,
    is_clearly_faster,
)
from coordinator.serve.requests.admission import Admission
from coordinator.serve.requests.runner import as_hearth_error
from coordinator.serve.state import Goal
from hearth.errors import DeviceLost, HearthError
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import with_timeout
from hearth.platform.units import format_seconds

# Interval at which to check for reasons to plan again; short compared with the pauses between plans.
_POLL_SECONDS = 1.0
# A measurement of two links waits at most this long for a moment without running requests, which make links look slower.
_IDLE_SECONDS = 5.0
# Until the next attempt, after one that a request disturbed or that failed: requests are slow for the seconds of a profile.
_AGAIN_SECONDS = 60.0
# Memory that must be free on a device with a worker: a profiler took up to 790 MiB (24 layers, hidden size 1024, int4).
_PROFILER_BYTES = 1 << 30

_Ends: TypeAlias = tuple[Device, ...]  # one device, or the two ends of a link


class Replanner:
    """Background planning for one served model; outlives its deployments."""

    def __init__(
        self, kind: ModelKind[Any], services: SharedServices, admission: Admission[Any], clock: Callable[[], float]
    ) -> None:
        self._kind = kind
        self._services = services
        self._admission = admission
        self._clock = clock
        self._trigger = ReplanTrigger()
        self._provisional = ProvisionalMeasurer(kind, services, admission, clock)

    def record_loss(self, device_id: str) -> None:
        """Record the loss of a device that was in use."""
        self._trigger.record_loss(device_id, self._clock())

    def record_restored_plan(self, plan: Plan) -> None:
        """Record that a saved plan is used: devices outside it count as new."""
        self._trigger.record_plan([device.device_id for device in plan.devices], self._clock())

    def record_best_plan(self, devices: Sequence[Device], plan: Plan) -> None:
        """Record that `plan` is the best plan for `devices`. Slow devices that it leaves out are measured again later."""
        ids = {device.device_id for device in devices}
        left_out = ids - {device.device_id for device in plan.devices}
        slow = [device_id for device_id in left_out if self._services.profiler.slowdown(device_id) > COMPUTE_DRIFT]
        self._trigger.record_plan(ids, self._clock(), slow, self._unlinked(left_out, plan))

    def _unlinked(self, device_ids: Collection[str], plan: Plan) -> list[str]:
        """Those of these devices whose link with a device of the plan could not be measured."""
        failed = self._services.profiler.failed_links
        planned = [device.device_id for device in plan.devices]
        return [one for one in device_ids if any((one, other) in failed or (other, one) in failed for other in planned)]

    async def run(self, goal: Goal, deployment: Deployment, monitor: DriftMonitor) -> Plan:
        """Wait for a plan that is clearly better than the deployed one, send its weights to the devices and return it.

        Errors of measuring or planning are reported and do not end the deployment.
        """
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            usable = allowed_devices(goal, self._services.fleet.usable())
            ids = [device.device_id for device in usable]
            reasons = self._trigger.reasons_to_replan(ids, monitor.drift, self._clock())
            if reasons is None:
                self._trigger.record_measured(await self._provisional.measure_next(usable, deployment.plan))
                continue
            try:
                plan = await self._better_plan(goal, deployment, reasons)
                if plan is not None:
                    await self.push(plan, deployment.name)
                    return plan
            except Exception as error:
                self._services.report(
                    f"the plan stays, because looking for a better one failed: {as_hearth_error(error)}"
                )
            finally:
                if reasons.drift is not None:
                    monitor.reset_baseline()

    async def push(self, plan: Plan, name: str) -> None:
        """Send the weights of the next plan of the deployment `name` to the devices. Raises as `Deployment.push` does."""
        try:
            weights = await self._kind.weights(plan)
            await self._kind.deployment(plan, name).push(weights, self._services.progress)
        except HearthError as error:
            self._services.fleet.record_fault(plan.devices, error)
            raise

    async def _better_plan(self, goal: Goal, deployment: Deployment, reasons: ReplanReasons) -> Plan | None:
        """A new plan, or None if it gains too little; both plans are priced with the current profiles."""
        devices = allowed_devices(goal, self._services.fleet.usable())
        self.record_best_plan(devices, deployment.plan)  # first, so that a device that cannot be measured is tried once
        await self._refresh_profiles(devices, deployment, reasons)
        if reasons == ReplanReasons(joined=frozenset(self._unlinked(reasons.joined, deployment.plan))):
            return None  # still cut off from the others
        cluster = await self._kind.profile(devices, deployment.plan, bool(reasons.joined))
        profiled = {device.device_id for device in cluster.devices}
        if missing := [device.name for device in deployment.plan.devices if device.device_id not in profiled]:
            raise DeviceLost(device=", ".join(missing), reason="it could not be measured")
        plan, new_seconds, old_seconds = await self._kind.revise(cluster, deployment)
        reasons_text = describe_reasons(reasons, {device.device_id: device.name for device in devices})
        before, after = format_seconds(old_seconds), format_seconds(new_seconds)
        comparison = f"a new one is predicted to take {after} instead of {before}"
        if not is_clearly_faster(new_seconds, old_seconds):
            self._services.report(f"{reasons_text}: the plan stays; {comparison}")
            return None
        self.record_best_plan(devices, plan)
        self._services.report(f"{reasons_text}: changing the plan; {comparison}")
        return plan

    async def _refresh_profiles(
        self, devices: Sequence[Device], deployment: Deployment, reasons: ReplanReasons
    ) -> None:
        """Apply the drift found, and measure new devices and links. No request waits for that.

        Two links take about 2 s. They are measured while no request runs, if such a moment comes soon.
        """
        profiler = self._services.profiler
        if reasons.drift is not None:
            for device_id, factor in reasons.drift.factors.items():
                by_others = self._services.resources.load_growth(deployment.name, device_id)
                profiler.multiply_slowdown(device_id, factor / by_others)
            if reasons.drift.links_suspect:
                profiler.forget_links([device.device_id for device in deployment.plan.devices])
        for device in devices:
            if device.device_id in reasons.joined and profiler.slowdown(device.device_id) != 1.0:
                await profiler.remeasure(device, self._kind.workload)
        for one, other in combinations(devices, 2):
            a, b = one.device_id, other.device_id
            if {(a, b), (b, a)} <= profiler.links.keys() or not await profiler.can_connect(one, other):
                continue
            with suppress(asyncio.TimeoutError):
                await with_timeout(_IDLE_SECONDS, self._admission.wait_until_drained())
            await profiler.measure_links([one, other], self._services.taken.traffic)


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
