"""Plans made ahead: for each device of the deployment, the plan of the devices that are left if it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.deploy.deployment import Deployment
from coordinator.devices.registry import Device
from coordinator.serve.admission import Admission
from coordinator.serve.goal import allowed_devices
from coordinator.serve.kind import ModelKind, SharedServices
from coordinator.serve.requests import as_hearth_error
from coordinator.serve.state import Goal
from hearth.plan.plan import Plan
from hearth.wire import messages as wire

# From the start of serving until the first plan is made ahead, and between looks at the devices: a home that has just lost a
# device, or that changes, has better use for its processors.
_POLL_SECONDS = 5.0
_IDLE_POLL_SECONDS = 0.1  # interval of looking for a moment without requests
# For such a moment. Under constant load, a plan is made beside the requests: it takes 0.1 s.
_MAX_IDLE_WAIT_SECONDS = 1.0
# For a moment in which no request waits, before each chunk: then the chunk is sent beside the requests. Short, since a model
# has hundreds of chunks.
_MAX_CHUNK_WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class PreparedPlan:
    """A plan for exactly the devices `made_for`. Its chunks are on its devices, and `parts` are those of its ranks."""

    made_for: frozenset[str]
    plan: Plan
    parts: Sequence[wire.ShardParts | wire.SegmentParts]


@dataclass(frozen=True)
class Preparation:
    """What is known about the loss of each device of one deployment, by device id. Immutable."""

    plans: Mapping[str, PreparedPlan]
    refusals: Mapping[str, str]  # why there is no plan without this device

    def to_prepare(self, planned: Iterable[str], usable: frozenset[str]) -> list[str]:
        """The devices of the deployed plan for whose loss nothing was prepared with these usable devices."""
        return [
            device
            for device in planned
            if device not in self.refusals
            and (device not in self.plans or self.plans[device].made_for != usable - {device})
        ]

    def for_devices(self, usable: frozenset[str]) -> PreparedPlan | None:
        """The plan that was made for exactly these devices."""
        return next((each for each in self.plans.values() if each.made_for == usable), None)

    def prepared(self, device: str, plan: PreparedPlan) -> Preparation:
        return Preparation({**self.plans, device: plan}, self.refusals)

    def refused(self, device: str, reason: str) -> Preparation:
        plans = {other: plan for other, plan in self.plans.items() if other != device}
        return Preparation(plans, {**self.refusals, device: reason})

    def without_refusals(self) -> Preparation:
        """Try all again: the devices have changed."""
        return Preparation(self.plans, {})


NOTHING = Preparation({}, {})


def describe(preparation: Preparation, plan: Plan, pause_seconds: float | None) -> str:
    """Whether the deployment survives the loss of any one device, in one line. `pause_seconds`: of its last bring-up."""
    names = {device.device_id: device.name for device in plan.devices}
    if refused := [f"{names[each]} ({reason})" for each, reason in preparation.refusals.items() if each in names]:
        return f"cannot lose {', '.join(refused)}"
    if names.keys() - preparation.plans.keys():
        return "being prepared"
    pause = f"; pause about {pause_seconds:.1f} s" if pause_seconds is not None else ""
    return f"yes, any one device{pause}"


class Preparer:
    """Prepares for the loss of each device while a deployment serves."""

    def __init__(self, kind: ModelKind[Any], services: SharedServices, admission: Admission[Any]) -> None:
        self.preparation = NOTHING
        self._kind = kind
        self._services = services
        self._admission = admission

    def take(self, devices: Sequence[Device]) -> PreparedPlan | None:
        """The plan for exactly these devices, if their links are known. All plans are forgotten: a new deployment follows."""
        found = self.preparation.for_devices(frozenset(device.device_id for device in devices))
        self.preparation = NOTHING
        if found is None:
            return None
        ids = [device.device_id for device in found.plan.devices]
        links = self._services.profiler.links
        return found if all((a, b) in links for a in ids for b in ids if a != b) else None

    async def run(self, goal: Goal, deployment: Deployment) -> None:
        """Prepare, and again whenever other devices become usable. Ends only by cancellation."""
        self.preparation = NOTHING
        planned = [device.device_id for device in deployment.plan.devices]
        seen: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            devices = allowed_devices(goal, self._services.fleet.usable())
            usable = frozenset(device.device_id for device in devices)
            if usable != seen:
                seen, self.preparation = usable, self.preparation.without_refusals()
            for lost in self.preparation.to_prepare(planned, usable):
                await self._wait_for_idleness()
                await self._prepare(lost, [device for device in devices if device.device_id != lost], deployment)

    async def _prepare(self, lost: str, survivors: Sequence[Device], deployment: Deployment) -> None:
        if not survivors:
            self.preparation = self.preparation.refused(lost, "there is no other device")
            return
        try:
            cluster = await self._kind.profile(survivors)
            plan = await self._kind.plan(cluster, True, deployment.plan)
            ahead = self._kind.deployment(plan, deployment.name)
            await ahead.push(self._kind.weights(plan), self._services.progress, self._wait_for_queue)
        except Exception as error:
            self.preparation = self.preparation.refused(lost, as_hearth_error(error).explanation())
            return
        made_for = frozenset(device.device_id for device in survivors)
        self.preparation = self.preparation.prepared(lost, PreparedPlan(made_for, plan, ahead.parts))

    async def _wait_for_queue(self) -> None:
        """Wait until no request waits, up to a limit."""
        for _ in range(round(_MAX_CHUNK_WAIT_SECONDS / _IDLE_POLL_SECONDS)):
            if not self._admission.num_waiting:
                return
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    async def _wait_for_idleness(self) -> None:
        for _ in range(round(_MAX_IDLE_WAIT_SECONDS / _IDLE_POLL_SECONDS)):
            if not self._admission.num_running and not self._admission.num_waiting:
                return
            await asyncio.sleep(_IDLE_POLL_SECONDS)
