"""The coordinator's connections to all agents: discovery, hello, leases and heartbeats."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from coordinator.devices import registry
from coordinator.devices.connections import Connection, Connections
from coordinator.devices.leases import Leases
from coordinator.devices.registry import Device
from hearth import errors
from hearth.plan.common import PlannedDevice
from hearth.platform.asyncio_tools import cancel_all, loop_time
from hearth.platform.security import Access
from hearth.protocol import LEASE_SECONDS, LINK_OPEN_MARGIN_SECONDS, REPLY_MARGIN_SECONDS, WATCH_SECONDS
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
_SETTLE_POLL_SECONDS = 0.05  # interval at which `settle` checks: no user notices the delay, and checks are cheap

_T = TypeVar("_T")


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
        self.devices: dict[str, Device] = {}
        self.last_epoch = 0  # the newest epoch that any agent has seen
        self._leases = Leases()
        self._lease_name = lease_name
        self._on_change = on_change or (lambda device: None)
        self._connections = Connections(
            self, access, lease_name or "hearth", interfaces, static_devices, browse, device_keys
        )
        self._refusals: dict[tuple[str, int], errors.HearthError] = {}  # by address, until that agent is accepted
        self._last_joined = -math.inf  # loop time

    async def __aenter__(self) -> Fleet:
        await self._connections.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.stop()  # first, since a heartbeat after the release would take the lease again
        if self._lease_name is not None:
            await self._release_all()
        await self._connections.close()

    @property
    def refusals(self) -> list[errors.HearthError]:
        """Errors of agents that cannot be used, for instance because of another protocol version."""
        return list(self._refusals.values())

    def device_infos(self) -> list[wire.DeviceInfo]:
        """All devices by name, then the refused agents, of which only the address is known."""
        known = {(device.host, device.port) for device in self.devices.values()}

        def refused(where: str, reason: str) -> wire.DeviceInfo:
            return wire.DeviceInfo(device_id="", name=where, host=where, state="refused", reason=reason, telemetry=None)

        refusals = [(address, error) for address, error in sorted(self._refusals.items()) if address not in known]
        return [
            *(device.info(loop_time()) for device in registry.sorted_by_name(self.devices.values())),
            *(refused(f"{host}:{port}", error.explanation()) for (host, port), error in refusals),
        ]

    def usable(self) -> list[Device]:
        return registry.usable(list(self.devices.values()), loop_time())

    async def acquire_again(self, device_id: str) -> None:
        """Acquire the lease on a device once more: with another duration, or to hear the configuration that it has stored."""
        if (connection := self._connections.by_device.get(device_id)) is not None:
            with suppress(errors.HearthError):  # the next heartbeat reports the device
                await self._acquire_lease(connection, device_id)

    def leased(self) -> set[str]:
        """The devices whose leases this coordinator surely holds now."""
        return self._leases.held(loop_time())

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
            separate = self._connections.new_client(client.endpoint, client.server_key)
            bulk = self._connections.by_device[device_id].bulk
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
        connection = self._connections.by_device.get(device_id)
        name = self.devices[device_id].name if device_id in self.devices else device_id
        if connection is None:
            raise errors.DeviceLost(device=name, reason="it is not connected")
        try:
            yield connection.client
        except (errors.Unreachable, errors.ConnectionLost) as error:
            self._replace(registry.after_connection_lost(self.devices[device_id], loop_time()))
            connection.broken.set()
            raise errors.DeviceLost(device=name, reason=error.explanation()) from None

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
        device, connection = self.devices[device_id], self._connections.by_device.get(device_id)
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
            except errors.DeadlineExceeded:
                if loop_time() - asked - seconds > LATE_SECONDS:
                    return False  # this process was too busy to read the answer
            except errors.HearthError:
                return False
        self._replace(registry.after_witnesses(self.devices[device_id], waited_seconds))
        log.warning("%s is dead: %s", device.name, self.devices[device_id].reason)
        await self._end_calls(connection)
        return True

    async def answer_at_once(self, device_ids: Iterable[str]) -> bool:
        """Whether all these devices answer a heartbeat within `_AT_ONCE_SECONDS`."""

        async def answers(device_id: str) -> bool:
            connection = self._connections.by_device.get(device_id)
            if connection is None:
                return False
            try:
                await _ask(connection.client, wire.Heartbeat(holder=self.holder), wire.AgentState, _AT_ONCE_SECONDS)
            except errors.HearthError:
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
            except errors.HearthError as error:
                log.warning("no telemetry from %s: %s", device.name, error)
                return
            if device.device_id in self.devices:
                self._replace(replace(self.devices[device.device_id], telemetry=telemetry))

        await asyncio.gather(*(read(device) for device in self.usable()))

    def record_fault(
        self, planned: Sequence[PlannedDevice], error: errors.HearthError, may_restart: bool = False
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

    def pardon(self) -> None:
        """End the quarantines of the lowest degree, if there are any, because the model does not fit without them."""
        now = loop_time()
        for device in registry.needed_despite_quarantine(list(self.devices.values()), now):
            log.warning("%s is needed: its quarantine ends", device.name)
            self.devices[device.device_id] = registry.after_pardon(device, now)

    # ---- keys of devices --------------------------------------------------------------------------------------------

    def key_admitted(self, public_key: str) -> None:
        """Try a key that `device_keys` has got at all addresses that may have it."""
        self._connections.key_admitted(public_key)

    async def drop_revoked(self) -> None:
        """End the connections to agents whose key is no longer admitted, and take them out of plans."""
        await self._connections.drop_revoked(self._refuse_revoked)

    def _refuse_revoked(self, device_id: str) -> None:
        self._replace(registry.after_refusal(self.devices[device_id], "refused", "its key was revoked"))

    # ---- one agent ------------------------------------------------------------------------------------------------

    async def maintain(self, connection: Connection) -> None:
        """Say hello until the agent answers, then send heartbeats; start again when it was lost. See `Owner`."""
        while True:
            connection.client.on_disconnect = partial(self._disconnected, connection)
            try:
                welcome = await connection.client.hello(wire.AgentWelcome, timeout_seconds=_HELLO_SECONDS)
                registry.check_device_id_unique(self.devices.get(welcome.device_id), welcome, *connection.address)
                connection.server_keys = [connection.client.server_key]
                await self._register(connection, welcome)
                await self._watch(connection, welcome.device_id)
            except (errors.Unreachable, errors.ConnectionLost, errors.DeadlineExceeded):
                await self._miss_hello(connection)
            except errors.HearthError as error:  # for instance another version or home key, or a duplicate device id
                if str(error) != str(self._refusals.get(connection.address)):
                    log.warning("%s", error)
                self._refusals[connection.address] = error
            except Exception:  # a bug must not end the connection to an agent for good
                log.exception("the connection to %s:%d failed", *connection.address)
            await self._connections.try_next_key(connection)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _miss_hello(self, connection: Connection) -> None:
        """Record that a known device has not answered a hello, or the requests that follow it."""
        for device_id in self._connections.devices_at(connection):
            if (before := self.devices.get(device_id)) is None:
                continue
            self._replace(registry.after_missed_heartbeat(before, loop_time()))
            if before.health != "dead" and self.devices[device_id].health == "dead":
                await self._end_calls(connection)

    async def _register(self, connection: Connection, welcome: wire.AgentWelcome) -> None:
        previous = self.devices.get(welcome.device_id)
        self._connections.by_device[welcome.device_id] = connection
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

    async def _acquire_lease(self, connection: Connection, device_id: str) -> bool:
        request = wire.AcquireLease(
            holder=self.holder, holder_name=self._lease_name or "", seconds=self._wanted_seconds(device_id),
            adopt=self.running_epochs,
        )  # fmt: skip
        sent = loop_time()
        try:
            granted = await _ask(connection.client, request, wire.LeaseGranted)
        except errors.AgentBusy as error:
            self._leases.lost(device_id)
            self._replace(registry.after_refusal(self.devices[device_id], "busy", error.explanation()))
            return False
        self._leases.granted(device_id, request.seconds, sent, connection.closed_since)
        self.on_granted(device_id, granted.configuration)
        self.last_epoch = max(self.last_epoch, granted.last_epoch)
        self.devices[device_id] = registry.after_lease(self.devices[device_id], granted.workers)
        return True

    def _wanted_seconds(self, device_id: str) -> float:
        """How long a lease on this device should last."""
        return registry.lease_seconds(self.devices[device_id], self.lease_seconds, loop_time())

    async def _change_lease(self, connection: Connection, device_id: str, timeout_seconds: float) -> None:
        """Give the lease the duration that it should have; the workers stay as they are. Raises LeaseLost."""
        seconds = self._wanted_seconds(device_id)
        request = wire.AcquireLease(holder=self.holder, holder_name=self._lease_name or "", seconds=seconds)
        sent = loop_time()
        self._leases.changing(device_id, seconds, sent)
        try:
            await _ask(connection.client, request, wire.LeaseGranted, timeout_seconds)
        except errors.AgentBusy:
            raise errors.LeaseLost(device=self.devices[device_id].name) from None
        self._leases.granted(device_id, seconds, sent, connection.closed_since)

    def _disconnected(self, connection: Connection) -> None:
        """Callback of a connection that was closed, or not accepted."""
        self.closed(connection)
        connection.broken.set()

    def closed(self, connection: Connection) -> None:
        """Count no longer on the leases of a connection that was closed."""
        connection.closed_at = loop_time()
        self._leases.closed(self._connections.devices_at(connection), connection.closed_at)

    def is_dead(self, device_id: str) -> bool:
        """See `Owner`."""
        return device_id in self.devices and self.devices[device_id].health == "dead"

    async def _watch(self, connection: Connection, device_id: str) -> None:
        """Send heartbeats, and hear about the device's workers meanwhile, until the device is dead."""
        if self._lease_name is None:
            return await self._send_heartbeats(connection, device_id)
        hearing = asyncio.create_task(self._hear_of_workers(connection, device_id))
        try:
            await self._send_heartbeats(connection, device_id)
        finally:
            await cancel_all([hearing])

    async def _hear_of_workers(self, connection: Connection, device_id: str) -> None:
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
                        if (
                            isinstance(state, wire.AgentState)
                            and self._connections.by_device.get(device_id) is connection
                        ):
                            self._replace(registry.after_report(self.devices[device_id], state))
            except errors.HearthError as error:
                log.debug("%s reports no changes of its workers: %s", device_id, error)
            except Exception:  # a bug must not end the reports for good
                log.exception("a report of the workers of %s could not be handled", device_id)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _send_heartbeats(self, connection: Connection, device_id: str) -> None:
        """Send heartbeats until the device is dead. Without a lease, read its telemetry instead."""
        while True:
            pause_seconds, timeout_seconds = registry.next_heartbeat(self.devices[device_id], loop_time())
            began = loop_time()
            await connection.broken.wait(pause_seconds)
            connection.broken.clear()
            if self._connections.by_device.get(device_id) is not connection:
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
                    round_trip = connection.client.round_trip_seconds
                    self._replace(registry.after_answer(self.devices[device_id], loop_time(), round_trip))
                elif device.health == "busy":
                    if await self._acquire_lease(connection, device_id):
                        self._on_change(self.devices[device_id])
                elif self._leases.should_change(device_id, self._wanted_seconds(device_id)):
                    await self._change_lease(connection, device_id, timeout_seconds)
                    self._replace(registry.after_answer(self.devices[device_id], loop_time()))
                else:
                    sent = loop_time()
                    state = await _ask(
                        connection.client, wire.Heartbeat(holder=self.holder), wire.AgentState, timeout_seconds
                    )
                    self._leases.renewed(device_id, sent, connection.closed_since)
                    if state.boot_id != device.welcome.boot_id:
                        return  # the agent restarted between two heartbeats: say hello again
                    round_trip = connection.client.round_trip_seconds
                    self._replace(registry.after_heartbeat(self.devices[device_id], state, loop_time(), round_trip))
            except errors.LeaseLost:
                self._leases.lost(device_id)
                if await self._acquire_lease(connection, device_id):
                    log.info("took the lease on %s again", device.name)
            except (errors.Unreachable, errors.ConnectionLost, errors.DeadlineExceeded) as error:
                if self._connections.by_device.get(device_id) is not connection:
                    continue
                if self.devices[device_id].health == "dead":  # `is_lost` has found that out
                    return
                self._excuse(device_id, loop_time() - asked - timeout_seconds)
                after = self.devices[device_id]
                if isinstance(error, errors.ConnectionLost):
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

    async def _end_calls(self, connection: Connection) -> None:
        """End all calls to a lost device at once, with DeviceLost, instead of at their deadlines."""
        self.closed(connection)
        lost = connection.client
        connection.client = self._connections.new_client(lost.endpoint, lost.server_key)
        for client in (lost, *connection.bulk):
            client.fail(errors.ConnectionLost(endpoint=client.endpoint))
        await lost.close()

    def _replace(self, device: Device) -> None:
        """Store a device's new record, and call `on_change` if its health or workers changed."""
        before = self.devices[device.device_id]
        self.devices[device.device_id] = device
        if before.health != device.health or _worker_states(before) != _worker_states(device):
            self._on_change(device)

    async def _release_all(self) -> None:
        release = wire.ReleaseLease(holder=self.holder, keep_workers=self.keep_workers)
        calls = (
            each.client.call(release, timeout_seconds=_RELEASE_SECONDS) for each in self._connections.by_device.values()
        )
        await asyncio.gather(*calls, return_exceptions=True)  # the lease of an unreachable agent expires


async def _ask(client: RpcClient, message: wire.Message, expected: type[_T], seconds: float = _HELLO_SECONDS) -> _T:
    reply = await client.call(message, timeout_seconds=seconds)
    if not isinstance(reply.message, expected):
        raise errors.BadMessage(
            reason=f"an agent answered {type(message).__name__} with {type(reply.message).__name__}"
        )
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
