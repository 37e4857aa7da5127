"""Serves one model: executes the actions of its life cycle (`lifecycle`) and feeds the outcomes back as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from coordinator.deploy.deployment import Deployment, loss_error
from coordinator.devices.registry import Device
from coordinator.plan.limits import limit_violation, unknown_names
from coordinator.serve import lifecycle as cycle
from coordinator.serve.drift import DriftMonitor
from coordinator.serve.goal import allowed
from coordinator.serve.graph import GraphKind
from coordinator.serve.kind import ModelKind, Tools
from coordinator.serve.lifecycle_text import describe, history_of
from coordinator.serve.replanning import Replanner
from coordinator.serve.requests import Requests, failure_of
from coordinator.serve.state import Goal, GraphGoal, SavedDeployment
from coordinator.serve.transformer import TransformerKind
from hearth.errors import BadPlan, DeviceLost, HearthError, NoDevices, NotServing, WorkerDied
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import with_timeout
from hearth.platform.units import format_bytes
from hearth.wire.messages import PhaseEntered

log = logging.getLogger(__name__)

_WAIT_FOR_DEVICES_SECONDS = 10.0  # for all devices of a saved plan after a restart, and for the first device
# Actions without I/O: executed inside `handle`, before any task is started.
_AT_ONCE: tuple[cycle.Action, ...] = ("stop_admitting", "refuse_requests", "record_loss")


class Controller:
    """Runs the deployment `name`. `plan` is tried first, if all its devices are available.

    Raises the errors of opening the model; BadPlan if `goal.keep_plan` is set and `plan` does not fit the model.
    """

    def __init__(
        self, name: str, goal: Goal, plan: Plan | None, tools: Tools, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.goal = goal
        self.requests: Requests[Any] = Requests(tools.settings.queue_limit, lambda: self.state, self._request_failed)
        self.kind = _open(goal, tools, self.requests)
        if plan is not None and goal.keep_plan:
            self.kind.check(plan)
        self.lifecycle = cycle.Lifecycle(last_epoch=tools.state.load().last_epoch)
        tools.state.save(name, SavedDeployment(goal=goal, plan=plan), self.lifecycle.last_epoch)
        self.plan: Plan | None = None  # of the current deployment, or of the last one
        self.deployment: Deployment | None = None  # the current one; None once its workers are stopped
        self._first_plan = plan
        self._tools = tools
        self._clock = clock
        self._replanner = Replanner(self.kind, tools, self.requests.admission, clock)
        self._work: asyncio.Task[None] | None = None  # executes the actions of the current phase
        self._finished: asyncio.Future[HearthError | None] = asyncio.get_running_loop().create_future()

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One line for `hearth status` and the log."""
        return describe(self.lifecycle)

    def history(self) -> tuple[PhaseEntered, ...]:
        return history_of(self.lifecycle, self._clock())

    # ---- public API -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` is called. Raises an error that retrying cannot fix."""
        try:
            if not self.lifecycle.finished:  # False if `stop` was called before `run`
                self.handle(cycle.GoalSet(self._first_plan))
            if (error := await self._finished) is not None:
                raise error
        finally:
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait({self._work})
            if self.deployment is not None:
                await self.deployment.close()
            await self.requests.close()

    def stop(self) -> None:
        """Drain running requests, then end. A second call ends at once."""
        self.handle(cycle.StopRequested())

    def device_changed(self, device: Device) -> None:
        """Callback of the fleet: report the deployment as lost if this change breaks it."""
        loaded = self.lifecycle.phase in ("serving", "draining")
        if self.deployment is not None and (error := loss_error(device, self.deployment, loaded)) is not None:
            self._lost(self.deployment, error)

    # ---- the life cycle -------------------------------------------------------------------------------------------

    def handle(self, event: cycle.Event) -> None:
        """Apply an event to the life cycle and start the resulting actions."""
        before = self.state
        self.lifecycle, actions = cycle.step(self.lifecycle, event, self._clock())
        if self.state != before:
            self._tools.report(self.state)
        for action in actions:
            self._at_once(action, self.lifecycle.error)
        if rest := [action for action in actions if action not in _AT_ONCE]:
            self._work = asyncio.create_task(self._perform(rest, self.lifecycle, self._work))
            self._work.add_done_callback(self._fault)

    def _at_once(self, action: cycle.Action, error: HearthError | None) -> None:
        match action:
            case "stop_admitting":
                self.requests.admission.close()
            case "refuse_requests":
                self.requests.admission.close(NotServing(state=self.state))
            case "record_loss":
                self.requests.last_error = str(error)
                for device in self.deployment.plan.devices if self.deployment is not None else ():
                    if isinstance(error, WorkerDied | DeviceLost) and error.device == device.name:
                        self._replanner.lost(device.device_id)
                        if isinstance(error, WorkerDied):
                            self._tools.fleet.quarantine(device.device_id)

    async def _perform(
        self, actions: list[cycle.Action], state: cycle.Lifecycle, before: asyncio.Task[None] | None
    ) -> None:
        """Cancel the previous task, execute these actions in order and report the last one's outcome as an event.

        Stops early, without an event, when a newer event has started another task.
        """
        if before is not None:
            before.cancel()
            await asyncio.wait({before})
        event = None
        try:
            for action in actions:
                if self._work is asyncio.current_task():
                    event = await self._do(action, state)
        except Exception as error:
            failure = failure_of(error)
            self.requests.last_error = str(failure)
            event = cycle.WorkFailed(failure)
        if event is not None and self._work is asyncio.current_task():
            self.handle(event)

    async def _do(self, action: cycle.Action, state: cycle.Lifecycle) -> cycle.Event | None:
        tools, deployment, plan = self._tools, self.deployment, state.plan
        match action:
            case "await_devices" if state.saved is not None:
                return await self._await_devices(state.saved)
            case "settle":
                return await self._settle(recovering=state.has_served)
            case "profile":
                return cycle.DevicesProfiled(await self.kind.profile(state.devices))
            case "make_plan":
                plan = await self.kind.plan(state.cluster, state.has_served)
                self._replanner.considered(state.devices, plan)
                return cycle.PlanMade(plan, tools.fleet.last_epoch)
            case "push" if plan is not None:
                tools.state.save(self.name, SavedDeployment(goal=self.goal, plan=plan), plan.epoch)
                self.plan = plan
                self.deployment = deployment = self.kind.deployment(plan, self.name)
                await deployment.push(self.kind.weights(plan), tools.progress)
                tools.report(
                    f"sent {format_bytes(deployment.sent_bytes)} of weights; devices forwarded "
                    f"{format_bytes(deployment.forwarded_bytes)}; chunks already on a device were not sent again"
                )
                return cycle.ChunksPushed(plan.epoch)
            case "load" if deployment is not None:
                await deployment.load(tools.profiler.links, tools.settings.encrypt_data_plane)
                return cycle.WorkersLoaded(deployment.epoch)
            case "warm_up" if deployment is not None:
                await self.kind.warm_up(deployment)
                return cycle.WarmedUp(deployment.epoch)
            case "serve" if deployment is not None:
                return await self._serve(deployment)
            case "drain":
                try:
                    await with_timeout(tools.settings.drain_seconds, self.requests.admission.drained())
                except asyncio.TimeoutError:
                    return cycle.DrainTimedOut()
                return cycle.Drained()
            case "take_down":
                if deployment is not None:
                    await deployment.close()
                    self.deployment = None
            case "wait_to_retry":
                await asyncio.sleep(cycle.RETRY_SECONDS)
                return cycle.RetryDue()
            case "finish":
                if not self._finished.done():
                    self._finished.set_result(state.error if state.phase == "failed" else None)
            case _:
                raise AssertionError(f"cannot {action} in {state}")
        return None

    def _fault(self, work: asyncio.Task[None]) -> None:
        """End `run` with an unexpected exception of a task; otherwise the deployment would stay in its phase for ever."""
        if not work.cancelled() and (error := work.exception()) is not None and not self._finished.done():
            self._finished.set_exception(error)

    # ---- devices of a plan ----------------------------------------------------------------------------------------

    async def _await_devices(self, plan: Plan) -> cycle.PlanRestored | cycle.PlanSetAside:
        """Wait for all devices of a saved plan and measure their links. The plan must also respect the user's limits."""
        try:
            self.kind.check(plan)
        except BadPlan as error:
            return cycle.PlanSetAside(error.reason)
        if not await self._all_there(plan):
            return cycle.PlanSetAside("not all of its devices are available")
        there = self._tools.fleet.usable()
        offered = {device.device_id: device.telemetry.memory_budget_bytes for device in there if device.telemetry}
        if against := limit_violation(plan, self.goal.limits, self.goal.exclude, offered):
            self._tools.report(f"the given plan is not used: {against}")
            return cycle.PlanSetAside(against)
        self._replanner.restored(plan)
        return cycle.PlanRestored(self._tools.fleet.last_epoch)

    async def _all_there(self, plan: Plan) -> bool:
        wanted = {device.device_id for device in plan.devices}
        deadline = time.monotonic() + _WAIT_FOR_DEVICES_SECONDS
        while time.monotonic() < deadline:
            there = [device for device in self._tools.fleet.usable() if device.device_id in wanted]
            if len(there) == len(wanted):
                links = await self._tools.profiler.measure_links(there)
                return len(links) == len(wanted) * (len(wanted) - 1)
            await asyncio.sleep(0.1)
        return False

    async def _settle(self, recovering: bool) -> cycle.DevicesSettled:
        """Wait for the fleet to settle. `recovering`: skip the quiet period and the minimum number of devices."""
        settings, fleet = self._tools.settings, self._tools.fleet
        quiet_seconds, min_devices = (0.0, 1) if recovering else (settings.settle_seconds, settings.min_devices)
        await fleet.settle(quiet_seconds, min_devices, _WAIT_FOR_DEVICES_SECONDS)
        devices = allowed(self.goal, fleet.usable())
        if not devices:
            raise NoDevices(seconds=_WAIT_FOR_DEVICES_SECONDS)
        self.goal = self.goal.model_copy(update={"keep_plan": False})  # no plan was given, or it cannot be used
        names = [*(limit.device for limit in self.goal.limits), *self.goal.exclude]
        for name in unknown_names(names, fleet.devices.values()):  # mistyped, or the device joins later
            self._tools.report(f"warning: no device here is called {name} yet; its limit applies once it joins")
        return cycle.DevicesSettled(tuple(devices))

    # ---- serving --------------------------------------------------------------------------------------------------

    async def _serve(self, deployment: Deployment) -> cycle.Event | None:
        """Open admission to the deployment, tune it, and look for a better plan until the phase ends."""
        monitor = DriftMonitor(deployment.plan)
        self.requests.watched = (deployment, monitor)
        self.requests.admission.open(deployment, self.kind.capacity(deployment))
        try:
            await self.kind.tune(deployment)
            if self.goal.keep_plan:
                return None
            better = await self._replanner.run(self.goal, deployment, monitor)
        except Exception as error:
            failure = failure_of(error)
            deployment.fail(failure)
            return cycle.DeploymentLost(deployment.epoch, failure)
        return cycle.BetterPlanMade(better, deployment.epoch, self._tools.fleet.last_epoch)

    def _request_failed(self, deployment: Deployment, error: HearthError) -> None:
        """Report the deployment as lost, unless the error concerns only the request itself."""
        if error.scope != "request":
            self._lost(deployment, error)

    def _lost(self, deployment: Deployment, error: HearthError) -> None:
        deployment.fail(error)
        self.handle(cycle.DeploymentLost(deployment.epoch, error))


def _open(goal: Goal, tools: Tools, requests: Requests[Any]) -> ModelKind[Any]:
    if isinstance(goal, GraphGoal):
        return GraphKind(goal, tools, requests)
    return TransformerKind(goal, tools, requests)
