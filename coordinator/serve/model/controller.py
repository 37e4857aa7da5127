"""Serves one model: executes the actions of its life cycle (`lifecycle`) and feeds the outcomes back as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from coordinator.deploy.deployment import Deployment, health_error, loss_error
from coordinator.deploy.graph import GraphDeployment
from coordinator.devices.registry import Device
from coordinator.models.graph_file import GraphFile
from coordinator.serve.goal import TransformerModel
from coordinator.serve.kinds.graph import GraphKind
from coordinator.serve.kinds.kind import ModelKind, SharedServices
from coordinator.serve.kinds.transformer import TransformerKind
from coordinator.serve.model import lifecycle as cycle
from coordinator.serve.model.bring_up import MAKE_ROOM_SECONDS, BringUp, Neighbour, one_of_each_machine, warm_workers
from coordinator.serve.model.idle import KeepAlive
from coordinator.serve.model.lifecycle_text import describe_cause, describe_state, history_entries, lifecycle_events
from coordinator.serve.recovery.late_links import LateLinks
from coordinator.serve.recovery.preparation import describe as describe_preparation
from coordinator.serve.recovery.preparation import prepared_losses
from coordinator.serve.recovery.preparer import Preparer
from coordinator.serve.replan.calibrated import CalibratedReplanner
from coordinator.serve.replan.drift import DriftMonitor
from coordinator.serve.replan.replanner import Replanner
from coordinator.serve.requests.runner import Requests, as_hearth_error
from coordinator.serve.state import Goal, GraphGoal, SavedDeployment
from hearth import errors
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import cancel_all, first_result, loop_time, start_in, with_timeout
from hearth.platform.units import format_bytes
from hearth.wire.messages import PhaseEntered, PreparedLoss, WorkerLibrary

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02  # interval of looking whether the workers have ended
# Timeout of the small request after a failed step: clients wait, and the workers of a plan that does not work are kept anyway.
_PROBE_SECONDS = 1.5  # and
_PROBE_FACTOR = 3.0  # times the predicted duration of a whole step
# Actions without I/O: executed inside `handle`, before any task is started.
_IMMEDIATE_ACTIONS: tuple[cycle.Action, ...] = ("stop_admitting", "refuse_requests", "record_loss")


class Controller:
    """Runs the deployment `name`. The plan of `saved` is tried first, if all its devices are available.

    If it is `unloaded`, the model is loaded for the first request only. `running` is the plan that was deployed last, for
    the same goal: if its workers still run, they are taken over. `others` returns the deployments of this coordinator, oldest
    first.

    Raises BadModelFile or BadSetting if the model cannot be served; BadPlan if `goal.keep_plan` is set and the plan does not
    fit the model.
    """

    def __init__(
        self,
        name: str,
        saved: SavedDeployment,
        model: TransformerModel | GraphFile,
        services: SharedServices,
        clock: Callable[[], float] = loop_time,
        running: Plan | None = None,
        others: Callable[[], Iterable[Neighbour]] = tuple,
    ) -> None:
        services = replace(services, deployment=name)
        self.name = name
        self.goal = goal = saved.goal
        limit = services.settings.queue_limit
        self.requests: Requests[Any] = Requests(
            limit, self._why_not_ready, self._report_loss, self._probe, self._observe
        )
        self.kind = _kind_of(goal, model, services, self.requests)
        if saved.plan is not None and goal.keep_plan:
            self.kind.check(saved.plan)
        self.lifecycle = cycle.Lifecycle(last_epoch=services.state.current.last_epoch)
        self.plan: Plan | None = None  # of the current deployment, or of the last one
        self.deployment: Deployment | None = None  # the current one; None once it is retired or its workers are stopped
        self._retired: list[Deployment] = []  # previous ones, oldest first, whose workers the next plan may keep
        self._monitored: tuple[Deployment, DriftMonitor] | None = None  # the current deployment
        self._background: set[asyncio.Task[None]] = set()  # awaited at the end: each takes seconds
        self.keep_workers = False  # whether to leave the workers to another coordinator at the end
        self._goal_set = cycle.GoalSet(saved.plan, running, saved.unloaded)
        if running is not None and not saved.unloaded:
            services.fleet.running_epochs[name] = running.epoch
        self._services = services
        self._added = saved.added
        self._save(saved.plan or running, self.lifecycle.last_epoch, saved.unloaded)
        self._clock = clock
        self._replanner = Replanner(self.kind, services, self.requests.admission, clock)
        self._calibrated_replanner = None
        if isinstance(self.kind, GraphKind) and self.kind.measurements() is not None:
            self._calibrated_replanner = CalibratedReplanner(self.kind, services, self._replanner, clock)
        self._late_links = LateLinks(services.fleet, services.profiler, self._report_loss)
        self._preparer = Preparer(self.kind, services, self.requests.admission)
        self._bring_up = BringUp(goal, self.kind, services, self._replanner, self._preparer, others)
        self.keep_alive = KeepAlive(goal, self.requests.admission)
        self._action_task: asyncio.Task[None] | None = None  # executes the actions of the current phase
        self._has_ended = False  # whether `run` ends: a request that fails meanwhile must not start another deployment
        self._finished: asyncio.Future[errors.HearthError | None] = asyncio.get_running_loop().create_future()

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One line for `hearth status` and the log."""
        return describe_state(self.lifecycle)

    @property
    def missing_bytes(self) -> int:
        """By how many bytes the model did not fit at the last attempt; 0 if that is not why it is not ready."""
        error = self.lifecycle.failure
        return error.missing_bytes if isinstance(error, errors.ModelDoesNotFit) else 0

    def _why_not_ready(self) -> errors.HearthError:
        """The error of requests that have waited in vain: by how many bytes the model does not fit, if it does not."""
        error = self.lifecycle.failure
        return error if error is not None and self.missing_bytes else errors.NotServing(state=self.state)

    def history(self) -> tuple[PhaseEntered, ...]:
        return history_entries(self.lifecycle, self._clock())

    def has_worked(self) -> bool:
        """Whether the life cycle goes on: in a phase that must end, a task works towards its end."""
        working = self._action_task is not None and not self._action_task.done()
        return working or self._finished.done() or self.lifecycle.phase in ("idle", "serving")

    @property
    def redundancy(self) -> str:
        """Whether the deployment survives the loss of any one device, in one line; empty while nothing is served."""
        if self.lifecycle.phase != "serving" or self.deployment is None:
            return ""
        return describe_preparation(self._preparer.preparation, self.deployment.plan, self._preparer.spares)

    @property
    def losses(self) -> tuple[PreparedLoss, ...]:
        """What is prepared for the loss of each device of the plan; empty while nothing is served."""
        if self.lifecycle.phase != "serving" or self.deployment is None:
            return ()
        ahead = self._preparer
        return prepared_losses(ahead.preparation, self.deployment.plan, ahead.sending, ahead.spares)

    # ---- public API -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` is called. Raises an error that retrying cannot fix."""
        try:
            if not self.lifecycle.finished:  # False if `stop` was called before `run`
                self.handle(self._goal_set)
            if (error := await self._finished) is not None:
                raise error
        finally:
            self._has_ended = True
            if self._action_task is not None:
                self._action_task.cancel()
                await asyncio.wait({self._action_task})
            if self.keep_workers:
                self._retired = []
                if self.deployment is not None:
                    self.requests.admission.close(errors.NotServing(state="another coordinator takes over"))
                    self.deployment.fail(errors.LeaseLost(device="this home"))
                    self.deployment = None
            await self._late_links.close()
            await self._stop_workers()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self.requests.close()

    def stop(self) -> None:
        """Drain running requests, then end. A second call ends at once."""
        self.handle(cycle.StopRequested())

    def lose_deployment(self, error: errors.HearthError) -> None:
        """Report the deployment as lost, if there is one."""
        if self.deployment is not None:
            self._report_loss(self.deployment, error)

    async def make_room(self, claimant: str) -> None:
        """End the workers, because a pinned deployment needs their memory; plan again with what it leaves."""
        if self.lifecycle.may_make_room:
            self.handle(cycle.RoomClaimed(claimant))
        deadline = loop_time() + MAKE_ROOM_SECONDS
        while self._services.resources.held_bytes(self.name) and loop_time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    def device_changed(self, device: Device) -> None:
        """Callback of the fleet: report the deployment as lost if this change breaks it."""
        loaded = self.lifecycle.phase in ("serving", "draining")
        if self.deployment is None:
            return
        if (error := loss_error(device, self.deployment, loaded)) is not None:
            self._report_loss(self.deployment, error)
        else:
            self._late_links.device_changed(device, self.deployment)

    # ---- the life cycle -------------------------------------------------------------------------------------------

    def handle(self, event: cycle.Event) -> None:
        """Apply an event to the life cycle and start the resulting actions; no effect once `run` ends."""
        if self._has_ended:
            return
        before, state_before = self.lifecycle, self.state
        self.lifecycle, actions = cycle.step(self.lifecycle, event, self._clock())
        if self.lifecycle.plan is not None:  # the next plan of another deployment has a newer epoch
            self._services.fleet.last_epoch = max(self._services.fleet.last_epoch, self.lifecycle.last_epoch)
            plans = [self.lifecycle.plan, *filter(None, [self.lifecycle.next_plan])]
            self._services.resources.take(self.name, plans)
        if self.state != state_before:
            self._services.report(self.state)
        for recorded in lifecycle_events(self.name, before, self.lifecycle):
            self._services.record(recorded)
        for action in actions:
            self._execute_immediate(action, self.lifecycle.error)
        if remaining := [action for action in actions if action not in _IMMEDIATE_ACTIONS]:
            self._action_task = asyncio.create_task(
                self._execute_in_order(remaining, self.lifecycle, self._action_task)
            )
            self._action_task.add_done_callback(self._on_task_done)

    def _execute_immediate(self, action: cycle.Action, error: errors.HearthError | None) -> None:
        match action:
            case "stop_admitting":
                self.requests.admission.close()
            case "refuse_requests":
                self.requests.admission.close(errors.NotServing(state=self.state))
            case "record_loss":
                self.requests.last_error = str(error)
                if error is not None:
                    self._record_fault(error)

    async def _probe(self, deployment: Deployment, error: errors.HearthError) -> None:
        """Run a small request after a failed step. Raises if the plan no longer works.

        If a rank waited for another, their link is checked first, since the small request would wait for it, too.
        """
        if pair := [self._services.fleet.devices[each] for each in _suspect_pair(error, deployment.plan)]:
            waiting, other = pair
            if not await deployment.unless_failed(self._services.profiler.can_connect(waiting, other)):
                self._services.profiler.link_is_cut(waiting.device_id, other.device_id)
                raise errors.LinkLost(device=waiting.name, peer=other.name, reason=error.explanation())
        predicted = deployment.plan.predicted.latency_seconds
        await with_timeout(_PROBE_SECONDS + _PROBE_FACTOR * predicted, self.kind.probe(deployment))

    def _record_fault(self, error: errors.HearthError) -> None:
        """Have the next plan avoid the device or the link that the error names, or use a device that it cannot do without."""
        if isinstance(error, errors.ModelDoesNotFit | errors.NoPlacement):
            self._services.fleet.pardon()
        if self.deployment is None:
            return
        fleet = self._services.fleet
        self._services.profiler.forget_links(_suspect_pair(error, self.deployment.plan))
        had_served = self.lifecycle.phase == "settling" and not self.lifecycle.lost
        for device_id in fleet.record_fault(self.deployment.plan.devices, error, may_restart=had_served):
            known = fleet.devices.get(device_id)
            if isinstance(error, errors.DeviceLost) or (known is not None and known.is_quarantined(loop_time())):
                self._replanner.record_loss(device_id)

    async def _execute_in_order(
        self, actions: list[cycle.Action], state: cycle.Lifecycle, previous: asyncio.Task[None] | None
    ) -> None:
        """Cancel the previous task, execute these actions in order and report the last one's outcome as an event.

        Stops early, without an event, when a newer event has started another task.
        """
        if previous is not None:
            previous.cancel()
            await asyncio.wait({previous})
        event = None
        try:
            for action in actions:
                if self._action_task is asyncio.current_task():
                    event = await self._execute(action, state)
        except Exception as error:
            failure = as_hearth_error(error)
            self.requests.last_error = str(failure)
            event = cycle.ActionFailed(failure)
        if event is not None and self._action_task is asyncio.current_task():
            self.handle(event)

    async def _execute(self, action: cycle.Action, state: cycle.Lifecycle) -> cycle.Event | None:
        services, deployment, plan = self._services, self.deployment, state.plan
        match action:
            case "take_over" if plan is not None:
                return await self._take_over(plan)
            case "resume" if plan is not None and deployment is not None:
                return await self._resume(plan, deployment)
            case "await_devices" if state.saved_plan is not None:
                event = await self._bring_up.await_devices(state.saved_plan, state.has_served)
                if isinstance(event, cycle.SavedPlanRejected):
                    services.report(describe_cause(event))
                return event
            case "settle":
                if not state.has_served:
                    services.spare_planners.keep(self.kind.planner, at_once=True)
                settled = await self._bring_up.settle(state.has_served, state.error)
                if isinstance(settled, cycle.DevicesSettled):  # no plan was given, or it cannot be used
                    self.goal = self.goal.model_copy(update={"keep_plan": False})
                return settled
            case "profile":
                cluster = await self.kind.profile(state.devices, self._held_plan)
                if not state.has_served:  # later, workers run, and `prepared` has others prepare for theirs
                    self._warm_workers(device.device_id for device in one_of_each_machine(state.devices))
                return cycle.DevicesProfiled(cluster)
            case "make_plan":
                plan = await self._bring_up.make_plan(state, self._held_plan)
                self._replanner.record_best_plan(state.devices, plan)
                if summary := self.kind.summary(plan):
                    services.report(summary)
                return cycle.PlanMade(plan, services.fleet.last_epoch)
            case "push" if plan is not None:
                self._save(plan, plan.epoch)
                await services.state.file.saved()  # before any device sees the epoch
                self.plan = plan
                self.deployment = deployment = self.kind.deployment(plan, self.name)
                for device in self._devices_of(plan):
                    if (lost := health_error(device)) is not None:  # while the plan was made
                        raise lost
                if not state.has_served:
                    self._warm_workers(device.device_id for device in plan.devices)
                if parts := self._bring_up.take_prepared(plan):
                    deployment.parts = parts
                    return cycle.ChunksPushed(plan.epoch)
                await deployment.push(await self.kind.weights(plan), services.progress)
                services.report(
                    f"sent {format_bytes(deployment.sent_bytes)} of weights; devices forwarded "
                    f"{format_bytes(deployment.forwarded_bytes)}; chunks already on a device were not sent again"
                )
                return cycle.ChunksPushed(plan.epoch)
            case "load" if deployment is not None:
                services.fleet.running_epochs[self.name] = deployment.epoch
                deployment.check_may_run()
                await deployment.load(services.profiler.links, services.settings.encrypt_data_plane)
                if deployment.weight_error:
                    error_percent = f"{100 * deployment.weight_error:.2g} %"
                    services.report(f"quantisation error of the weights: {error_percent} (relative, root mean square)")
                return cycle.WorkersLoaded(deployment.epoch)
            case "warm_up" if deployment is not None:
                await self.kind.probe(deployment)
                return cycle.WarmedUp(deployment.epoch)
            case "serve" if deployment is not None:
                return await self._serve(deployment)
            case "drain":
                try:
                    await with_timeout(services.settings.drain_seconds, self.requests.admission.wait_until_drained())
                except asyncio.TimeoutError:
                    return cycle.DrainTimedOut()
                return cycle.Drained()
            case "retire_workers":
                if deployment is not None:
                    deployment.fail(errors.NotServing(state="the plan is being replaced"))
                    self.deployment = None
                    self._retired.append(deployment)
            case "release_workers":
                for retired in self._retired:  # a worker that goes on has the new epoch, and this does not concern it
                    start_in(self._background, self._unload(retired))
                self._retired = []
            case "stop_workers":
                await self._stop_workers()
            case "wait_to_retry":
                await asyncio.sleep(cycle.retry_seconds(state))
                return cycle.RetryDue()
            case "await_request":
                self._save(state.saved_plan, state.last_epoch, unloaded=True)
                await self.requests.admission.wait_for_request()
                return cycle.RequestWaits()
            case "finish":
                if not self._finished.done():
                    self._finished.set_result(state.error if state.phase == "failed" else None)
            case _:
                raise AssertionError(f"cannot {action} in {state}")
        return None

    def _save(self, plan: Plan | None, epoch: int, unloaded: bool = False) -> None:
        saved = SavedDeployment(goal=self.goal, plan=plan, unloaded=unloaded, added=self._added)
        self._services.state.save(self.name, saved, epoch)

    def _warm_workers(self, device_ids: Iterable[str]) -> None:
        """Have devices import in the background what their workers need."""
        library: WorkerLibrary = "onnxruntime" if self.kind.planner == "graph" else "torch"
        start_in(self._background, warm_workers(self._services.fleet, list(device_ids), library))

    @property
    def _held_plan(self) -> Plan | None:
        """The plan that was deployed last, if its workers run on until the next one is loaded."""
        return self._retired[-1].plan if self._retired else None

    async def _stop_workers(self) -> None:
        """Stop the workers of the deployment and of the previous ones."""
        running = [*self._retired, *([self.deployment] if self.deployment is not None else [])]
        self.deployment, self._retired = None, []
        await asyncio.gather(*map(self._unload, running))
        if self.lifecycle.plan is None:
            self._services.resources.take(self.name, ())

    async def _unload(self, deployment: Deployment) -> None:
        """Stop the workers of a deployment; an agent that is away stops its own when it grants its lease again."""
        running_epochs = self._services.fleet.running_epochs
        if running_epochs.get(self.name) == deployment.epoch:
            del running_epochs[self.name]
        await deployment.close()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """End `run` with an unexpected exception of a task; otherwise the deployment would never leave its phase."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._finished.done():
            self._finished.set_exception(error)

    async def _take_over(self, plan: Plan) -> cycle.WorkersTakenOver | cycle.TakeOverFailed:
        """Take over the workers of the plan, if all of them run."""
        try:
            running = await self._bring_up.running_workers(plan)
        except errors.BadPlan as error:
            return cycle.TakeOverFailed(error.reason)
        deployment = self.kind.deployment(plan, self.name)
        if running:
            self.plan, self.deployment = plan, deployment
        else:
            self._retired.append(deployment)  # workers that had not loaded when their coordinator ended
        found = {device.device_id for device in running}
        if missing := [each.name for each in plan.devices if each.device_id not in found]:
            return cycle.TakeOverFailed(f"they do not run on {', '.join(missing)}", any_runs=bool(running))
        await deployment.take_over(max(device.taken_over[self.name].last_step for device in running))
        self._replanner.record_restored_plan(plan)
        return cycle.WorkersTakenOver(plan.epoch)

    def _devices_of(self, plan: Plan) -> list[Device]:
        """The devices of a plan, as they are now."""
        return [self._services.fleet.devices[each.device_id] for each in plan.devices]

    async def _resume(self, plan: Plan, lost: Deployment) -> cycle.WorkersTakenOver | cycle.DeploymentLost:
        """Once the leases on the plan's devices are back, go on with the workers of a deployment, which have run on."""
        try:
            while True:
                await self._bring_up.await_leases(plan)
                for device in self._devices_of(plan):
                    if (error := loss_error(device, lost, loaded=True)) is not None:
                        raise error
                self.deployment = deployment = self.kind.deployment(plan, self.name)
                with suppress(errors.LeaseLost):
                    await deployment.take_over(lost.last_step)
                    return cycle.WorkersTakenOver(plan.epoch)
        except errors.HearthError as error:
            return cycle.DeploymentLost(plan.epoch, error)

    # ---- serving --------------------------------------------------------------------------------------------------

    async def _serve(self, deployment: Deployment) -> cycle.Event | None:
        """Open admission to the deployment, tune it, and look for a better plan until the phase ends."""
        monitor = DriftMonitor(deployment.plan)
        self._monitored = (deployment, monitor)
        self.requests.admission.open(deployment, self.kind.capacity(deployment), reserve=self.kind.answers == "text")
        self._services.spare_planners.keep(self.kind.planner)
        preparing = asyncio.create_task(self._preparer.run(self.goal, deployment))
        try:
            await self.kind.tune(deployment)
            searches: list[Awaitable[Plan | None]] = []
            if self.goal.keep_plan:
                searches.append(preparing)  # which does not end
            else:
                searches.append(self._replanner.run(self.goal, deployment, monitor))
                if self._calibrated_replanner is not None:
                    assert isinstance(deployment, GraphDeployment)
                    searches.append(self._calibrated_replanner.run(self.goal, deployment))
            searches.append(self.keep_alive.wait_until_idle())
            better_plan = await first_result(searches)
        except Exception as error:
            failure = as_hearth_error(error)
            deployment.fail(failure)
            return cycle.DeploymentLost(deployment.epoch, failure)
        finally:
            await cancel_all([preparing])
        if better_plan is None:
            return cycle.WentIdle(deployment.epoch)
        return cycle.BetterPlanMade(better_plan, deployment.epoch, self._services.fleet.last_epoch)

    def _observe(
        self,
        deployment: Deployment,
        relative_size: float,
        compute_seconds: Sequence[float],
        total_seconds: float | None,
    ) -> None:
        """Pass the times of a step or request to the drift monitor; those of an earlier deployment are ignored."""
        if self._monitored is not None and self._monitored[0] is deployment:
            self._monitored[1].observe(relative_size, compute_seconds, total_seconds)

    def _report_loss(self, deployment: Deployment, error: errors.HearthError) -> None:
        if isinstance(error, errors.LeaseLost) and isinstance(deployment.failure, errors.LeaseLost):
            return  # it waits for the leases already
        deployment.fail(error)
        self.handle(cycle.DeploymentLost(deployment.epoch, error))


def _suspect_pair(error: errors.HearthError, plan: Plan) -> list[str]:
    """The ids of the device that waited and of the one that it waited for; empty if the error names no such pair."""
    if not isinstance(error, errors.StepFailed | errors.LinkLost):
        return []
    ids = {device.name: device.device_id for device in plan.devices}
    return [ids[error.device], ids[error.peer]] if {error.device, error.peer} <= ids.keys() else []


def _kind_of(
    goal: Goal, model: TransformerModel | GraphFile, services: SharedServices, requests: Requests[Any]
) -> ModelKind[Any]:
    if isinstance(goal, GraphGoal):
        assert isinstance(model, GraphFile)
        return GraphKind(goal, model, services, requests)
    assert isinstance(model, TransformerModel)
    return TransformerKind(goal, model, services, requests)
