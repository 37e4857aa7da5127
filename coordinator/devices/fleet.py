"""The coordinator's connections to all agents: discovery, hello, leases and heartbeats."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import zmq.asyncio

from coordinator.devices import registry
from coordinator.devices.registry import Device
from hearth.errors import (
    AgentBusy,
    BadMessage,
    ConnectionLost,
    DeadlineExceeded,
    DeviceLost,
    HearthError,
    LeaseLost,
    UnknownMessage,
    Unreachable,
)
from hearth.plan.common import PlannedDevice
from hearth.platform.asyncio_tools import Signal, cancel_all, loop_time, supervised
from hearth.platform.curve import fingerprint
from hearth.platform.discovery import AGENT_SERVICE, Browser, DiscoveredService, parse_static_peers
from hearth.platform.security import Access
from hearth.protocol import (
    CLOSED_LEASE_COUNTED_SECONDS,
    LEASE_MARGIN_SECONDS,
    LEASE_SECONDS,
    LINK_OPEN_MARGIN_SECONDS,
    REPLY_MARGIN_SECONDS,
    WATCH_SECONDS,
)
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, RpcClient

log = logging.getLogger(__name__)

_HELLO_SECONDS = 3.0  # timeout of a hello and of other small requests: as long as a device may be silent
_RETRY_SECONDS = 1.0  # pause before the next hello: a returning agent is found soon, an absent one costs little traffic
_RELEASE_SECONDS = 3.0  # timeout of releasing a lease, so that a dead agent does not delay the stop for longer
# How long a request waits for the device that it was sent to when the connection broke. A new connection is tried after 0.1
# and 0.3 s; the request of a device that is gone should not wait for longer.
_ANSWER_AGAIN_SECONDS = 0.4
# In which a device must answer whose link to another one is in question: if it is silent itself, the link may be well.
_AT_ONCE_SECONDS = 0.3
_ANSWER_POLL_SECONDS = 0.02  # interval at which `answers_again` checks: short against the pause
LATE_SECONDS = 0.05  # a timer of this process that fires later than this shows that the process itself is too busy
# Connections to agents found by mDNS that do not answer, at most. Anyone on the network can advertise agents; each connection
# takes three of ZeroMQ's 1023 sockets. A home has fewer devices.
_MAX_SILENT_CONNECTIONS = 64
_MAX_WAITING = 256  # addresses that wait for such a connection, at most: bounds the memory
_TURN_SECONDS = 30.0  # how long one of them may try before another discovered address takes its place: several hellos
_TURN_CHECK_SECONDS = 1.0  # interval at which places are given to waiting addresses
_LEASE_STEP_SECONDS = 0.5  # a lease that should be longer or shorter by this much is acquired anew
_SETTLE_POLL_SECONDS = 0.05  # interval at which `settle` checks: no user notices the delay, and checks are cheap

_T = TypeVar("_T")


@dataclass
class _Connection:
    """The connection to one agent, and the task that maintains it."""

    address: tuple[str, int]
    client: RpcClient
    server_keys: list[str]  # possible public keys of the agent; the first one is tried now
    is_static: bool  # named by the user: never closed
    opened_at: float  # loop time
    task: asyncio.Task[None] | None = None
    bulk: set[RpcClient] = field(default_factory=set)  # further connections to the same agent
    broken: Signal = field(default_factory=Signal)  # a call lost the connection: send a heartbeat now
    closed_at: float = -math.inf  # loop time at which the connection was closed last


class Fleet(AbstractAsyncContextManager["Fleet"]):
    """All agents of the home. With `lease_name` it holds leases and sends heartbeats; without, it only reads.

    `on_change(device)` is called when the health or the workers of a device change.
    """

    def __init__(
        self,
        access: Access,
        lease_name: str | None,
        interfaces: Sequence[str] | None = None,
        static_devices: str = "",
        browse: bool = True,
        on_change: Callable[[Device], None] | None = None,
        holder: str | None = None,
        device_keys: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.holder = holder or secrets.token_hex(8)
        # Of each deployment that is loaded, or to be taken over, by name: agents stop the workers of others.
        self.running_epochs: dict[str, int] = {}
        self.may_compute: Callable[[], bool] = lambda: True  # set by a coordinator with a standby
        self.on_granted: Callable[[str, wire.Configuration | None], None] = lambda device_id, configuration: None
        self.keep_workers = False  # whether to leave the workers to another coordinator at the end
        self.lease_seconds = LEASE_SECONDS  # with a standby, the shortest; see `registry.lease_seconds`
        self._granted_seconds: dict[str, float] = {}  # for how long each renewal of a lease lasts, by device
        self._leased_until: dict[str, float] = {}  # loop time at which the leases surely still held, by device
        self.devices: dict[str, Device] = {}
        self.last_epoch = 0  # the newest epoch that any agent has seen
        self._access = access
        self._device_keys = device_keys
        self._lease_name = lease_name
        self._interfaces = interfaces
        # Each address once: a second connection to an agent would outlive the fleet.
        self._static_addresses = tuple(dict.fromkeys(parse_static_peers(static_devices))) if static_devices else ()
        self._browse = browse
        self._on_change = on_change or (lambda device: None)
        self._context = zmq.asyncio.Context()
        self._connections: dict[tuple[str, int], _Connection] = {}
        self._by_device: dict[str, _Connection] = {}
        self._refusals: dict[tuple[str, int], HearthError] = {}  # by address, until that agent is accepted
        self._browser: Browser | None = None
        # Discovered addresses without a connection, by turn: the agent's key.
        self._waiting: dict[tuple[str, int], str] = {}
        self._turns_task: asyncio.Task[None] | None = None
        self._last_joined = -math.inf  # loop time
        self._has_ended = False  # no connection is made from then on

    async def __aenter__(self) -> Fleet:
        if self._browse:
            self._browser = Browser(AGENT_SERVICE, self._on_discovered, self._interfaces, follow_addresses=True)
            await self._browser.start()
            self._turns_task = supervised(self._give_turns(), "the search for agents")
        for host, port in self._static_addresses:
            self._connect(host, port, self._server_keys(), is_static=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._has_ended = True
        if self._browser is not None:
            await self._browser.stop()
        if self._turns_task is not None:
            await cancel_all([self._turns_task])
        # First, since a heartbeat after the release would take the lease again.
        await cancel_all([connection.task for connection in self._connections.values() if connection.task])
        if self._lease_name is not None:
            await self._release_all()
        for connection in list(self._connections.values()):
            await connection.client.close()
        self._context.destroy(linger=0)

    @property
    def refusals(self) -> list[HearthError]:
        """Errors of agents that cannot be used, for instance because of another protocol version."""
        return list(self._refusals.values())

    def device_infos(self) -> list[wire.DeviceInfo]:
        """All devices by name, then the refused agents, of which only the address is known."""
        known = {(device.host, device.port) for device in self.devices.values()}
        refused = (
            wire.DeviceInfo(
                device_id="",
                name=f"{host}:{port}",
                host=f"{host}:{port}",
                state="refused",
                reason=error.explanation(),
                telemetry=None,
            )
            for (host, port), error in sorted(self._refusals.items())
            if (host, port) not in known
        )
        return [*(device.info(loop_time()) for device in registry.sorted_by_name(self.devices.values())), *refused]

    def usable(self) -> list[Device]:
        return registry.usable(list(self.devices.values()), loop_time())

    async def acquire_again(self, device_id: str) -> None:
        """Acquire the lease on a device once more: with another duration, or to hear the configuration that it has stored."""
        if (connection := self._by_device.get(device_id)) is not None:
            with suppress(HearthError):  # the next heartbeat reports the device
                await self._acquire_lease(connection, device_id)

    def leased(self) -> set[str]:
        """The devices whose leases this coordinator surely holds now."""
        return {device_id for device_id, until in self._leased_until.items() if loop_time() < until}

    async def settle(self, quiet_seconds: float, min_devices: int, timeout_seconds: float) -> list[Device]:
        """Wait until `min_devices` are usable and none joined for `quiet_seconds`, at most `timeout_seconds`."""
        began = loop_time()
        while loop_time() - began < timeout_seconds:
            quiet_for = loop_time() - max(self._last_joined, began)
            if len(self.usable()) >= min_devices and quiet_for >= quiet_seconds:
                break
            await asyncio.sleep(_SETTLE_POLL_SECONDS)
        return self.usable()

    async def call(
        self, device_id: str, message: wire.Message, payload: Sequence[Any] = (), timeout_seconds: float = 10.0
    ) -> Reply:
        """Send one request to an agent. Raises the error that it returns, or DeviceLost if it cannot be reached."""
        with self._client_of(device_id) as client:
            return await client.call(message, payload, timeout_seconds=timeout_seconds)

    async def stream(
        self,
        device_id: str,
        message: wire.Message,
        payload: Sequence[Any],
        last: type[Any],
        timeout_seconds: float,
        may_return: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[Reply, None]:
        """Stream one agent's replies up to one of type `last` (see `RpcClient.stream`). Raises as `call` does."""
        with self._client_of(device_id) as client:
            stream = client.stream(message, payload, timeout_seconds=timeout_seconds, last=last, may_return=may_return)
            async with aclosing(stream) as replies:
                async for reply in replies:
                    yield reply

    @asynccontextmanager
    async def bulk_connection(self, device_id: str) -> AsyncIterator[RpcClient]:
        """A separate connection to one agent for bulk data, which would delay heartbeats on the main connection.

        Connection errors are raised as DeviceLost.
        """
        with self._client_of(device_id) as client:
            separate, bulk = self._new_client(client.endpoint, client.server_key), self._by_device[device_id].bulk
            bulk.add(separate)
            try:
                yield separate
            finally:
                bulk.discard(separate)
                await separate.close()

    @contextmanager
    def _client_of(self, device_id: str) -> Iterator[RpcClient]:
        """The connection to a device. Connection errors inside the context are raised as DeviceLost.

        They take the device out of plans at once; the next heartbeat decides whether it is alive.
        """
        connection = self._by_device.get(device_id)
        name = self.devices[device_id].name if device_id in self.devices else device_id
        if connection is None:
            raise DeviceLost(device=name, reason="it is not connected")
        try:
            yield connection.client
        except (Unreachable, ConnectionLost) as error:
            self._replace(registry.after_connection_lost(self.devices[device_id], loop_time()))
            connection.broken.set()
            raise DeviceLost(device=name, reason=error.explanation()) from None

    async def answers_again(self, device_id: str) -> bool:
        """Whether a device whose connection has just broken answers over a new one, without having been restarted."""
        before = self.devices.get(device_id)
        if before is None:
            return False
        deadline = loop_time() + _ANSWER_AGAIN_SECONDS
        while not (now := self.devices[device_id]).reachable and now.health != "dead" and loop_time() < deadline:
            await asyncio.sleep(_ANSWER_POLL_SECONDS)
        return now.reachable and now.welcome.boot_id == before.welcome.boot_id

    async def is_lost(self, device_id: str, num_witnesses: Callable[[], int]) -> bool:
        """Ask a device at once, because `num_witnesses()` others wait for it. One that does not answer is dead from then on.

        If there is only one witness, the device is asked a second time; others may report it meanwhile.
        """
        device, connection = self.devices[device_id], self._by_device.get(device_id)
        if connection is None or not device.reachable:
            return False  # its loss is known, or its connection broke, and the next heartbeat decides
        waited_seconds = 0.0
        for least in (2, 1):
            limit_seconds = registry.witnessed_seconds(device, loop_time(), max(num_witnesses(), least))
            if (seconds := limit_seconds - waited_seconds) <= 0:
                break
            waited_seconds += seconds
            asked = loop_time()
            try:
                await _ask(connection.client, wire.Heartbeat(holder=self.holder), wire.AgentState, seconds)
                return False
            except DeadlineExceeded:
                if loop_time() - asked - seconds > LATE_SECONDS:
                    return False  # this process was too busy to read the answer
            except HearthError:
                return False
        self._replace(registry.after_witnesses(self.devices[device_id], waited_seconds))
        log.warning("%s is dead: %s", device.name, self.devices[device_id].reason)
        await self._end_calls(connection)
        return True

    async def answer_at_once(self, device_ids: Iterable[str]) -> bool:
        """Whether all these devices answer a heartbeat within `_AT_ONCE_SECONDS`."""

        async def answers(device_id: str) -> bool:
            connection = self._by_device.get(device_id)
            if connection is None:
                return False
            try:
                await _ask(connection.client, wire.Heartbeat(holder=self.holder), wire.AgentState, _AT_ONCE_SECONDS)
            except HearthError:
                return False
            return True

        return all(await asyncio.gather(*map(answers, device_ids)))

    async def ask(self, device_id: str, message: wire.Message, expected: type[_T], timeout_seconds: float = 10.0) -> _T:
        """As `call`, but returns the message, and raises BadMessage if it is not of the type `expected`."""
        with self._client_of(device_id) as client:
            return await _ask(client, message, expected, timeout_seconds)

    async def refresh_telemetry(self) -> None:
        """Read the telemetry of all usable devices. One that does not answer keeps its old telemetry."""

        async def read(device: Device) -> None:
            try:
                telemetry = await self.ask(device.device_id, wire.GetTelemetry(), wire.Telemetry, timeout_seconds=3.0)
            except HearthError as error:
                log.warning("no telemetry from %s: %s", device.name, error)
                return
            if device.device_id in self.devices:
                self._update(device.device_id, telemetry=telemetry)

        await asyncio.gather(*(read(device) for device in self.usable()))

    def record_fault(
        self, planned: Sequence[PlannedDevice], error: HearthError, may_restart: bool = False
    ) -> list[str]:
        """Record a fault of the device of a plan that the error names. Plans avoid it for a while, if the fault may return.

        `may_restart`: a worker that died may start again there, since it had served. Returns the ids of the named devices:
        none, or one unless several devices have the same name.
        """
        now, named = loop_time(), [device.device_id for device in planned if device.name == error.device_name]
        for device in (self.devices[device_id] for device_id in named if device_id in self.devices):
            after = self.devices[device.device_id] = registry.after_device_fault(device, error, now, may_restart)
            if after.quarantine is not None and after.quarantine != device.quarantine and after.is_quarantined(now):
                log.warning("%s is %s", after.name, after.quarantine.describe(now))
        return named

    def pardon(self) -> bool:
        """End the quarantines of the lowest degree, because the model does not fit without them. False if there are none."""
        now = loop_time()
        needed = registry.needed_despite_quarantine(list(self.devices.values()), now)
        for device in needed:
            log.warning("%s is needed: its quarantine ends", device.name)
            self.devices[device.device_id] = registry.after_pardon(device, now)
        return bool(needed)

    # ---- keys of devices --------------------------------------------------------------------------------------------

    def key_admitted(self, public_key: str) -> None:
        """Try a key that `device_keys` has got at all addresses that may have it."""
        for connection in self._connections.values():
            if connection not in self._by_device.values():
                connection.server_keys = self._server_keys()
            elif connection.is_static:  # the agent may have it once it restarts; the present key is tried first
                present = connection.client.server_key
                others = [key for key in connection.server_keys if key not in (present, public_key)]
                connection.server_keys = [public_key, present, *others]
        for service in self._browser.services.values() if self._browser is not None else ():
            self._on_discovered(service)

    async def drop_revoked(self) -> None:
        """End the connections to agents whose key is no longer admitted, and take them out of plans.

        Addresses that the user has named are tried with the other keys: an agent there may get one that is admitted.
        """
        admitted, ended = self._server_keys(), []
        for connection in list(self._connections.values()):
            connection.server_keys = [key for key in connection.server_keys if key in admitted]
            if connection.client.server_key in admitted:
                continue
            for device_id in self._devices_at(connection):
                self._replace(registry.after_refusal(self.devices[device_id], "refused", "its key was revoked"))
            self._forget(connection)
            if connection.is_static or connection.server_keys:
                self._connect(*connection.address, connection.server_keys or list(admitted), connection.is_static)
            ended.append(connection)
        await self._end(ended)

    # ---- one agent ------------------------------------------------------------------------------------------------

    def _on_discovered(self, service: DiscoveredService) -> None:
        keys = {fingerprint(key): key for key in self._server_keys()}
        if (key := keys.get(service.fingerprint)) is not None:  # None: another home's agent, or a revoked one
            address = (service.hosts[0], service.port)
            if (known := self._connections.get(address)) is not None:
                known.server_keys = [key]  # the agent may have another one since its restart
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting[address] = key
                self._connect_waiting()

    def _connect_waiting(self) -> None:
        """Connect to waiting addresses in turn, while fewer than `_MAX_SILENT_CONNECTIONS` do not answer."""
        num_free = _MAX_SILENT_CONNECTIONS - len(self._silent_connections())
        for host, port in list(self._waiting)[: max(num_free, 0)]:
            self._connect(host, port, [self._waiting.pop((host, port))])

    def _silent_connections(self) -> list[_Connection]:
        """Connections by discovery whose agent has never answered, or is dead; oldest first."""
        dead = {device_id for device_id, device in self.devices.items() if device.health == "dead"}
        answering = {id(used) for device_id, used in self._by_device.items() if device_id not in dead}
        return [each for each in self._connections.values() if not each.is_static and id(each) not in answering]

    async def _give_turns(self) -> None:
        """Let waiting addresses take the places of those that do not answer, until cancelled."""
        while True:
            await asyncio.sleep(_TURN_CHECK_SECONDS)
            if not self._waiting:
                continue
            now = loop_time()
            ended = [each for each in self._silent_connections() if now - each.opened_at >= _TURN_SECONDS]
            del ended[len(self._waiting) :]
            for connection in ended:
                self._forget(connection)
            await self._end(ended)
            self._connect_waiting()
            # Those that had their turn wait for the next one, as long as they are still advertised.
            for service in self._browser.services.values() if self._browser is not None else ():
                if (service.hosts[0], service.port) not in self._connections:
                    self._on_discovered(service)

    def _devices_at(self, connection: _Connection) -> list[str]:
        """The ids of the devices that are reached over this connection."""
        return [device_id for device_id, used in self._by_device.items() if used is connection]

    def _forget(self, connection: _Connection) -> None:
        """Forget the connection to an agent, which is to be ended; what is known of the device stays."""
        del self._connections[connection.address]
        self._closed(connection)
        for device_id in self._devices_at(connection):
            del self._by_device[device_id]

    async def _end(self, connections: Sequence[_Connection]) -> None:
        """End connections that have been forgotten."""
        await cancel_all([each.task for each in connections if each.task is not None])
        for each in connections:
            await each.client.close()

    def _server_keys(self) -> list[str]:
        """Public keys of this home's agents: the one that agents with the home key share, and those of admitted devices."""
        return [self._access.server_public, *self._device_keys()]

    def _connect(self, host: str, port: int, server_keys: list[str], is_static: bool = False) -> None:
        """Keep a connection to this address, whose agent has one of these public keys."""
        if self._has_ended:  # a key was revoked while the leases are released
            return
        client = self._new_client(f"tcp://{host}:{port}", server_keys[0])
        connection = _Connection((host, port), client, server_keys, is_static, loop_time())
        self._connections[host, port] = connection
        connection.task = supervised(self._maintain(connection), f"the connection to {host}:{port}")

    def _new_client(self, endpoint: str, server_key: str) -> RpcClient:
        access = Access(self._access.own, server_key)
        return RpcClient(self._context, endpoint, access, name=self._lease_name or "hearth")

    async def _try_next_key(self, connection: _Connection) -> None:
        """Connect with another of the agent's possible keys, if there are several."""
        if len(connection.server_keys) > 1:
            connection.server_keys.append(connection.server_keys.pop(0))
        if connection.client.server_key != connection.server_keys[0]:
            endpoint = connection.client.endpoint
            await connection.client.close()
            connection.client = self._new_client(endpoint, connection.server_keys[0])

    async def _maintain(self, connection: _Connection) -> None:
        """Say hello until the agent answers, then send heartbeats; start again when it was lost."""
        while True:
            connection.client.on_disconnect = partial(self._disconnected, connection)
            try:
                welcome = await connection.client.hello(wire.AgentWelcome, timeout_seconds=_HELLO_SECONDS)
                registry.check_device_id_unique(self.devices.get(welcome.device_id), welcome, *connection.address)
                connection.server_keys = [connection.client.server_key]
                await self._register(connection, welcome)
                await self._watch(connection, welcome.device_id)
            except (Unreachable, ConnectionLost, DeadlineExceeded):
                await self._miss_hello(connection)
            except HearthError as error:  # for instance another version or home key, or a duplicate device id
                if str(error) != str(self._refusals.get(connection.address)):
                    log.warning("%s", error)
                self._refusals[connection.address] = error
            except Exception:  # a bug must not end the connection to an agent for good
                log.exception("the connection to %s:%d failed", *connection.address)
            await self._try_next_key(connection)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _miss_hello(self, connection: _Connection) -> None:
        """Record that a known device has not answered a hello, or the requests that follow it."""
        for device_id in self._devices_at(connection):
            if (before := self.devices.get(device_id)) is None:
                continue
            self._replace(registry.after_missed_heartbeat(before, loop_time()))
            if before.health != "dead" and self.devices[device_id].health == "dead":
                await self._end_calls(connection)

    async def _register(self, connection: _Connection, welcome: wire.AgentWelcome) -> None:
        previous = self.devices.get(welcome.device_id)
        self._by_device[welcome.device_id] = connection
        self.devices[welcome.device_id] = Device(
            welcome,
            *connection.address,
            last_seen=loop_time(),
            health="alive" if self._lease_name is None else "busy",  # not in plans until it has granted the lease
            telemetry=await _ask(connection.client, wire.GetTelemetry(), wire.Telemetry),
            quarantine=previous.quarantine if previous else None,
            silences=registry.silences_at_return(previous, welcome, loop_time()),
            watched_since=loop_time(),
        )
        if self._lease_name is not None:
            await self._acquire_lease(connection, welcome.device_id)
        self._refusals.pop(connection.address, None)
        self._last_joined = loop_time()
        self._on_change(self.devices[welcome.device_id])

    async def _acquire_lease(self, connection: _Connection, device_id: str) -> bool:
        request = wire.AcquireLease(
            holder=self.holder, holder_name=self._lease_name or "", seconds=self._wanted_seconds(device_id),
            adopt=self.running_epochs,
        )  # fmt: skip
        sent = loop_time()
        try:
            granted = await _ask(connection.client, request, wire.LeaseGranted)
        except AgentBusy as error:
            self._leased_until.pop(device_id, None)
            self._replace(registry.after_refusal(self.devices[device_id], "busy", error.explanation()))
            return False
        self._granted_seconds[device_id] = request.seconds
        self._count_lease(connection, device_id, sent)
        self.on_granted(device_id, granted.configuration)
        self.last_epoch = max(self.last_epoch, granted.last_epoch)
        self.devices[device_id] = registry.after_lease(self.devices[device_id], granted.workers)
        return True

    def _wanted_seconds(self, device_id: str) -> float:
        """How long a lease on this device should last."""
        return registry.lease_seconds(self.devices[device_id], self.lease_seconds, loop_time())

    def _lease_should_change(self, device_id: str) -> bool:
        return abs(self._wanted_seconds(device_id) - self._granted_seconds[device_id]) >= _LEASE_STEP_SECONDS

    async def _change_lease(self, connection: _Connection, device_id: str, timeout_seconds: float) -> None:
        """Give the lease the duration that it should have; the workers stay as they are. Raises LeaseLost."""
        seconds = self._wanted_seconds(device_id)
        request = wire.AcquireLease(holder=self.holder, holder_name=self._lease_name or "", seconds=seconds)
        sent = loop_time()
        # Whether the agent has taken the request is not known until it answers: count on the shorter one.
        self._granted_seconds[device_id] = min(seconds, self._granted_seconds[device_id])
        self._leased_until[device_id] = min(
            self._leased_until.get(device_id, sent), sent + self._granted_seconds[device_id] - LEASE_MARGIN_SECONDS
        )
        try:
            await _ask(connection.client, request, wire.LeaseGranted, timeout_seconds)
        except AgentBusy:
            raise LeaseLost(device=self.devices[device_id].name) from None
        self._granted_seconds[device_id] = seconds
        self._count_lease(connection, device_id, sent)

    def _count_lease(self, connection: _Connection, device_id: str, sent: float) -> None:
        """Count on a lease that was granted or renewed by a request, sent at the loop time `sent`."""
        until = sent + self._granted_seconds[device_id] - LEASE_MARGIN_SECONDS
        if not connection.client.is_connected:  # since the answer
            until = min(until, connection.closed_at + CLOSED_LEASE_COUNTED_SECONDS)
        self._leased_until[device_id] = until

    def _disconnected(self, connection: _Connection) -> None:
        """Callback of a connection that was closed, or not accepted."""
        self._closed(connection)
        connection.broken.set()

    def _closed(self, connection: _Connection) -> None:
        """Count no longer on the leases of a connection that was closed: a standby may have them soon."""
        connection.closed_at = loop_time()
        for device_id in self._devices_at(connection):
            if device_id in self._leased_until:
                until = connection.closed_at + CLOSED_LEASE_COUNTED_SECONDS
                self._leased_until[device_id] = min(self._leased_until[device_id], until)

    async def _watch(self, connection: _Connection, device_id: str) -> None:
        """Send heartbeats, and hear about the device's workers meanwhile, until the device is dead."""
        if self._lease_name is None:
            return await self._send_heartbeats(connection, device_id)
        hearing = asyncio.create_task(self._hear_of_workers(connection, device_id))
        try:
            await self._send_heartbeats(connection, device_id)
        finally:
            await cancel_all([hearing])

    async def _hear_of_workers(self, connection: _Connection, device_id: str) -> None:
        """Take note of changes of the device's workers at once; heartbeats report them as well, but later."""
        request = wire.WatchWorkers(holder=self.holder)
        while True:
            try:
                stream = connection.client.stream(
                    request, timeout_seconds=WATCH_SECONDS + REPLY_MARGIN_SECONDS, last=wire.Done
                )
                async with aclosing(stream) as replies:
                    async for reply in replies:
                        state = reply.message
                        if isinstance(state, wire.AgentState) and self._by_device.get(device_id) is connection:
                            self._replace(registry.after_report(self.devices[device_id], state))
            except UnknownMessage:  # an older agent
                return
            except HearthError as error:
                log.debug("%s reports no changes of its workers: %s", device_id, error)
            except Exception:  # a bug must not end the reports for good
                log.exception("a report of the workers of %s could not be handled", device_id)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _send_heartbeats(self, connection: _Connection, device_id: str) -> None:
        """Send heartbeats until the device is dead. Without a lease, read its telemetry instead."""
        while True:
            pause_seconds, timeout_seconds = registry.next_heartbeat(self.devices[device_id], loop_time())
            began = loop_time()
            await connection.broken.wait(pause_seconds)
            connection.broken.clear()
            if self._by_device.get(device_id) is not connection:
                return await self._stand_by(device_id)
            if self.devices[device_id].health == "dead":
                return
            if not connection.client.is_connected:
                self._replace(registry.after_connection_lost(self.devices[device_id], loop_time()))
            device = self.devices[device_id]
            asked = loop_time()
            self._excuse(device_id, asked - began - pause_seconds)
            try:
                if self._lease_name is None:
                    await _ask(connection.client, wire.Hello(name=self.holder), wire.AgentWelcome)  # answered at once
                    now = loop_time()
                    self._replace(registry.after_round_trip(self.devices[device_id], now, now - asked))
                elif device.health == "busy":
                    if await self._acquire_lease(connection, device_id):
                        self._on_change(self.devices[device_id])
                elif self._lease_should_change(device_id):
                    await self._change_lease(connection, device_id, timeout_seconds)
                    self._replace(registry.after_answer(self.devices[device_id], loop_time()))
                else:
                    sent = loop_time()
                    state = await _ask(
                        connection.client, wire.Heartbeat(holder=self.holder), wire.AgentState, timeout_seconds
                    )
                    self._count_lease(connection, device_id, sent)
                    if state.boot_id != device.welcome.boot_id:
                        return  # the agent restarted between two heartbeats: say hello again
                    now = loop_time()
                    self._replace(registry.after_heartbeat(self.devices[device_id], state, now, now - sent))
            except LeaseLost:
                self._leased_until.pop(device_id, None)
                if await self._acquire_lease(connection, device_id):
                    log.info("took the lease on %s again", device.name)
            except (Unreachable, ConnectionLost, DeadlineExceeded) as error:
                if self._by_device.get(device_id) is not connection:
                    continue
                if self.devices[device_id].health == "dead":  # `is_lost` has found that out
                    return
                self._excuse(device_id, loop_time() - asked - timeout_seconds)
                after = self.devices[device_id]
                if isinstance(error, ConnectionLost):
                    after = registry.after_connection_lost(after, loop_time())
                after = registry.after_missed_heartbeat(after, loop_time())
                if after.health != device.health:
                    log.warning("%s is %s: %s", after.name, after.health, after.reason)
                self._replace(after)
                if after.health == "dead":
                    await self._end_calls(connection)
                    return

    async def _stand_by(self, device_id: str) -> None:
        """Wait while the device answers at another address, for instance a new one."""
        while self.devices[device_id].health != "dead":
            await asyncio.sleep(_RETRY_SECONDS)

    def _excuse(self, device_id: str, late_seconds: float) -> None:
        """Do not count this coordinator's own lateness, if it is busy, as a silence of the device."""
        if late_seconds > LATE_SECONDS:
            device = self.devices[device_id]
            self.devices[device_id] = replace(device, last_seen=min(device.last_seen + late_seconds, loop_time()))

    async def _end_calls(self, connection: _Connection) -> None:
        """End all calls to a lost device at once, with DeviceLost, instead of at their deadlines."""
        self._closed(connection)
        lost = connection.client
        connection.client = self._new_client(lost.endpoint, lost.server_key)
        for client in (lost, *connection.bulk):
            client.fail(ConnectionLost(endpoint=client.endpoint))
        await lost.close()

    def _replace(self, device: Device) -> None:
        """Store a device's new record, and call `on_change` if its health or workers changed."""
        before = self.devices[device.device_id]
        self.devices[device.device_id] = device
        if before.health != device.health or _worker_states(before) != _worker_states(device):
            self._on_change(device)

    def _update(self, device_id: str, **changes: Any) -> None:
        self._replace(replace(self.devices[device_id], **changes))

    async def _release_all(self) -> None:
        release = wire.ReleaseLease(holder=self.holder, keep_workers=self.keep_workers)
        calls = (each.client.call(release, timeout_seconds=_RELEASE_SECONDS) for each in self._by_device.values())
        await asyncio.gather(*calls, return_exceptions=True)  # the lease of an unreachable agent expires


