"""The standby of a coordinator: follows the leader, keeps a copy of its state, and takes over when its leases have run out.

It takes over if it gets the leases of a majority of the voters (`coordinator.devices.quorum`) with the running workers;
otherwise it returns the leases that it got. Until then it serves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import zmq.asyncio

import hearth
from coordinator.devices.fleet import Fleet
from coordinator.devices.quorum import Quorum
from coordinator.serve.clients.client_port import ClientPort
from coordinator.serve.clients.key_registry import KeyRegistry
from coordinator.serve.clients.trust import Trust, error_for_app, response_for_app
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.events.stream import EVENTS_FILE, EventFile
from coordinator.serve.standby.replica import Replica
from coordinator.serve.state import StateFile
from hearth.client.connection import endpoints_of
from hearth.errors import AgentBusy, ConnectionLost, HearthError, NotServing, Unreachable
from hearth.platform.asyncio_tools import all_or_first_error, cancel_all, loop_time, start_in
from hearth.platform.discovery import COORDINATOR_SERVICE, Browser
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.network import bracketed, refuses_connections
from hearth.platform.notify import Notifier
from hearth.platform.security import HomeKey, agent_access, coordinator_access
from hearth.protocol import CLOSED_LEASE_SECONDS, STANDBY_LEASE_SECONDS
from hearth.wire import messages as wire
from hearth.wire.messages.client import MAX_KEYS, KnownKeys
from hearth.wire.rpc import Caller, Response, RpcClient

log = logging.getLogger(__name__)

# Silence of the leader, of four signs of life, after which the standby asks the devices for its leases. They refuse while the
# leader holds them.
_SILENCE_SECONDS = 1.0
_CONNECT_SECONDS = 3.0  # timeout of the connection to a leader
# Coordinators that are greeted at once. Each takes a few sockets, and anybody on the network can advertise some.
_MAX_GREETINGS = 32
_ATTEMPT_PAUSE_SECONDS = 0.1  # between two attempts to get the leases, and to reach a leader
_LEASE_TIMEOUT_SECONDS = 1.0  # of one request for a lease: a device that is slower is not needed for a majority
# In which a device is asked again that refuses the lease of a leader that has ended: its end of the leader's connection may be
# closed a moment later.
_ENDED_SECONDS = 0.3
# After a part that could not be stored, before everything is copied again: the first pause, doubled up to the last one.
_FIRST_COPY_PAUSE_SECONDS, _LAST_COPY_PAUSE_SECONDS = 2.0, 60.0
_REFUSAL_SECONDS = 0.3  # for the leader's computer to accept or refuse a connection, in which it sends one packet
_EVENTS_SECONDS = 10.0  # for the first answer to `WatchEvents`; the leader then sends a sign of life every 5 s


class Standby:
    """One run as a standby. `leaders` are addresses; without them, leaders are found over mDNS."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        home: HomeKey,
        report: Callable[[str], None],
        trust: Trust,
        state: StateFile,
        port: ClientPort,
        leaders: Sequence[str],
    ) -> None:
        self._settings = settings
        self._trust = trust
        self._port = port
        self._access = coordinator_access(home)
        self._report = report
        self._leaders = leaders
        self._state = state
        self._fleet = Fleet(
            agent_access(home),
            None,
            settings.interfaces,
            settings.devices,
            holder=state.current.holder,
            device_keys=lambda: trust.devices.current.keys,
        )
        self._quorum = Quorum(secrets.token_hex(8), state.current.configuration)
        self._leader_name = ""
        self._leader_endpoint = ""  # where it was heard last
        self._heard_at = 0.0  # loop time of the leader's last sign of life
        self._is_complete = False  # whether the copy of the leader's state is complete
        self._copy_pause_seconds = _FIRST_COPY_PAUSE_SECONDS
        self._browser: Browser | None = None  # finds leaders over mDNS
        self._returning: set[asyncio.Task[None]] = set()  # leases of devices that did not answer in time
        self._stopped = asyncio.Event()

    @property
    def state(self) -> str:
        """One line for users."""
        if not self._leader_name:
            return "a standby that looks for the leading coordinator"
        copied = "" if self._is_complete else ", whose state is being copied"
        return f"the standby of {self._leader_name}{copied}"

    async def run(self) -> CoordinatorSettings | None:
        """Follow leaders until this coordinator leads; returns the settings to lead with. None: it was stopped.

        They hold the addresses of the devices, which need not be searched by mDNS.
        """
        notifier = Notifier(os.environ)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        async with AsyncExitStack() as stack:
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            await stack.enter_async_context(self._port.serving(self.handle))
            await stack.enter_async_context(self._fleet)
            if not self._leaders:
                self._browser = Browser(
                    COORDINATOR_SERVICE, lambda service: None, self._settings.interfaces, follow_addresses=True
                )
                await self._browser.start()
                stack.push_async_callback(self._browser.stop)
            self._report(f"listening on port {self._port.port}")
            self._report(self.state)
            notifier.send("READY=1")
            proofs = {"the client port": self._port.has_worked}
            tasks = {
                "follow": asyncio.create_task(self._follow(context)),
                "lead": asyncio.create_task(self._lead()),
                "alive": asyncio.create_task(notifier.keep_alive(lambda: self.state, proofs)),
                "stop": asyncio.create_task(self._stopped.wait()),
            }
            try:
                done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    finished.result()
                if tasks["lead"] not in done:
                    return None
                self._state.save_configuration(self._quorum.current)
                devices = ",".join(filter(None, [_addresses(self._fleet), self._settings.devices]))
            finally:
                await cancel_all([*tasks.values(), *self._returning])
        return None if self._stopped.is_set() else self._settings.model_copy(update={"devices": devices})

    # ---- requests -----------------------------------------------------------------------------------------------------

    async def handle(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        """Answer one request: a standby says what it is, and refuses everything else with NotServing."""
        if isinstance(message, wire.Hello):
            return wire.CoordinatorWelcome(version=hearth.__version__, name=self._settings.name)
        is_admin = caller.public_key in self._trust.admins
        if isinstance(message, wire.GetReadiness):
            readiness = wire.Readiness(ready=False, state=f"this is {self.state}", model="")
            return readiness if is_admin else response_for_app(readiness)
        refusal = NotServing(state=f"this is {self.state}")
        raise refusal if is_admin else error_for_app(refusal)

    # ---- following a leader -------------------------------------------------------------------------------------------

    def _endpoints(self) -> list[str]:
        if self._leaders:
            return [endpoint for address in self._leaders for endpoint in endpoints_of(address)]
        own = self._access.server_public
        found = [
            f"tcp://{bracketed(service.hosts[0])}:{service.port}"
            for service in (self._browser.services.values() if self._browser is not None else ())
            if service.is_of(own)
        ]
        return list(dict.fromkeys(filter(None, [self._leader_endpoint, *found])))

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """Follow whichever coordinator leads, until cancelled."""
        while True:
            async with aclosing(self._answering(context)) as clients:
                async for client in clients:
                    try:
                        await self._copy_state(client)
                    except (NotServing, Unreachable, ConnectionLost):  # another standby, or one that is gone
                        pass
                    except HearthError as error:
                        log.warning("the coordinator at %s: %s", client.endpoint, error)
                    finally:
                        self._heard_at = -math.inf  # its devices say whether it still leads
            await asyncio.sleep(_ATTEMPT_PAUSE_SECONDS)

    async def _answering(self, context: zmq.asyncio.Context) -> AsyncGenerator[RpcClient, None]:
        """Greet all known coordinators, and yield connections to those that answer, as soon as they do.

        Those that do not answer, such as the addresses of forged records, delay no other.
        """
        greetings = asyncio.Semaphore(_MAX_GREETINGS)
        answering: list[RpcClient] = []

        async def greet(endpoint: str) -> RpcClient | None:
            async with greetings:
                client = RpcClient(context, endpoint, self._access, name=self._settings.name)
                try:
                    await client.hello(wire.CoordinatorWelcome, timeout_seconds=_CONNECT_SECONDS)
                    answering.append(client)
                    return client
                except (Unreachable, ConnectionLost):
                    return None
                except HearthError as error:
                    log.warning("the coordinator at %s: %s", endpoint, error)
                    return None
                finally:
                    if client not in answering:
                        await client.close()

        tasks = [asyncio.create_task(greet(endpoint)) for endpoint in self._endpoints()]
        try:
            for answer in asyncio.as_completed(tasks):
                if (client := await answer) is not None:
                    yield client
        finally:
            await cancel_all(tasks)
            for client in answering:
                await client.close()

    async def _copy_state(self, client: RpcClient) -> None:
        """Copy the leader's state as it changes, until the connection is lost or the leader leaves.

        Also ends some time after a part could not be stored: the leader sends everything again to a standby that follows again.
        """
        replica = Replica(self._settings.state_dir)
        registries = {each.file.path.name: each for each in (self._trust.apps, self._trust.devices)}
        apps, devices = map(_known_keys, registries.values())
        request = wire.Follow(name=self._settings.name, confirms=True, apps=apps, devices=devices)
        copy_again_at = math.inf  # when to ask for everything again; inf while all that came was stored
        stream = client.stream(request, timeout_seconds=_CONNECT_SECONDS, last=wire.Done)
        events = EventFile(self._settings.state_dir / EVENTS_FILE)
        async with aclosing(stream) as replies, AsyncExitStack() as stack:
            copying = asyncio.create_task(copy_events(client, events))
            stack.push_async_callback(cancel_all, [copying])
            async for message, payload in replies:
                self._heard_at = loop_time()
                if isinstance(message, wire.ReplicaPart):
                    try:
                        data = payload[0] if payload else b""
                        await on_disk(self._settings.state_dir, FILE_SECONDS, replica.receive, message, data)
                        for name, keys in replica.keys.items():
                            registries[name].replace(keys)
                    except (OSError, ValueError, HearthError) as error:
                        log.warning("%s of the leader's state cannot be stored: %s", message.path, error)
                        copy_again_at = min(copy_again_at, loop_time() + self._copy_pause_seconds)
                elif isinstance(message, wire.LeaderAlive):
                    self._hear(message, replica)
                    self._leader_endpoint = client.endpoint
                    if loop_time() >= copy_again_at:
                        self._copy_pause_seconds = min(2 * self._copy_pause_seconds, _LAST_COPY_PAUSE_SECONDS)
                        return
                    if message.receipt and not all([await each.file.saved() for each in registries.values()]):
                        copy_again_at = min(copy_again_at, loop_time() + self._copy_pause_seconds)
                    if message.receipt and copy_again_at == math.inf and self._is_complete:
                        self._copy_pause_seconds = _FIRST_COPY_PAUSE_SECONDS
                        confirm = wire.Follow(name=self._settings.name, confirmed=message.receipt)
                        await client.call(confirm, timeout_seconds=_CONNECT_SECONDS)
                    if message.is_leaving and self._is_complete:
                        accept = wire.Follow(name=self._settings.name, takes_over=True)
                        await client.call(accept, timeout_seconds=_CONNECT_SECONDS)
                        return

    def _hear(self, message: wire.LeaderAlive, replica: Replica) -> None:
        before = self.state
        self._leader_name = message.name
        self._quorum = self._quorum.heard(message.configuration)
        self._is_complete = message.is_complete and replica.state is not None
        if replica.state is not None and message.is_complete:
            self._state.replicate(replica.state)
            replica.state = replica.state.model_copy(update={"configuration": None})
        if self.state != before:
            self._report(self.state)

    # ---- taking over --------------------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Wait until this coordinator holds the leases of a majority."""
        while True:
            await asyncio.sleep(_ATTEMPT_PAUSE_SECONDS)
            if not self._state.current.deployments or loop_time() - self._heard_at < _SILENCE_SECONDS:
                continue
            granted = await self._acquire_leases()
            if self._quorum.take_over(granted) is not None:
                self._report(f"took over from {self._leader_name or 'the coordinator before'}: {len(granted)} devices")
                return
            await self._return_leases(granted)

    async def _acquire_leases(self) -> list[str]:
        """Ask all devices for their leases; returns those that grant it, and hears which voters they know."""
        saved = self._state.current.deployments
        ended = self._leader_name if await self._leader_has_ended() else None
        request = wire.AcquireLease(
            holder=self._fleet.holder, holder_name=self._settings.name, seconds=STANDBY_LEASE_SECONDS, ended=ended,
            adopt={name: each.plan.epoch for name, each in saved.items() if each.plan is not None},
        )  # fmt: skip
        ask_again_until, timeout_seconds = loop_time(), _LEASE_TIMEOUT_SECONDS
        if ended is not None:
            ask_again_until, timeout_seconds = ask_again_until + _ENDED_SECONDS, timeout_seconds + CLOSED_LEASE_SECONDS

        async def acquire(device_id: str) -> str | None:
            while True:
                try:
                    granted = await self._fleet.ask(device_id, request, wire.LeaseGranted, timeout_seconds)
                    break
                except AgentBusy:
                    if loop_time() >= ask_again_until:
                        return None
                    await asyncio.sleep(_ATTEMPT_PAUSE_SECONDS)
                except HearthError as error:
                    log.info("no lease on %s: %s", device_id, error)
                    # It may grant the lease when it goes on, and nobody would use it.
                    start_in(self._returning, self._return_leases([device_id]))
                    return None
            self._quorum = self._quorum.granted(device_id, granted.configuration)
            return device_id

        devices = [device.device_id for device in self._fleet.devices.values() if device.health != "dead"]
        return [device_id for device_id in await all_or_first_error(map(acquire, devices)) if device_id is not None]

    async def _leader_has_ended(self) -> bool:
        """Whether the leader's computer refuses connections to its port: nothing listens there since it ended.

        A leader that is stopped or cut off refuses none, and so does one whose gateway has ended.
        """
        if not self._leader_endpoint or self._heard_at > -math.inf:
            return False
        host, _, port = self._leader_endpoint.removeprefix("tcp://").rpartition(":")
        return await refuses_connections(host.strip("[]"), int(port), _REFUSAL_SECONDS)

    async def _return_leases(self, devices: Sequence[str]) -> None:
        """Release leases that are not sufficient, with the workers as they are."""
        release = wire.ReleaseLease(holder=self._fleet.holder, keep_workers=True)
        calls = (self._fleet.call(device, release, timeout_seconds=_LEASE_TIMEOUT_SECONDS) for device in devices)
        await asyncio.gather(*calls, return_exceptions=True)


def _known_keys(registry: KeyRegistry) -> KnownKeys:
    """The keys of a registry; the latest ones, if there are too many."""
    known = registry.current
    admitted, revoked = (tuple(keys.items())[-MAX_KEYS:] for keys in (known.keys, known.revoked))
    roles = tuple((key, known.roles[key]) for key, _ in admitted if key in known.roles)
    return KnownKeys(admitted=admitted, revoked=revoked, roles=roles)


def _addresses(fleet: Fleet) -> str:
    """The addresses of the devices, as for the setting `devices`."""
    there = [device for device in fleet.devices.values() if device.health != "dead"]
    return ",".join(f"{bracketed(device.host)}:{device.port}" for device in there)


async def copy_events(client: RpcClient, file: EventFile) -> None:
    """Append the leader's events to the file as they happen, until cancelled or until the leader is gone.

    Events of another coordinator that the file holds are no longer read.
    """
    try:
        stream, events = await on_disk(file.path, FILE_SECONDS, file.read)
        since = f"{stream}-{events[-1].number}" if events else ""
        request = wire.WatchEvents(since=since, is_copy=True)
        async with aclosing(client.stream(request, timeout_seconds=_EVENTS_SECONDS, last=wire.Done)) as replies:
            async for message, _ in replies:
                if isinstance(message, wire.EventsRecorded) and message.events:
                    stream = message.cursor.rpartition("-")[0]
                    await on_disk(file.path, FILE_SECONDS, file.append, stream, message.events)
    except (OSError, HearthError) as error:
        log.info("the leader's events are not copied: %s", error)
