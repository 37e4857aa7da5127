"""The coordinator service: answers clients, advertises itself over mDNS, runs the fleet and the deployments."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import hearth
from coordinator.deploy.distribution import PushProgress
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.serve.clients.client_port import ClientPort
from coordinator.serve.clients.http_gateway import keep_http_gateway
from coordinator.serve.clients.key_registry import RegisteredKeys
from coordinator.serve.clients.trust import Trust, error_for_app, response_for_app
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.deployments import Deployments
from coordinator.serve.events.metrics import CONTENT_TYPE, HomeMetrics
from coordinator.serve.events.requests import RequestRecorder
from coordinator.serve.events.samples import DeviceChanges, keep_sampling
from coordinator.serve.events.stream import EVENTS_FILE, EventFile, EventStream
from coordinator.serve.kinds.kind import SharedServices
from coordinator.serve.model.controller import Controller
from coordinator.serve.requests.admission import CALLER
from coordinator.serve.standby.followers import Followers, HandOver, Replication
from coordinator.serve.standby.leadership import AnotherLeads, Leadership
from coordinator.serve.state import Goal, StateFile, goal_from_json
from hearth.errors import AppRevoked, BadRequest, HearthError, NotServing, ProtocolMismatch
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import cancel_all, loop_time
from hearth.platform.discovery import COORDINATOR_SERVICE, advertised
from hearth.platform.disk import hung_paths
from hearth.platform.notify import Notifier
from hearth.platform.security import HomeKey, agent_access
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Reply, Response

log = logging.getLogger(__name__)

# Messages that change something: repeated by a client, they get the answer of the first one.
_CHANGES = (wire.AddApp, wire.RevokeApp, wire.AddDevice, wire.RevokeDevice, wire.ServeModel, wire.StopModel)
_LEAVES = "it leaves its devices to its standby"
_ASKS_FOR_LEASES = "it asks most devices for their leases, because its standby may lead"
_MAX_ANSWERS = 1024  # to changes, of all callers; a change is rare, so this covers hours
_KEPT_SECONDS = 600.0  # longer than the timeout of any such call
_ANSWER_SECONDS = 2.0  # for the last answers to leave after a stop; they are small, and the clients wait for them


class Service:
    """The leading coordinator: answers clients, and runs the deployments on the fleet."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        home: HomeKey,
        report: Callable[[str], None],
        progress: PushProgress,
        trust: Trust,
        state: StateFile,
        port: ClientPort,
    ) -> None:
        self._settings = settings
        self._trust = trust
        self._port = port
        self._state = state
        self._fleet = Fleet(
            agent_access(home),
            settings.name,
            settings.interfaces,
            settings.devices,
            on_change=self._device_changed,
            holder=self._state.current.holder,
            device_keys=lambda: trust.devices.current.keys,
        )
        profiler = Profiler(self._fleet, settings.state_dir / "profiles", report, provisional=True)
        self._events = EventStream(EventFile(settings.state_dir / EVENTS_FILE))
        self._device_changes = DeviceChanges(self._events)
        self._services = SharedServices(
            self._fleet, profiler, settings, self._state, report, progress, record=self._events.record
        )
        self.deployments = Deployments(self._services)
        self._metrics = HomeMetrics(self._fleet, profiler, self.deployments.controllers)
        self._events.listeners.append(self._metrics.count)
        self._repeats = RepeatedChanges()
        self.leadership = Leadership(self._fleet, self._state, self.deployments.lose_all)
        self._followers = Followers()
        self._hand_over = HandOver(self._followers)
        self._replication = Replication(
            settings, self._state, (trust.apps, trust.devices), self.leadership, self._followers, self._hand_over,
            self._model_files,
        )  # fmt: skip
        # By type of message, but for requests to a model and changes.
        self._answers: Mapping[type[wire.Message], Callable[[Any], Awaitable[Response]]] = {
            wire.Hello: self._welcome, wire.GetReadiness: self._readiness, wire.GetStatus: self._status,
            wire.ListDevices: self._list_devices, wire.ListModels: self._list_models, wire.ListApps: self._list_apps,
            wire.GetMetrics: self._read_metrics, wire.WatchEvents: self._events.watch, wire.Follow: self._follow,
            wire.KeepLoaded: self._keep_loaded,
        }  # fmt: skip
        self._stopping: asyncio.Task[None] | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether SIGTERM or SIGINT has come."""
        return self._stopping is not None

    async def run(self, goal: Goal | None, plan: Plan | None = None, name: str = "") -> None:
        """Serve `goal`, or the saved deployments if it is None, until SIGTERM or SIGINT. A second signal skips draining.

        `name`: of the deployment; empty: that of its model. Raises AnotherLeads, and the errors of `Controller` and
        `Deployments.run`. If a standby follows, the first signal hands over to it, if it accepts, instead of draining.
        """
        notifier = Notifier(os.environ)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, notifier)
        async with AsyncExitStack() as stack:
            if goal is not None:
                await self.deployments.create(goal, plan, name)
            else:
                await self.deployments.restore()
            if self._stopping is not None and self._stopping.done():  # before there was anything to stop
                self.deployments.stop()
            port = self._port
            await stack.enter_async_context(port.serving(self.handle))
            if self._settings.advertise:
                own = self._trust.keypair.public
                await stack.enter_async_context(
                    advertised(
                        COORDINATOR_SERVICE, port.port, own, secrets.token_hex(8), lambda: self._settings.interfaces
                    )
                )
            stack.push_async_callback(self._services.spare_planners.close)
            await stack.enter_async_context(self._fleet)
            self._services.report(f"listening on port {port.port}")
            notifier.send("READY=1")
            self.deployments.proofs["the client port"] = port.has_worked
            background: list[Coroutine[Any, Any, object]] = [
                self.deployments.run(), notifier.keep_alive(lambda: self.deployments.state, self.deployments.proofs),
                self.leadership.run(), self._hand_over.watch_disk(), self._hand_over.accepted.wait(),
                self._services.resources.watch(self._fleet.devices), self._events.run(),
                keep_sampling(self._fleet, self._services.profiler, self._events),
            ]  # fmt: skip
            self._events.record(wire.CoordinatorStarted(name=self._settings.name, version=hearth.__version__))
            if self._settings.http:
                background.append(keep_http_gateway(self._settings, self._trust, port.port, self._services.report))
            futures = set(map(asyncio.ensure_future, background))
            try:
                done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    finished.result()
            except AnotherLeads:
                self._keep_workers()
                raise
            finally:
                notifier.send("STOPPING=1")
                await cancel_all([*futures, *([self._stopping] if self._stopping is not None else [])])
                await port.finish(_ANSWER_SECONDS)

    def _stop(self, notifier: Notifier) -> None:
        notifier.send("STOPPING=1")
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._leave_or_stop())
        else:
            self.deployments.stop()

    async def _leave_or_stop(self) -> None:
        if not await self._hand_over.offer():
            self.deployments.stop()

    def _keep_workers(self) -> None:
        """Leave the workers to another coordinator at the end."""
        self._fleet.keep_workers = True
        self.deployments.keep_workers()

    def _model_files(self) -> dict[str, Sequence[Path]]:
        """The files of each deployment's model that a standby needs."""
        models: dict[str, Sequence[Path]] = {}
        for name, controller in self.deployments.controllers.items():
            try:
                models[name] = controller.kind.files
            except (OSError, HearthError) as error:
                log.warning("%s cannot be copied to a standby: %s", controller.goal.path, error)
        return models

    def _device_changed(self, device: Device) -> None:
        self._device_changes.note(device)
        self.deployments.device_changed(device)

    async def handle(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        """Answer one request. Raises HearthError, which the RPC server sends to the client."""
        CALLER.set(caller.public_key)
        if caller.public_key in self._trust.admins:
            return await self._answer(caller, message, payload)
        try:
            return response_for_app(await self._answer(caller, message, payload))
        except HearthError as error:
            raise error_for_app(error) from error

    async def _answer(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        if isinstance(message, wire.ModelRequest):
            return await self._run_model(caller, message, payload)
        if isinstance(message, _CHANGES):
            return await self._repeats.once(caller.public_key, message.request_id, partial(self._change, message))
        answer = self._answers.get(type(message))
        if answer is None:
            raise BadRequest(reason=f"the coordinator does not accept {type(message).__name__} messages")
        return await answer(message)

    async def _run_model(self, caller: Caller, message: wire.ModelRequest, payload: Sequence[Any]) -> Response:
        if self.leadership.may_be_replaced:
            raise NotServing(state=_ASKS_FOR_LEASES)
        controller = self.deployments.for_request(message)
        handler = controller.kind.handlers.get(type(message))
        if handler is None:
            raise BadRequest(reason=controller.kind.usage)
        app = self._trust.apps.current.keys.get(caller.public_key, "")
        recorder = RequestRecorder(message, app, controller, self._events.record)
        return await recorder.watch(handler(message, payload))

    async def _follow(self, message: wire.Follow) -> Response:
        """A standby follows, has stored what was sent to it, or takes over."""
        if message.takes_over:
            self._hand_over.accept()
            self._services.report(f"stopping: {message.name} takes over")
            self._keep_workers()
            return wire.Done()
        if message.confirmed:
            self._followers.confirm(message.confirmed)
            return wire.Done()
        if self._hand_over.accepted.is_set():
            raise NotServing(state=_LEAVES)
        await self._merge_keys(message)
        self._services.report(f"{message.name} is the standby of this coordinator")
        return self._replication.to_standby(message.name, message.confirms)

    async def _change(self, message: wire.ClientRequest) -> wire.Message:
        """Carry out a change. One of keys waits until the standbys have it; raises NotServing if one takes over without it."""
        match message:
            case wire.ServeModel():
                goal = goal_from_json(message.goal)
                return wire.ModelChanged(deployment=await self.deployments.add(goal, message.plan, message.name))
            case wire.StopModel():
                return wire.ModelChanged(deployment=await self.deployments.remove(message.name))
            case wire.AddApp():
                self._trust.apps.add(message.name, message.public_key, message.role)
                self._port.change_access()
            case wire.RevokeApp():
                await self._revoke(message.name)
            case wire.AddDevice():
                self._trust.devices.add(message.name, message.public_key)
                self._fleet.key_admitted(message.public_key)
            case wire.RevokeDevice():
                self._trust.devices.revoke(message.name)
                await self._fleet.drop_revoked()
        await asyncio.gather(
            self._trust.apps.file.saved(), self._trust.devices.file.saved(), self._followers.copy_change()
        )
        if self._hand_over.accepted.is_set() and not self._followers.latest_is_copied:
            raise NotServing(state=_LEAVES)
        return wire.KeysChanged(warning=self._why_keys_may_be_lost())

    def _why_keys_may_be_lost(self) -> str:
        """Why the latest change of keys may not last; empty if it does."""
        if not (self._trust.apps.file.is_saved and self._trust.devices.file.is_saved):
            return f"the disk of {self._settings.name} cannot be written: the change is lost if its coordinator ends before"
        if self.leadership.has_quorum and not self._followers.latest_is_copied:
            return "no standby has confirmed the change: it is lost, at least for a while, if this coordinator is lost"
        return ""

    async def _revoke(self, app: str) -> None:
        """Revoke an app, and end its requests, also its streams."""
        keys = [key for key, name in self._trust.apps.current.keys.items() if name == app]
        self._trust.apps.revoke(app)
        self._port.change_access()
        for key in keys:
            await self._port.end_requests(key, AppRevoked(app=app))

    async def _merge_keys(self, message: wire.Follow) -> None:
        """Admit and revoke the keys that a standby has and this coordinator lacks: it may have led meanwhile."""
        apps, devices = (
            registry.merge(
                RegisteredKeys(keys=dict(theirs.admitted), revoked=dict(theirs.revoked), roles=dict(theirs.roles))
            )
            for registry, theirs in ((self._trust.apps, message.apps), (self._trust.devices, message.devices))
        )
        admitted, revoked = {**apps.keys, **devices.keys}, {**apps.revoked, **devices.revoked}
        for keys, change in ((admitted, "admitted"), (revoked, "revoked")):
            if keys:
                self._services.report(f"{change} as on {message.name}: {', '.join(sorted(set(keys.values())))}")
        if not admitted and not revoked:
            return
        self._port.change_access()
        for key, app in apps.revoked.items():
            await self._port.end_requests(key, AppRevoked(app=app))
        await self._fleet.drop_revoked()
        for key in devices.keys:
            self._fleet.key_admitted(key)
        await self._followers.copy_change()

    # ---- answers --------------------------------------------------------------------------------------------------

    async def _welcome(self, message: wire.Hello) -> wire.Message:
        if message.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(peer=message.name, ours=PROTOCOL_VERSION, theirs=message.protocol)
        return wire.CoordinatorWelcome(version=hearth.__version__, name=self._settings.name)

    async def _readiness(self, message: wire.GetReadiness) -> wire.Message:
        return wire.Readiness(**_shown(self.deployments.for_request(message)))

    async def _list_devices(self, message: wire.ListDevices) -> wire.Message:
        await self._fleet.refresh_telemetry()
        links = tuple(self._services.profiler.links.values())
        return wire.DeviceList(devices=tuple(self._fleet.device_infos()), links=links)

    async def _read_metrics(self, message: wire.GetMetrics) -> Response:
        self._events.note_reader()
        return Reply(wire.Metrics(content_type=CONTENT_TYPE), [self._metrics.text()])

    async def _keep_loaded(self, message: wire.KeepLoaded) -> wire.Message:
        self.deployments.for_request(message).keep_alive.keep_loaded(message.seconds)
        return wire.Done()

    async def _list_models(self, message: wire.ListModels) -> wire.Message:
        return wire.ModelList(models=tuple(map(self._model_of, self.deployments.controllers.values())))

    async def _list_apps(self, message: wire.ListApps) -> wire.Message:
        apps = self._trust.apps.current
        return wire.AppList(names=tuple(sorted(apps.keys.values())), revoked=tuple(sorted(set(apps.revoked.values()))))

    async def _status(self, message: wire.GetStatus) -> wire.Message:
        controller = self.deployments.for_request(message)
        requests, deployment = controller.requests, controller.deployment
        return wire.Status(
            name=self._settings.name,
            version=hearth.__version__,
            deployment=controller.name,
            phase=controller.lifecycle.phase,
            state=controller.state,
            history=controller.history(),
            model_path=controller.goal.path,
            plan=controller.plan,
            queued_requests=requests.admission.num_waiting,
            served_requests=requests.num_served,
            failed_requests=requests.num_failed,
            num_prompt_tokens=requests.num_prompt_tokens,
            num_cached_tokens=requests.num_cached_tokens,
            num_drafted_tokens=requests.num_drafted_tokens,
            num_accepted_tokens=requests.num_accepted_tokens,
            last_error=requests.last_error,
            last_latency_seconds=requests.last_latency_seconds,
            wire=deployment.wire if deployment else wire.WireStats(),
            dropped_messages=deployment.dropped_messages if deployment else 0,
            refused_requests=self._port.counters.refused_requests,
            refused_connections=self._port.counters.refused_connections,
            hung_files=tuple(map(str, hung_paths())),
            redundancy=controller.redundancy,
            losses=controller.losses,
        )

    def _model_of(self, controller: Controller) -> wire.ServedModel:
        plan = controller.deployment.plan if controller.deployment is not None else None
        return wire.ServedModel(
            **_shown(controller),
            phase=controller.lifecycle.phase,
            has_ended=controller.lifecycle.finished and controller.lifecycle.phase == "failed",
            pinned=controller.goal.pinned,
            keep_alive_seconds=controller.goal.keep_alive_seconds,
            missing_bytes=controller.missing_bytes,
            devices=tuple(device.name for device in plan.devices) if plan is not None else (),
            memory_bytes=sum(device.memory.total for device in plan.devices) if plan is not None else 0,
            sent_bytes_per_second=self._services.resources.traffic(controller.name),
            waiting_requests=controller.requests.admission.num_waiting,
            running_requests=controller.requests.admission.num_running,
        )


def _shown(controller: Controller) -> dict[str, Any]:
    """What `Readiness` and `ServedModel` say of a deployment."""
    kind = controller.kind
    return {
        "deployment": controller.name, "model": controller.goal.path[-256:], "state": controller.state,
        "ready": controller.lifecycle.takes_requests, "answers": kind.answers, "takes_tools": kind.takes_tools,
        "context_tokens": kind.context_tokens,
    }  # fmt: skip


class RepeatedChanges:
    """Carries out each change once. A client repeats it if the answer was lost, and gets the same answer or error."""

    def __init__(self) -> None:
        # By caller and request id, the oldest first: the time of the first request, and its answer.
        self._answers: dict[tuple[str, str], tuple[float, asyncio.Future[wire.Message]]] = {}

    async def once(self, caller: str, request_id: str, change: Callable[[], Awaitable[wire.Message]]) -> wire.Message:
        """The answer of `change`, which runs only at the first request with this id. Without an id it always runs."""
        if not request_id:
            return await change()
        now = loop_time()
        while self._answers:
            oldest = next(iter(self._answers))
            if len(self._answers) < _MAX_ANSWERS and now - self._answers[oldest][0] < _KEPT_SECONDS:
                break
            del self._answers[oldest]
        key = caller, request_id
        if key not in self._answers:
            self._answers[key] = now, asyncio.ensure_future(change())
        return await asyncio.shield(self._answers[key][1])
