"""What a deployment can run on: workers to take over, the devices of a saved plan, a plan made ahead, or devices to plan for.

With several deployments, also the memory: those that are pinned have others make room for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from coordinator.plan.limits import limit_violation, unknown_names
from coordinator.serve.goal import allowed_devices
from coordinator.serve.kinds.kind import ModelKind, SharedServices
from coordinator.serve.model import lifecycle as cycle
from coordinator.serve.recovery.preparation import PreparedPlan
from coordinator.serve.recovery.preparer import Preparer
from coordinator.serve.replan.replanner import Replanner
from coordinator.serve.state import Goal
from hearth.errors import BadPlan, HearthError, MemoryTaken, ModelDoesNotFit, NoDevices
from hearth.plan.plan import Plan, plan_hash
from hearth.platform.asyncio_tools import loop_time
from hearth.protocol import LEASE_SECONDS
from hearth.wire.messages import ChunksMissing, FindMissing, SegmentParts, ShardParts, WorkerLibrary

log = logging.getLogger(__name__)

# Wait for all devices of a saved plan after a restart, and for the first device: long enough for mDNS discovery and for
# agents that start at the same time; then the coordinator plans with the devices that are there.
_WAIT_FOR_DEVICES_SECONDS = 10.0
# Wait for all devices of the running plan after a restart: agents are found within a second, and requests wait meanwhile.
_TAKE_OVER_SECONDS = 3.0
_POLL_SECONDS = 0.02  # interval of looking for them, or at others: short against the pause that a restart causes
# For deployments that are not pinned to end their workers, and for those that are pinned to plan first. A deadline only:
# workers end within a second or two, and plans are made in seconds.
MAKE_ROOM_SECONDS = 30.0
_PREPARE_SECONDS = 3.0  # timeout of the request to prepare a worker, which an agent answers at once
_MAX_PLAN_ATTEMPTS = 3  # while other deployments are planned at the same time, and take the memory first


class Neighbour(Protocol):
    """Another deployment of this coordinator."""

    name: str
    goal: Goal
    lifecycle: cycle.Lifecycle

    async def make_room(self, claimant: str) -> None:
        """End the workers for the deployment `claimant`."""


@dataclass(eq=False)
class BringUp:
    """Brings up the deployment `services.deployment`; outlives its plans. `others`: all deployments, oldest first."""

    goal: Goal
    kind: ModelKind[Any]
    services: SharedServices
    replanner: Replanner
    preparer: Preparer
    others: Callable[[], Iterable[Neighbour]]
    _prepared: PreparedPlan | None = field(default=None, init=False)  # the plan that is deployed next, if made ahead
    # Devices on which a claim has not made enough room.
    _claimed_in_vain: frozenset[str] = field(default=frozenset(), init=False)

    # ---- devices --------------------------------------------------------------------------------------------------

    async def running_workers(self, plan: Plan) -> list[Device]:
        """The devices on which the workers of the plan run, once all are there or a short time has passed. Raises BadPlan."""
        self.kind.check(plan)
        expected = {device.device_id: (plan_hash(plan), rank) for rank, device in enumerate(plan.devices)}
        deadline = loop_time() + _TAKE_OVER_SECONDS
        while True:
            here = [device for device in self.services.fleet.usable() if device.device_id in expected]
            running = [each for each in here if self._runs(each, *expected[each.device_id])]
            if (len(here) == len(expected) and self.services.fleet.may_compute()) or loop_time() >= deadline:
                return running
            await asyncio.sleep(_POLL_SECONDS)

    def _runs(self, device: Device, expected_hash: str, rank: int) -> bool:
        """Whether this coordinator took its lease on a device with the worker of this rank of this plan running."""
        worker = device.taken_over.get(self.services.deployment)
        return worker is not None and (worker.plan_hash, worker.rank) == (expected_hash, rank)

    async def await_leases(self, plan: Plan | None = None) -> None:
        """Wait until this coordinator may compute, and holds the leases on the devices that answer, or on those of a plan.

        Planned without them, their workers would be unloaded. A device whose lease does not come back counts as lost after a
        while, and one of the plan that is lost is not waited for.
        """
        fleet, began = self.services.fleet, loop_time()
        if not fleet.may_compute():
            self.services.report("waiting for the leases on most devices of this home")
        while True:
            wanted = {device.device_id for device in fleet.usable()}
            if plan is not None:
                wanted &= {device.device_id for device in plan.devices}
            if fleet.may_compute() and (wanted <= fleet.leased() or loop_time() - began > LEASE_SECONDS):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def await_devices(self, plan: Plan, has_served: bool) -> cycle.SavedPlanAccepted | cycle.SavedPlanRejected:
        """Wait for all devices of a saved plan and measure their links. The plan must also respect the user's limits.

        `has_served`: the devices have been there before, and none is waited for that is known to be gone.
        """
        await self._let_pinned_plan_first()
        try:
            self.kind.check(plan)
        except BadPlan as error:
            return cycle.SavedPlanRejected(error.reason)
        if not await self._devices_available(plan, has_served):
            return cycle.SavedPlanRejected("not all of its devices are available")
        usable = self.services.fleet.usable()
        offered = {device.device_id: device.telemetry.memory_budget_bytes for device in usable if device.telemetry}
        if violation := limit_violation(plan, self.goal.limits, self.goal.exclude, offered):
            return cycle.SavedPlanRejected(violation)
        if not self._has_room(plan):
            return cycle.SavedPlanRejected("other models hold the memory")
        self.replanner.record_restored_plan(plan)
        return cycle.SavedPlanAccepted(self.services.fleet.last_epoch)

    async def _devices_available(self, plan: Plan, has_served: bool) -> bool:
        needed = {device.device_id for device in plan.devices}
        known = self.services.fleet.devices
        deadline = loop_time() + _WAIT_FOR_DEVICES_SECONDS
        while loop_time() < deadline:
            if has_served and any(each in known and known[each].health == "dead" for each in needed):
                return False
            usable = [device for device in self.services.fleet.usable() if device.device_id in needed]
            if len(usable) == len(needed):
                links = await self.services.profiler.measure_links(usable, self.services.taken.traffic)
                return len(links) == len(needed) * (len(needed) - 1)
            await asyncio.sleep(0.1)
        return False

    async def settle(
        self, recovering: bool, error: HearthError | None
    ) -> cycle.DevicesSettled | cycle.PreparedPlanFound:
        """Wait for the fleet to settle, unless there is a plan for the devices that are left.

        `recovering`: skip the quiet period and the minimum number of devices. `error`: what ended the deployment, if one did.
        """
        await self.await_leases()
        await self._let_pinned_plan_first()
        settings, fleet = self.services.settings, self.services.fleet
        if recovering:
            found = self.preparer.take(allowed_devices(self.goal, fleet.usable()), error)
            if found.reason:
                self.services.report(found.reason)
            if (prepared := found.plan) is not None and self._has_room(prepared.plan):
                self._prepared = prepared
                if not found.is_same:
                    considered = {*prepared.made_for, found.left_out} & fleet.devices.keys()
                    self.replanner.record_best_plan([fleet.devices[each] for each in considered], prepared.plan)
                return cycle.PreparedPlanFound(prepared.plan, fleet.last_epoch, found.is_same)
        quiet_seconds, min_devices = (0.0, 1) if recovering else (settings.settle_seconds, settings.min_devices)
        await fleet.settle(quiet_seconds, min_devices, _WAIT_FOR_DEVICES_SECONDS)
        devices = allowed_devices(self.goal, fleet.usable())
        if not devices:
            raise NoDevices(seconds=_WAIT_FOR_DEVICES_SECONDS)
        names = [*(limit.device for limit in self.goal.limits), *self.goal.exclude]
        for name in unknown_names(names, fleet.devices.values()):  # mistyped, or the device joins later
            self.services.report(f"warning: no device here is called {name} yet; its limit applies once it joins")
        return cycle.DevicesSettled(tuple(devices))

    def take_prepared(self, plan: Plan) -> Sequence[ShardParts | SegmentParts]:
        """The parts of a plan that was made ahead, whose chunks are on the devices; empty for any other plan."""
        prepared, self._prepared = self._prepared, None
        return prepared.parts if prepared is not None and prepared.plan.with_epoch(plan.epoch) == plan else ()

    # ---- memory ---------------------------------------------------------------------------------------------------

    async def make_plan(self, state: cycle.Lifecycle, held: Plan | None) -> Plan:
        """A plan for the memory that other deployments leave.

        If it is pinned, others that are not make room. `held`: as for `ModelKind.plan`. Raises MemoryTaken if it fits only
        without them, and as `ModelKind.plan`.
        """
        resources, cluster = self.services.resources, state.cluster
        attempt = 0
        while True:
            attempt += 1
            try:
                plan = await self.kind.plan(cluster, state.has_served, held)
            except ModelDoesNotFit as error:
                if not (holders := resources.holders(self.services.deployment)):
                    raise
                if not await self._claim_room(error.missing_bytes, state.devices):
                    raise MemoryTaken(model=error.model, missing_bytes=error.missing_bytes, holders=holders) from None
            else:
                try:
                    resources.check(self.services.deployment, plan, self.services.fleet.devices)
                    self._claimed_in_vain = frozenset()
                    return plan
                except MemoryTaken as error:  # another deployment was planned at the same time
                    claimed = await self._claim_room(error.missing_bytes, state.devices)
                    if not claimed and attempt >= _MAX_PLAN_ATTEMPTS:
                        raise
            cluster = await self.kind.profile(state.devices, held)

    async def _claim_room(self, missing_bytes: int, devices: Iterable[Device]) -> bool:
        """Have others make room for this deployment, if it is pinned: the newest first, none that is pinned.

        Returns whether any did. None does if all together would not be enough, or were not on these devices before.
        """
        held_bytes = self.services.resources.held_bytes
        ids = frozenset(device.device_id for device in devices)
        others = [each for each in self.others() if not each.goal.pinned and held_bytes(each.name)]
        if not self.goal.pinned or ids == self._claimed_in_vain or not others:
            return False
        if sum(held_bytes(each.name) for each in others) < missing_bytes:
            return False
        claimed: list[Neighbour] = []
        while missing_bytes > 0:
            claimed.append(others.pop())
            missing_bytes -= held_bytes(claimed[-1].name)
        if not others:  # if this is not enough, nothing is
            self._claimed_in_vain = ids
        self.services.report(
            f"{self.services.deployment} is pinned: {', '.join(each.name for each in claimed)} make room for it"
        )
        await asyncio.gather(*(each.make_room(self.services.deployment) for each in claimed))
        return True

    async def _let_pinned_plan_first(self) -> None:
        """Wait until pinned deployments know what memory they need, so that this one does not take it meanwhile."""
        deadline = loop_time() + MAKE_ROOM_SECONDS
        while not self.goal.pinned and loop_time() < deadline:
            if not any(each.goal.pinned and each.lifecycle.phase in cycle.UNPLANNED for each in self.others()):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _has_room(self, plan: Plan) -> bool:
        """Whether other deployments leave the memory for a plan that was made before."""
        try:
            self.services.resources.check(self.services.deployment, plan, self.services.fleet.devices)
        except MemoryTaken as error:
            self.services.report(f"that plan is not used: {error.explanation()}")
            return False
        return True


def one_of_each_machine(devices: Sequence[Device]) -> list[Device]:
    """The first device of each machine, on which `warm_workers` pays before there is a plan.

    More of them on one machine would take its cores from the one that the plan uses.
    """
    return list({device.host_id: device for device in reversed(devices)}.values())


async def warm_workers(fleet: Fleet, device_ids: Iterable[str], library: WorkerLibrary) -> None:
    """Ask these devices to start the process from which they fork workers, so that loading a plan waits for no import.

    A device that does not answer starts its worker from scratch.
    """

    async def ask(device_id: str) -> None:
        request = FindMissing(holder=fleet.holder, hashes=(), prepare_worker=library)
        try:
            await fleet.ask(device_id, request, ChunksMissing, timeout_seconds=_PREPARE_SECONDS)
        except HearthError as error:
            log.info("no worker process was prepared: %s", error.explanation())

    await asyncio.gather(*map(ask, device_ids))
