"""Looks for a better plan while requests go on: when devices drifted or came. Only a gain is worth a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from coordinator.deploy.deployment import Deployment
from coordinator.devices.registry import Device
from coordinator.serve.admission import Admission
from coordinator.serve.drift import COMPUTE_DRIFT, DriftMonitor, Reasons, Watch, explain, pays
from coordinator.serve.goal import allowed
from coordinator.serve.kind import ModelKind, Tools
from coordinator.serve.requests import failure_of
from coordinator.serve.state import Goal
from hearth.errors import DeviceLost
from hearth.plan.plan import Plan
from hearth.platform.units import format_seconds

_LOOK_SECONDS = 1.0  # between two looks for reasons to plan again
_LINK_PAUSE_SECONDS = 5.0  # requests wait at most this long for the links of two devices to be measured


class Replanner:
    """Of one model; it outlives deployments."""

    def __init__(
        self, kind: ModelKind[Any], tools: Tools, admission: Admission[Any], clock: Callable[[], float]
    ) -> None:
        self._kind = kind
        self._tools = tools
        self._admission = admission
        self._clock = clock
        self._watch = Watch()

    def lost(self, device_id: str) -> None:
        """A device was lost while it was in use."""
        self._watch.lost(device_id, self._clock())

    def restored(self, plan: Plan) -> None:
        """A saved plan is used: every other device is a newcomer."""
        self._watch.planned([device.device_id for device in plan.devices], self._clock())

    def considered(self, devices: Sequence[Device], plan: Plan) -> None:
        """`plan` is the best that could be made of `devices`."""
        ids = {device.device_id for device in devices}
        left_out = ids - {device.device_id for device in plan.devices}
        slow = [device_id for device_id in left_out if self._tools.profiler.factor(device_id) > COMPUTE_DRIFT]
        self._watch.planned(ids, self._clock(), slow)

    async def run(self, goal: Goal, deployment: Deployment, monitor: DriftMonitor) -> Plan:
        """Returns a plan that gains enough over the deployed one; its weights are on the devices already.

        Nothing that fails here ends the deployment.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            usable = [device.device_id for device in allowed(goal, self._tools.fleet.usable())]
            reasons = self._watch.due(usable, monitor.finding, self._clock())
            if reasons is None:
                continue
            try:
                plan = await self._better_plan(goal, deployment, reasons)
                if plan is not None:
                    ahead = self._kind.deployment(plan, deployment.name)
                    await ahead.push(self._kind.weights(plan), self._tools.progress)
                    return plan
            except Exception as error:
                self._tools.report(f"the plan stays, for no better one could be made: {failure_of(error)}")
            finally:
                if reasons.finding is not None:
                    monitor.rebase()

    async def _better_plan(self, goal: Goal, deployment: Deployment, reasons: Reasons) -> Plan | None:
        """A plan that gains enough, priced like the deployed one under what is known now."""
        devices = allowed(goal, self._tools.fleet.usable())
        self.considered(devices, deployment.plan)  # now, so that a device that cannot be measured is not tried for ever
        await self._refresh_profiles(devices, deployment, reasons)
        cluster = await self._kind.profile(devices)
        profiled = {device.device_id for device in cluster.devices}
        if missing := [device.name for device in deployment.plan.devices if device.device_id not in profiled]:
            raise DeviceLost(device=", ".join(missing), reason="it could not be measured")
        plan, new_seconds, old_seconds = await self._kind.revise(cluster, deployment)
        why = explain(reasons, {device.device_id: device.name for device in devices})
        before, after = format_seconds(old_seconds), format_seconds(new_seconds)
        compared = f"a new one is predicted to take {after} instead of {before}"
        if not pays(new_seconds, old_seconds):
            self._tools.report(f"{why}: the plan stays; {compared}")
            return None
        self.considered(devices, plan)
        self._tools.report(f"{why}: changing the plan; {compared}")
        return plan

    async def _refresh_profiles(self, devices: Sequence[Device], deployment: Deployment, reasons: Reasons) -> None:
        """Bring in what was found, and measure what is new: links between requests, so that neither disturbs the other."""
        profiler = self._tools.profiler
        if reasons.finding is not None:
            for device_id, factor in reasons.finding.factors.items():
                profiler.scale_device(device_id, factor)
            if reasons.finding.links_suspect:
                profiler.forget_links([device.device_id for device in deployment.plan.devices])
        for device in devices:
            if device.device_id in reasons.joined and profiler.factor(device.device_id) != 1.0:
                await profiler.look_again(device, self._kind.workload)
        for one, other in combinations(devices, 2):
            a, b = one.device_id, other.device_id
            if {(a, b), (b, a)} <= profiler.links.keys():
                continue
            try:
                async with self._admission.exclusively(_LINK_PAUSE_SECONDS):
                    await asyncio.wait_for(profiler.measure_links([one, other]), _LINK_PAUSE_SECONDS)
            except asyncio.TimeoutError:
                pass  # once more with all the others, while requests go on