async def _ask(client: RpcClient, message: wire.Message, expected: type[_T], seconds: float = _HELLO_SECONDS) -> _T:
    reply = await client.call(message, timeout_seconds=seconds)
    if not isinstance(reply.message, expected):
        raise BadMessage(reason=f"an agent answered {type(message).__name__} with {type(reply.message).__name__}")
    return reply.message


def _worker_states(device: Device) -> list[tuple[str, str, int | None]] | None:
    workers = device.state.workers if device.state else None
    return [(each.deployment, each.state, each.late_rank) for each in workers] if workers is not None else None


async def ask_with_listener(
    fleet: Fleet, caller: Device, listener: Device, request: Callable[..., Any], expected: type[_T], seconds: float
) -> _T:
    """Send `caller` a request for which it connects to the data port of `listener`.

    `request` is called with the listener's address and key. `seconds` is the time limit of the request itself; the
    timeouts around it are 5 and 10 s longer.
    """
    key = listener.welcome.device_public_key
    opened = wire.OpenLinkProbe(
        peer_public_key=caller.welcome.device_public_key, seconds=seconds + LINK_OPEN_MARGIN_SECONDS
    )
    await fleet.ask(listener.device_id, opened, wire.Done)
    message = request(host=listener.host, port=listener.welcome.link_port, peer_public_key=key)
    return await fleet.ask(caller.device_id, message, expected, timeout_seconds=seconds + REPLY_MARGIN_SECONDS)
