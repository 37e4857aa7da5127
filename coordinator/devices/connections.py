"""The connections to the agents of a home: those that the user has named, and those found by mDNS, which take turns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq.asyncio

from hearth.platform.asyncio_tools import Signal, cancel_all, loop_time, supervised
from hearth.platform.curve import fingerprint
from hearth.platform.discovery import AGENT_SERVICE, Browser, DiscoveredService, parse_static_peers
from hearth.platform.security import Access
from hearth.wire.rpc import RpcClient

# Connections to agents found by mDNS that do not answer, at most. Anyone on the network can advertise agents; each connection
# takes three of ZeroMQ's 1023 sockets. A home has fewer devices.
_MAX_SILENT_CONNECTIONS = 64
_MAX_WAITING = 256  # addresses that wait for such a connection, at most: bounds the memory
_TURN_SECONDS = 30.0  # how long one of them may try before another discovered address takes its place: several hellos
_TURN_CHECK_SECONDS = 1.0  # interval at which places are given to waiting addresses


@dataclass
class Connection:
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

    @property
    def closed_since(self) -> float | None:
        """When the connection was closed; None while it is open."""
        return None if self.client.is_connected else self.closed_at


class Owner(Protocol):
    """Uses the connections."""

    async def maintain(self, connection: Connection) -> None:
        """Say hello to the agent and watch its device, until cancelled."""

    def closed(self, connection: Connection) -> None:
        """A connection is closed."""

    def is_dead(self, device_id: str) -> bool:
        """Whether this device was lost."""


class Connections:
    """The connections by address and by device, each with a task that the owner runs."""

    def __init__(
        self,
        owner: Owner,
        access: Access,
        name: str,
        interfaces: Sequence[str] | None,
        static_devices: str,
        browse: bool,
        device_keys: Callable[[], Collection[str]],
    ) -> None:
        """`name`: of this coordinator, for the agents. `device_keys()`: the public keys of devices with one of their own."""
        self.by_address: dict[tuple[str, int], Connection] = {}
        self.by_device: dict[str, Connection] = {}
        self._owner = owner
        self._access = access
        self._name = name
        self._device_keys = device_keys
        # Each address once: a second connection to an agent would outlive the fleet.
        self._static_addresses = tuple(dict.fromkeys(parse_static_peers(static_devices))) if static_devices else ()
        self._browser = (
            Browser(AGENT_SERVICE, self.on_discovered, interfaces, follow_addresses=True) if browse else None
        )
        self._context = zmq.asyncio.Context()
        # Discovered addresses without a connection, by turn: the agent's key.
        self._waiting: dict[tuple[str, int], str] = {}
        self._turns_task: asyncio.Task[None] | None = None
        self._has_ended = False  # no connection is made from then on

    async def start(self) -> None:
        """Connect to the addresses that the user has named, and to those that are found from now on."""
        if self._browser is not None:
            await self._browser.start()
            self._turns_task = supervised(self._give_turns(), "the search for agents")
        for host, port in self._static_addresses:
            self._connect(host, port, self._server_keys(), is_static=True)

    async def stop(self) -> None:
        """End the search and the tasks of the connections, which stay open."""
        self._has_ended = True
        if self._browser is not None:
            await self._browser.stop()
        if self._turns_task is not None:
            await cancel_all([self._turns_task])
        await cancel_all([connection.task for connection in self.by_address.values() if connection.task])

    async def close(self) -> None:
        """Close all connections."""
        for connection in list(self.by_address.values()):
            await connection.client.close()
        self._context.destroy(linger=0)

    def devices_at(self, connection: Connection) -> list[str]:
        """The ids of the devices that are reached over this connection."""
        return [device_id for device_id, used in self.by_device.items() if used is connection]

    def new_client(self, endpoint: str, server_key: str) -> RpcClient:
        """One more connection to an agent, which its caller closes."""
        return RpcClient(self._context, endpoint, Access(self._access.own, server_key), name=self._name)

    async def try_next_key(self, connection: Connection) -> None:
        """Connect with another of the agent's possible keys, if there are several."""
        if len(connection.server_keys) > 1:
            connection.server_keys.append(connection.server_keys.pop(0))
        if connection.client.server_key != connection.server_keys[0]:
            endpoint = connection.client.endpoint
            await connection.client.close()
            connection.client = self.new_client(endpoint, connection.server_keys[0])

    # ---- keys of devices --------------------------------------------------------------------------------------------

    def key_admitted(self, public_key: str) -> None:
        """Try a key that `device_keys` has got at all addresses that may have it."""
        for connection in self.by_address.values():
            if connection not in self.by_device.values():
                connection.server_keys = self._server_keys()
            elif connection.is_static:  # the agent may have it once it restarts; the present key is tried first
                present = connection.client.server_key
                others = [key for key in connection.server_keys if key not in (present, public_key)]
                connection.server_keys = [public_key, present, *others]
        for service in self._browser.services.values() if self._browser is not None else ():
            self.on_discovered(service)

    async def drop_revoked(self, on_device: Callable[[str], None]) -> None:
        """End the connections to agents whose key is no longer admitted; `on_device(device_id)` is called for their devices.

        Addresses that the user has named are tried with the other keys: an agent there may get one that is admitted.
        """
        admitted, ended = self._server_keys(), []
        for connection in list(self.by_address.values()):
            connection.server_keys = [key for key in connection.server_keys if key in admitted]
            if connection.client.server_key in admitted:
                continue
            for device_id in self.devices_at(connection):
                on_device(device_id)
            self._forget(connection)
            if connection.is_static or connection.server_keys:
                self._connect(*connection.address, connection.server_keys or list(admitted), connection.is_static)
            ended.append(connection)
        await self._end(ended)

    def _server_keys(self) -> list[str]:
        """Public keys of this home's agents: the one that agents with the home key share, and those of admitted devices."""
        return [self._access.server_public, *self._device_keys()]

    # ---- discovery ----------------------------------------------------------------------------------------------------

    def on_discovered(self, service: DiscoveredService) -> None:
        """Connect to an advertised agent of this home, now or when it is its turn."""
        keys = {fingerprint(key): key for key in self._server_keys()}
        key = keys.get(service.fingerprint)  # None: another home's agent, or a revoked one
        if key is not None and service.is_of(key):
            address = (service.hosts[0], service.port)
            if (known := self.by_address.get(address)) is not None:
                known.server_keys = [key]  # the agent may have another one since its restart
            elif len(self._waiting) < _MAX_WAITING:
                self._waiting[address] = key
                self._connect_waiting()

    def _connect_waiting(self) -> None:
        """Connect to waiting addresses in turn, while fewer than `_MAX_SILENT_CONNECTIONS` do not answer."""
        num_free = _MAX_SILENT_CONNECTIONS - len(self._silent_connections())
        for host, port in list(self._waiting)[: max(num_free, 0)]:
            self._connect(host, port, [self._waiting.pop((host, port))])

    def _silent_connections(self) -> list[Connection]:
        """Connections by discovery whose agent has never answered, or is dead; oldest first."""
        answering = {id(used) for device_id, used in self.by_device.items() if not self._owner.is_dead(device_id)}
        return [each for each in self.by_address.values() if not each.is_static and id(each) not in answering]

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
                if (service.hosts[0], service.port) not in self.by_address:
                    self.on_discovered(service)

    # ---- one connection -----------------------------------------------------------------------------------------------

    def _connect(self, host: str, port: int, server_keys: list[str], is_static: bool = False) -> None:
        """Keep a connection to this address, whose agent has one of these public keys."""
        if self._has_ended:  # a key was revoked while the leases are released
            return
        client = self.new_client(f"tcp://{host}:{port}", server_keys[0])
        connection = Connection((host, port), client, server_keys, is_static, loop_time())
        self.by_address[host, port] = connection
        connection.task = supervised(self._owner.maintain(connection), f"the connection to {host}:{port}")

    def _forget(self, connection: Connection) -> None:
        """Forget the connection to an agent, which is to be ended; what is known of the device stays."""
        del self.by_address[connection.address]
        self._owner.closed(connection)
        for device_id in self.devices_at(connection):
            del self.by_device[device_id]

    async def _end(self, connections: Sequence[Connection]) -> None:
        """End connections that have been forgotten."""
        await cancel_all([each.task for each in connections if each.task is not None])
        for each in connections:
            await each.client.close()
