"""The coordinator as a service: answers clients, advertises itself, and keeps the fleet and the model."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

import zmq.asyncio

import hearth
from coordinator.deploy.distribution import Progress
from coordinator.deploy.graph import Inference
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from coordinator.serve.apps import AppRegistry
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.graph import GraphServer
from coordinator.serve.state import Goal, GraphGoal, StateFile
from coordinator.serve.transformer import Answer, Server
from hearth.errors import AppRevoked, BadRequest, NotAuthorised, NotServing, ProtocolMismatch
from hearth.plan.plan import Plan, is_graph_plan, is_transformer_plan
from hearth.platform.discovery import COORDINATOR_SERVICE, Advertiser
from hearth.platform.notify import Notifier
from hearth.platform.security import HomeKey, agent_access, asyncio_gatekeeper, derive_keypair, fingerprint
from hearth.protocol import DEFAULT_DEPLOYMENT, PROTOCOL_VERSION
from hearth.wire.framing import pack_array, pack_arrays, unpack_array
from hearth.wire.messages import (
    AddApp,
    AppList,
    CoordinatorWelcome,
    DeviceList,
    Done,
    Embed,
    Generate,
    GetHiddenStates,
    GetModelInfo,
    GetReadiness,
    GetStatus,
    Hello,
    Infer,
    Inferred,
    ListApps,
    ListDevices,
    Message,
    Readiness,
    RevokeApp,
    Status,
    Vectors,
)
from hearth.wire.rpc import Caller, Reply, Response, RpcServer

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

ZAP_DOMAIN = "coordinator"
# What an app's key may ask; everything else takes an admin's.
_FOR_APPS = (Hello, GetReadiness, Embed, GetHiddenStates, Generate, GetModelInfo, Infer)


class Service:
    """Answers clients. The caller's role is looked up at every request: ZAP runs only at the handshake."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        home: HomeKey,
        report: Callable[[str], None],
        progress: Progress = lambda name, done, total: None,
    ) -> None:
        self._settings = settings
        self._keypair = derive_keypair(home.key_bytes(), "coordinator")
        self._admins = {self._keypair.public, derive_keypair(home.key_bytes(), "admin").public}
        self._apps = AppRegistry(settings.state_dir / "apps.json")
        self._fleet = Fleet(
            agent_access(home),
            lease_name=settings.name,
            interfaces=settings.interfaces,
            static_devices=settings.devices,
            on_change=self._device_changed,
        )
        self._served: Server | GraphServer | None = None  # from `run` on
        self._report = report
        self._progress = progress

    async def run(self, goal: Goal | None, plan: Plan | None = None) -> None:
        """Serve until SIGTERM or SIGINT; without a goal, what was served last. Raises NotServing when that is nothing,
        what `Server.start` raises, PortInUse."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        notifier = Notifier(os.environ)
        if goal is None:
            saved = StateFile(self._settings.state_dir).load().deployments.get(DEFAULT_DEPLOYMENT)
            goal, plan = (saved.goal, saved.plan) if saved is not None else (None, None)
        if goal is None:
            raise NotServing(state="nothing was served here before")
        self._start(goal, plan)
        async with AsyncExitStack() as stack:
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            gatekeeper = asyncio_gatekeeper(context)
            gatekeeper.admit(ZAP_DOMAIN, self._admits)
            gatekeeper.start()
            stack.callback(gatekeeper.stop)
            server = RpcServer(
                context, self._settings.bind_host, self._settings.port, self._keypair, ZAP_DOMAIN, self.handle,
                port_setting="--port",
            )  # fmt: skip
            await server.start()
            stack.push_async_callback(server.close)
            if self._settings.advertise:
                advertiser = Advertiser(
                    COORDINATOR_SERVICE, server.port, fingerprint(self._keypair.public), secrets.token_hex(8),
                    self._settings.interfaces,
                )  # fmt: skip
                await advertiser.start()
                stack.push_async_callback(advertiser.stop)
            await stack.enter_async_context(self._fleet)
            stack.push_async_callback(self._server.close)
            self._report(f"listening on port {server.port}")
            notifier.send("READY=1")
            tasks: list[asyncio.Task[None]] = [
                asyncio.create_task(self._server.run()),
                asyncio.create_task(self._watchdog(notifier)),
            ]
            stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
            try:
                waits: set[asyncio.Task[Any]] = {*tasks, stopped}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                notifier.send("STOPPING=1")
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    def _start(self, goal: Goal, plan: Plan | None) -> None:
        """Serve what kind of model it is. A plan of the other kind is for something else, and is left aside."""
        if isinstance(goal, GraphGoal):
            graphs = self._served = GraphServer(self._settings, self._fleet, self._report, self._progress)
            graphs.start(goal, plan if is_graph_plan(plan) else None)
        else:
            server = self._served = Server(self._settings, self._fleet, self._report, self._progress)
            server.start(goal, plan if is_transformer_plan(plan) else None)

    @property
    def _server(self) -> Server | GraphServer:
        assert self._served is not None
        return self._served

    def _device_changed(self, device: Device) -> None:
        if self._served is not None:
            self._served.device_changed(device)

    async def handle(self, caller: Caller, message: Message, payload: Sequence[Any]) -> Response:
        """Answer one request. Raises HearthError, which goes back to the client."""
        self._authorise(caller.public_key, message)
        if isinstance(message, Hello):
            if message.protocol != PROTOCOL_VERSION:
                raise ProtocolMismatch(peer=message.name, ours=PROTOCOL_VERSION, theirs=message.protocol)
            return CoordinatorWelcome(version=hearth.__version__, name=self._settings.name)
        if isinstance(message, GetReadiness):
            model = self._server.goal.path if self._server.goal else ""
            return Readiness(ready=self._server.ready, state=self._server.state, model=model[-256:])
        if isinstance(message, Embed):
            return _reply(await self._transformer().embed(message.texts, message.timeout_seconds, message.trace))
        if isinstance(message, GetHiddenStates):
            return _reply(await self._transformer().hidden_states(_token_ids(payload), message.timeout_seconds))
        if isinstance(message, GetModelInfo):
            return self._graph().info()
        if isinstance(message, Infer):
            return _inferred(await self._graph().infer(message, payload))
        if isinstance(message, Generate):
            return self._generate(message, payload)
        if isinstance(message, ListDevices):
            return await self._devices()
        if isinstance(message, GetStatus):
            return self._status()
        if isinstance(message, AddApp):
            self._apps.add(message.name, message.public_key)
            return Done()
        if isinstance(message, RevokeApp):
            self._apps.revoke(message.name)
            return Done()
        if isinstance(message, ListApps):
            return AppList(names=tuple(self._apps.names()), revoked=tuple(self._apps.revoked_names()))
        raise BadRequest(reason=f"a coordinator does not take {type(message).__name__}")

    # ---- trust ----------------------------------------------------------------------------------------------------

    def _admits(self, public_key: str) -> bool:
        """The handshake. A revoked app may still connect: at its first request it is told that it was revoked."""
        return public_key in self._admins or self._apps.name_of(public_key) is not None

    def _authorise(self, public_key: str, message: Message) -> None:
        if public_key in self._admins:
            return
        if self._apps.is_revoked(public_key):
            raise AppRevoked(app=self._apps.name_of(public_key) or "unknown")
        if not self._apps.is_admitted(public_key):
            raise NotAuthorised(role="none", action="ask this coordinator")
        if not isinstance(message, _FOR_APPS):
            raise NotAuthorised(role="app", action=f"send {type(message).__name__}")

    # ---- answers --------------------------------------------------------------------------------------------------

    async def _generate(self, message: Generate, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        async with aclosing(self._transformer().generate(message, _token_ids(payload) if payload else None)) as parts:
            async for part in parts:
                yield Reply(part)

    def _transformer(self) -> Server:
        if isinstance(self._server, GraphServer):
            raise BadRequest(reason="the model is a graph of operators; ask it with `hearth infer` or home.infer()")
        return self._server

    def _graph(self) -> GraphServer:
        if not isinstance(self._server, GraphServer):
            raise BadRequest(
                reason="the model is a transformer; it embeds (home.embed()) or generates (home.generate())"
            )
        return self._server

    async def _devices(self) -> DeviceList:
        await self._fleet.refresh_telemetry()
        return DeviceList(
            devices=tuple(self._fleet.infos()),
            links=tuple(self._server.profiler.links.values()),
        )

    def _status(self) -> Status:
        server = self._server
        return Status(
            name=self._settings.name,
            version=hearth.__version__,
            state=server.state,
            model_path=server.goal.path if server.goal else "",
            plan=server.plan,
            queued_requests=server.queued,
            served_requests=server.served,
            failed_requests=server.failed,
            last_error=server.last_error,
            last_latency_seconds=server.last_latency_seconds,
            wire=server.wire,
            dropped_messages=server.dropped_messages,
        )

    async def _watchdog(self, notifier: Notifier) -> None:
        while True:
            notifier.send("WATCHDOG=1", f"STATUS={self._server.state}"[:200])
            await asyncio.sleep(notifier.watchdog_seconds / 3 or 10.0)


def _token_ids(payload: Sequence[Any]) -> np.ndarray[Any, Any]:
    if len(payload) != 2:
        raise BadRequest(reason=f"token ids are one array, not {len(payload)} frames")
    return unpack_array(payload)


def _reply(answer: Answer) -> Reply:
    message = Vectors(latency_seconds=answer.latency_seconds, num_tokens=answer.num_tokens, traces=answer.traces)
    return Reply(message, pack_array(answer.vectors))


def _inferred(result: Inference) -> Reply:
    message = Inferred(names=tuple(result.outputs), latency_seconds=result.latency_seconds, traces=result.traces)
    return Reply(message, pack_arrays(result.outputs))
