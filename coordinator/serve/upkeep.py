"""Keeps one model deployed, of whatever kind: plans, deploys, takes note of losses, plans anew. Requests are not here.

Who derives from this knows how a plan of its kind is made and what runs on it (`serving`, `graphs.serving`).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from coordinator.deploy.distribution import Progress
from coordinator.deploy.workers import Workers
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.plan.limits import breach, unknown_names
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.goal import allowed
from coordinator.serve.replanning import failure_of
from coordinator.serve.state import GraphGoal, SavedDeployment, StateFile, TransformerGoal
from hearth.errors import DeviceLost, HearthError, NoDevices, NotServing, WorkerDied
from hearth.plan.plan import GraphPlan, TransformerPlan
from hearth.platform.asyncio_tools import within
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.messages import WireStats

_WAIT_FOR_DEVICES_SECONDS = 10.0  # after a restart, for the devices of the last plan
_RETRY_SECONDS = 2.0

_G = TypeVar("_G", TransformerGoal, GraphGoal)
_P = TypeVar("_P", TransformerPlan, GraphPlan)
_D = TypeVar("_D", bound=Workers)


class Upkeep(ABC, Generic[_G, _P, _D]):
    """One goal, one deployment at a time. `report` gets a line at each stage."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        fleet: Fleet,
        report: Callable[[str], None],
        progress: Progress = lambda name, done, total: None,
    ) -> None:
        self.state = "starting"
        self.goal: _G | None = None
        self.plan: _P | None = None
        self.served = 0
        self.failed = 0
        self.last_error = ""
        self.last_latency_seconds: float | None = None
        self.profiler = Profiler(fleet, settings.state_dir / "profiles", report)
        self._settings = settings
        self._fleet = fleet
        self._report = report
        self._progress = progress
        self._file = StateFile(settings.state_dir)
        self._last_epoch = 0
        self._restored: _P | None = None  # to be tried once, at the start
        self._chosen: _P | None = None  # by the background, for the deployment that follows
        self._deployment: _D | None = None
        self._stale = asyncio.Event()  # set: what is deployed is not what should be
        self._ready = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def wire(self) -> WireStats:
        return self._deployment.wire if self._deployment else WireStats()

    @property
    def dropped_messages(self) -> int:
        return self._deployment.dropped_messages if self._deployment else 0

    # ---- what a kind of model brings ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def queued(self) -> int:
        """Requests that wait."""

    @abstractmethod
    async def run(self) -> None:
        """Deploy and serve until cancelled."""

    @abstractmethod
    def _open(self, goal: _G) -> None:
        """Read the model. Raises BadCheckpoint, BadModelFile, BadSetting, ..."""

    @abstractmethod
    def _suits(self, plan: _P) -> bool:
        """Whether a plan from before is for this model, and promises what is asked for now."""

    @abstractmethod
    async def _make_plan(self, goal: _G, devices: Sequence[Device]) -> _P:
        """Profile these devices, and plan for them."""

    @abstractmethod
    def _deploying(self, plan: _P) -> _D:
        """The deployment of a plan, with nothing on the devices yet."""

    @abstractmethod
    async def _bring_up(self, deployment: _D) -> None:
        """Push, load and warm up."""

    @abstractmethod
    def _serving(self, plan: _P) -> str:
        """The state's text while it is served."""

    async def _before_deploying(self) -> None:
        """What goes on in the background for the old plan ends."""

    async def _after_deploying(self) -> None:
        """It is being served: what is to be done beside."""

    def _reused(self, plan: _P) -> None:
        """A plan from before is deployed again."""

    def _lost_device(self, device_id: str) -> None:
        """A device was lost while it was in use."""

    # ---- from outside ---------------------------------------------------------------------------------------------

    def start(self, goal: _G, plan: _P | None = None) -> None:
        """Serve `goal`, at first by `plan` if its devices come. Raises BadCheckpoint, BadModelFile, BadSetting, ..."""
        self._last_epoch = self._file.load().last_epoch
        self._open(goal)
        self.goal = goal
        self._restored = plan
        self._file.save(DEFAULT_DEPLOYMENT, SavedDeployment(goal=goal, plan=plan), self._last_epoch)
        self._stale.set()

    def device_changed(self, device: Device) -> None:
        """The fleet saw a change: fail what ran there, and plan anew."""
        deployment = self._deployment
        if deployment is None or device.device_id not in {d.device_id for d in deployment.devices}:
            return
        if device.health == "dead" or device.health == "busy":
            deployment.fail(DeviceLost(device=device.name, reason=device.reason))
        elif device.state is None:
            deployment.fail(DeviceLost(device=device.name, reason="its agent was restarted"))
        elif (worker := device.failed_worker(deployment.deployment, deployment.epoch)) is not None:
            deployment.fail(WorkerDied(device=device.name, reason=worker.failure))
        elif device.worker(deployment.deployment) is None and self.ready:
            deployment.fail(DeviceLost(device=device.name, reason="its worker is gone"))
        if deployment.failure is not None:
            self._lost(deployment)

    async def close(self) -> None:
        if self._deployment is not None:
            await self._deployment.close()

    # ---- what requests run on -------------------------------------------------------------------------------------

    async def deployed(self, timeout_seconds: float) -> _D:
        """What is served, once something is. Raises NotServing."""
        try:
            await within(max(timeout_seconds, 0.001), self._ready.wait())
        except asyncio.TimeoutError:
            raise NotServing(state=self.state) from None
        assert self._deployment is not None
        return self._deployment

    def serves(self, deployment: object) -> bool:
        return self.ready and deployment is self._deployment

    def failed_on(self, deployment: object, error: HearthError) -> None:
        """An error that is not the request's own ends the deployment it ran on (not a newer one)."""
        current = self._deployment
        if current is not None and current is deployment and error.scope != "request":
            current.fail(error)
            self._lost(current)

    def _failed_request(self, error: HearthError, deployment: _D | None) -> None:
        self.failed += 1
        self.last_error = str(error)
        if deployment is not None:
            self.failed_on(deployment, error)

    # ---- deployment -----------------------------------------------------------------------------------------------

    def _lost(self, deployment: _D) -> None:
        if deployment is self._deployment and not self._stale.is_set():
            error = deployment.failure
            self.last_error = str(error)
            self._set_state(f"planning anew: {error.explanation() if error else ''}")
            for device in deployment.devices:
                if isinstance(error, WorkerDied | DeviceLost) and error.device == device.name:
                    self._lost_device(device.device_id)
                if isinstance(error, WorkerDied) and error.device == device.name:
                    self._fleet.punish(device.device_id)
            self._ready.clear()
            self._stale.set()

    async def _deploy_loop(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._deploy()
                await self._after_deploying()
            except Exception as error:
                failure = failure_of(error)
                self.last_error = str(failure)
                self._set_state(f"not ready, trying again: {failure}")
                await asyncio.sleep(_RETRY_SECONDS)
                self._stale.set()

    async def _deploy(self) -> None:
        assert self.goal is not None
        self._ready.clear()
        await self._before_deploying()
        previous, self._deployment = self._deployment, None
        if previous is not None:
            await previous.close()
        plan = await self._choose_plan(self.goal)
        self._last_epoch = max(self._last_epoch, self._fleet.last_epoch) + 1
        plan = plan.with_epoch(self._last_epoch)
        self._file.save(DEFAULT_DEPLOYMENT, SavedDeployment(goal=self.goal, plan=plan), self._last_epoch)
        deployment = self._deploying(plan)
        self._deployment, self.plan = deployment, plan
        await self._bring_up(deployment)
        if deployment.failure is not None:
            raise deployment.failure
        self._set_state(self._serving(plan))
        self._ready.set()

    async def _choose_plan(self, goal: _G) -> _P:
        """At the start the saved plan, when all its devices are there (after a power cut); else a new one."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            return chosen
        restored, self._restored = self._restored, None
        if restored is not None and self._suits(restored):
            self._set_state("waiting for the devices of the last plan")
            if await self._all_there(restored):
                against = breach(restored, goal.limits, goal.exclude, self._offered_bytes())
                if against is None:
                    self._reused(restored)
                    return restored
                self._report(f"the given plan is not used: {against}")
        self._set_state("looking for devices")
        # Once something was served, what is left must do: the user's minimum and the wait for newcomers are for starts.
        settle_seconds, min_devices = (
            (self._settings.settle_seconds, self._settings.min_devices) if self.plan is None else (0.0, 1)
        )
        await self._fleet.settle(settle_seconds, min_devices, _WAIT_FOR_DEVICES_SECONDS)
        devices = allowed(goal, self._fleet.usable())
        if not devices:
            raise NoDevices(seconds=_WAIT_FOR_DEVICES_SECONDS)
        self.goal = goal.model_copy(update={"keep_plan": False})  # what was to be kept could not be
        self._warn_of_unknown(goal)
        return await self._make_plan(self.goal, devices)

    def _offered_bytes(self) -> dict[str, int]:
        there = self._fleet.usable()
        return {device.device_id: device.telemetry.memory_budget_bytes for device in there if device.telemetry}

    def _warn_of_unknown(self, goal: _G) -> None:
        """A name with a typing error would silently limit nothing; a device that is off now may come later."""
        names = [*(limit.device for limit in goal.limits), *goal.exclude]
        for name in unknown_names(names, self._fleet.devices.values()):
            self._report(f"warning: no device here is called {name} yet; its limit holds when one comes")

    async def _all_there(self, plan: _P) -> bool:
        """Whether all devices of a plan came in time, with the links between them measured (cached, mostly)."""
        wanted = {device.device_id for device in plan.devices}
        deadline = time.monotonic() + _WAIT_FOR_DEVICES_SECONDS
        while time.monotonic() < deadline:
            there = [device for device in self._fleet.usable() if device.device_id in wanted]
            if len(there) == len(wanted):
                links = await self.profiler.measure_links(there)
                return len(links) == len(wanted) * (len(wanted) - 1)
            await asyncio.sleep(0.1)
        return False

    def _set_state(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._report(state)
