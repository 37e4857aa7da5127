"""Simulated hosts and links, and ZeroMQ sockets on them with the interface of `zmq.asyncio`.

A connection behaves as ZeroMQ over TCP does: messages arrive in order and once, or the connection breaks and those on their
way are lost. A cut link delays messages until it heals or heartbeats give the connection up; a killed process closes its
connections at once; a host without power closes none. Reconnection is automatic.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import zmq
from simulation.clock import CURRENT_PROCESS, Process, VirtualLoop
from simulation.disk import Disk

# A connection whose other end is silent breaks after this many seconds: a ZMTP heartbeat every 2 s, timeout 6 s.
HEARTBEAT_LOSS_SECONDS = (6.0, 8.0)
CONNECT_RETRY_SECONDS = 1.0  # to a host that does not answer: the next attempt of TCP's
# Between attempts to connect to a process that does not listen yet. A child process is tried every 20 ms in truth, which would
# be a tenth of all events.
MIN_RETRY_SECONDS = 0.1
_SPACING_SECONDS = 1e-6  # between two messages of a connection: timers of one instant fire in any order
KEY_REFUSED = 400  # the status of a gatekeeper's refusal
FIRST_PORT = 50_000  # of ports that the simulation chooses


@dataclass(eq=False)
class Host:
    """A computer. `processes` are those that were started on it."""

    name: str
    disk: Disk
    powered: bool = True
    processes: list[Process] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Connection:
    """A connection, or an attempt at one. `up` says for each end whether it takes the connection as established."""

    client: Socket
    server: Socket
    identity: bytes
    up: dict[Socket, bool]
    last_arrival: dict[Socket, float]
    held: dict[Socket, deque[tuple[bytes, ...]]]  # messages to this end that a cut link holds back
    client_key: str

    def other(self, end: Socket) -> Socket:
        return self.server if end is self.client else self.client


class Network:
    """All hosts, links and connections."""

    def __init__(self, loop: VirtualLoop, random: Random, folder: Path) -> None:
        self.loop = loop
        self.random = random
        self.hosts: dict[str, Host] = {}
        self.connections: dict[Connection, None] = {}  # in order of their creation
        self.listeners: dict[tuple[str, str], Socket] = {}  # by host name, and port or path
        self.num_messages = 0
        self._folder = folder
        self._cut: set[frozenset[str]] = set()
        self._slow: dict[frozenset[str], float] = {}  # seconds of additional delay
        self._isolated: set[str] = set()
        self._rejected: dict[str, str] = {}  # hosts whose connections a firewall rejects, but for those to one other
        self._next_port = FIRST_PORT
        self._next_identity = 0
        self._held_datagrams: list[tuple[str, Process, Callable[..., object], tuple[Any, ...]]] = []

    def add_host(self, name: str) -> Host:
        host = self.hosts[name] = Host(name, Disk(self.loop, self._folder / name))
        return host

    def start_process(self, host: Host, name: str) -> Process:
        process = Process(self.loop, host, f"{host.name}/{name}")
        host.processes.append(process)
        process.at_exit.append(lambda: self._process_ended(process))
        return process

    def choose_port(self) -> int:
        self._next_port += 1
        return self._next_port

    # ---- links ----------------------------------------------------------------------------------------------------

    def connected(self, one: str, other: str) -> bool:
        """Whether packets pass between two hosts."""
        if not (self._cut or self._isolated):
            return self.hosts[one].powered and self.hosts[other].powered
        if one == other:
            return self.hosts[one].powered
        return (
            frozenset((one, other)) not in self._cut
            and not self._isolated & {one, other}
            and self.hosts[one].powered
            and self.hosts[other].powered
        )

    def cut(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))
        self._give_up_silent({one, other})

    def isolate(self, name: str) -> None:
        self._isolated.add(name)
        self._give_up_silent({name})

    def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))
        self._release_held()

    def reconnect(self, name: str) -> None:
        self._isolated.discard(name)
        self._release_held()

    def slow_down(self, one: str, other: str, seconds: float) -> None:
        self._slow[frozenset((one, other))] = seconds

    def reject(self, name: str, spared: str) -> None:
        """A firewall resets all connections between a host and the others but `spared`, and refuses new ones."""
        self._rejected[name] = spared
        for connection in list(self.connections):
            if self._rejects(connection.client.host.name, connection.server.host.name):
                self.break_connection(connection)

    def accept_again(self, name: str) -> None:
        self._rejected.pop(name, None)

    def refuses(self, one: str, other: str, port: int) -> bool:
        """Whether connections to a port are refused: nothing listens there, or a firewall says so."""
        if self._rejects(one, other):
            return True
        return self.connected(one, other) and (other, str(port)) not in self.listeners

    def _rejects(self, one: str, other: str) -> bool:
        ends = {one, other}
        return len(ends) > 1 and any(name in ends and spared not in ends for name, spared in self._rejected.items())

    def heal_all(self) -> None:
        self._cut.clear()
        self._isolated.clear()
        self._rejected.clear()
        self._slow.clear()
        self._release_held()

    def reset(self, one: str, other: str) -> None:
        """Reset all connections between two hosts."""
        for connection in list(self.connections):
            if {connection.client.host.name, connection.server.host.name} == {one, other}:
                self.break_connection(connection)

    def delay(self, one: str, other: str, num_bytes: int = 0) -> float:
        if one == other:
            return 20e-6
        slow = self._slow.get(frozenset((one, other)), 0.0) if self._slow else 0.0
        return 0.3e-3 + self.random.random() * 1e-3 + num_bytes / 50e6 + slow

    # ---- connections ----------------------------------------------------------------------------------------------

    def begin_connect(self, client: Socket, address: tuple[str, str]) -> None:
        """One attempt to connect; the next one follows by itself."""
        if client.closed:
            return
        host, where = address
        ipc = host == "ipc"
        server_host = client.host.name if ipc else host

        def again(seconds: float) -> None:
            self.loop.call_in(client.process, seconds, self.begin_connect, client, address)

        if server_host not in self.hosts or not self.connected(client.host.name, server_host):
            return again(CONNECT_RETRY_SECONDS)
        server = self.listeners.get((server_host, where))
        if server is None or server.closed or self._rejects(client.host.name, server_host):
            return again(max(client.next_retry_seconds(), MIN_RETRY_SECONDS))
        self._next_identity += 1
        connection = Connection(
            client,
            server,
            self._next_identity.to_bytes(5, "big"),
            {client: False, server: False},
            {client: 0.0, server: 0.0},
            {client: deque(), server: deque()},
            client.options.get("curve_publickey", b"").decode(),
        )
        self.connections[connection] = None
        client.connection = connection
        delay = 2 * self.delay(client.host.name, server_host)
        self.loop.call_in(server.process, delay, self._accept, connection)

    def _accept(self, connection: Connection) -> None:
        """The server's part of the handshake."""
        client, server = connection.client, connection.server
        if connection not in self.connections:
            return
        if server.closed or not self.connected(client.host.name, server.host.name):
            return self.break_connection(connection)
        delay = self.delay(client.host.name, server.host.name)
        if server.options.get("curve_server"):
            if client.options.get("curve_serverkey") != server.options["curve_publickey"]:
                self.loop.call_in(
                    client.process, delay, self._refused, connection, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                )
                return
            domain = server.options["zap_domain"].decode()
            key = client.options["curve_publickey"].decode()
            if not server.context.gatekeeper_admits(domain, key):
                self.loop.call_in(client.process, delay, self._refused, connection, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
                return
        connection.up[server] = True
        server.routes[connection.identity] = connection
        self.loop.call_in(client.process, delay, self._established, connection)

    def _refused(self, connection: Connection, event: int) -> None:
        self.connections.pop(connection, None)
        connection.client.refused(event)

    def _established(self, connection: Connection) -> None:
        if connection not in self.connections or connection.client.closed:
            return
        if not self.connected(connection.client.host.name, connection.server.host.name):
            return self.break_connection(connection)
        connection.up[connection.client] = True
        connection.client.established()

    def transmit(self, connection: Connection, sender: Socket, frames: tuple[bytes, ...]) -> None:
        """Send a message; `sender` takes the connection as established."""
        receiver = connection.other(sender)
        self.num_messages += 1
        delay = self.delay(sender.host.name, receiver.host.name, sum(map(len, frames)))
        self._schedule(connection, receiver, delay, self._arrive, frames)

    def _schedule(
        self,
        connection: Connection,
        receiver: Socket,
        delay: float,
        arrive: Callable[..., object],
        frames: tuple[bytes, ...],
    ) -> None:
        """Let a message arrive after those sent before it."""
        now = self.loop.time()
        arrival = max(now + delay, connection.last_arrival[receiver] + _SPACING_SECONDS)
        connection.last_arrival[receiver] = arrival
        self.loop.call_in(receiver.process, arrival - now, arrive, connection, receiver, frames)

    def _arrive(self, connection: Connection, receiver: Socket, frames: tuple[bytes, ...]) -> None:
        if connection not in self.connections or receiver.closed:
            return
        if connection.held[receiver] or not self.connected(connection.client.host.name, connection.server.host.name):
            connection.held[receiver].append(frames)
            return
        receiver.arrived(connection, frames)

    def _release_held(self) -> None:
        for connection in list(self.connections):
            if self.connected(connection.client.host.name, connection.server.host.name):
                for receiver in connection.held:
                    self.loop.call_in(receiver.process, 1e-3, self._deliver_held, connection, receiver)
        waiting, self._held_datagrams = self._held_datagrams, []
        for sender, process, callback, arguments in waiting:
            self.send_datagram(sender, process, callback, *arguments)

    def _deliver_held(self, connection: Connection, receiver: Socket) -> None:
        """Deliver what a cut link held back, before what was sent later; it waits on if the link is cut again."""
        held = connection.held[receiver]
        while held and connection in self.connections and not receiver.closed:
            if not self.connected(connection.client.host.name, connection.server.host.name):
                return
            receiver.arrived(connection, held.popleft())

    def break_connection(self, connection: Connection) -> None:
        """Break a connection now, at both ends."""
        if connection in self.connections:
            del self.connections[connection]
            for end in (connection.client, connection.server):
                self._tell_broken(connection, end)

    def _tell_broken(self, connection: Connection, end: Socket) -> None:
        self.loop.call_in(end.process, 1e-4, end.broken, connection)

    def _give_up_silent(self, names: set[str]) -> None:
        """Break the connections of these hosts, if the link is still cut at the heartbeats' timeout."""

        def check(connection: Connection, ends: set[str]) -> None:
            if connection in self.connections and not self.connected(*sorted(ends)):
                self.break_connection(connection)

        for connection in list(self.connections):
            ends = {connection.client.host.name, connection.server.host.name}
            if names <= ends and len(ends) > 1:
                self.loop.call_in(None, self.random.uniform(*HEARTBEAT_LOSS_SECONDS), check, connection, ends)

    # ---- processes ------------------------------------------------------------------------------------------------

    def stopped(self, process: Process) -> None:
        """A process was stopped: its peers lose their connections to it unless it continues soon."""
        for connection in list(self.connections):
            if process in (connection.client.process, connection.server.process):
                self.loop.call_in(
                    None, self.random.uniform(*HEARTBEAT_LOSS_SECONDS), self._check_stopped, connection, process
                )

    def _check_stopped(self, connection: Connection, process: Process) -> None:
        if process.stopped and connection in self.connections:
            self.break_connection(connection)

    def _process_ended(self, process: Process) -> None:
        """The kernel closes the sockets of a process, and tells the peers if the host still has power."""
        process.host.processes.remove(process)
        for key, socket in list(self.listeners.items()):
            if socket.process is process:
                del self.listeners[key]
        for connection in list(self.connections):
            if process in (connection.client.process, connection.server.process):
                if process.host.powered:
                    self.break_connection(connection)
                else:
                    self.loop.call_in(
                        None, self.random.uniform(*HEARTBEAT_LOSS_SECONDS), self.break_connection, connection
                    )

    def power_off(self, host: Host) -> None:
        """Cut the power of a host: its processes end without closing their connections, and its last writes may be lost."""
        host.powered = False
        for process in list(host.processes):
            process.kill()
        host.disk.lose_last_writes(self.random)

    # ---- tiles ----------------------------------------------------------------------------------------------------

    def send_datagram(self, sender: str, process: Process, callback: Callable[..., object], *arguments: Any) -> None:
        """Call back in `process` once a message from the host `sender` has reached it; a cut link holds it back."""
        if not self.connected(sender, process.host.name):
            self._held_datagrams.append((sender, process, callback, arguments))
            return
        self.loop.call_in(process, self.delay(sender, process.host.name), callback, *arguments)


# ---- sockets ------------------------------------------------------------------------------------------------------------


class Frame:
    """A received frame, with the interface of `zmq.Frame`."""

    __slots__ = ("bytes", "user_id")

    def __init__(self, data: bytes, user_id: str) -> None:
        self.bytes = data
        self.user_id = user_id

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.bytes)

    def get(self, name: str) -> str:
        assert name == "User-Id"
        return self.user_id

    def __len__(self) -> int:
        return len(self.bytes)


class _Inbox:
    """Received messages, and those who wait for one."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._messages: deque[list[Any]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: list[Any]) -> None:
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[Any]:
        while not self._messages:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._messages.popleft()


class _Monitor:
    """The monitor socket of a socket."""

    def __init__(self, loop: VirtualLoop, events: int) -> None:
        self._inbox = _Inbox(loop)
        self._events = events

    def report(self, event: int) -> None:
        if self._events & event:
            value = KEY_REFUSED if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else 0
            self._inbox.put([struct.pack("=hi", event, value), b""])

    async def recv_multipart(self) -> list[bytes]:
        return await self._inbox.get()

    def close(self, linger: int | None = None) -> None:
        pass


class Socket:
    """A ROUTER or DEALER socket of the current process."""

    # Attributes of this class; pyzmq takes any other one as a socket option.
    _OWN = frozenset(
        (
            *("context", "kind", "process", "host", "options", "routes", "closed", "connection", "monitor", "port"),
            *("_inbox", "_retry_seconds", "_outgoing", "_address", "_network"),
        )
    )

    def __init__(self, context: Context, kind: int) -> None:
        process = CURRENT_PROCESS.get()
        assert process is not None
        self.context = context
        self.kind = kind
        self.process = process
        self.host: Host = process.host
        self.options: dict[Any, Any] = {}
        self.routes: dict[bytes, Connection] = {}  # of a bound socket, by identity
        self.closed = False
        self.connection: Connection | None = None  # of a connected socket
        self.monitor: _Monitor | None = None
        self.port = 0
        self._network: Network = context.network
        self._inbox = _Inbox(self._network.loop)
        self._retry_seconds = 0.0
        self._outgoing: list[tuple[bytes, ...]] = []  # of a socket that queues while it is not connected
        self._address: tuple[str, str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            self.options[name] = value

    def setsockopt(self, option: int, value: Any) -> None:
        self.options[option] = value

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return f"tcp://{self.host.name}:{self.port}"

    def bind(self, endpoint: str) -> None:
        scheme, _, rest = endpoint.partition("://")
        where = rest if scheme == "ipc" else rest.rpartition(":")[2]
        if where == "*":
            where = str(self._network.choose_port())
        if (self.host.name, where) in self._network.listeners:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.port = int(where) if scheme == "tcp" else 0
        self._network.listeners[self.host.name, where] = self

    def connect(self, endpoint: str) -> None:
        scheme, _, rest = endpoint.partition("://")
        host, _, port = rest.rpartition(":")
        self._address = ("ipc", rest) if scheme == "ipc" else (host, port)
        self._network.loop.call_in(self.process, 0.0, self._network.begin_connect, self, self._address)

    def get_monitor_socket(self, events: int = zmq.EVENT_ALL) -> _Monitor:
        self.monitor = _Monitor(self._network.loop, events)
        return self.monitor

    def disable_monitor(self) -> None:
        self.monitor = None

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self.context.sockets.pop(self, None)
        for key, socket in list(self._network.listeners.items()):
            if socket is self:
                del self._network.listeners[key]
        for connection in list(self.routes.values()):
            self._network.break_connection(connection)
        if self.connection is not None:
            self._network.break_connection(self.connection)

    async def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        frames = await self._inbox.get()
        return [frame.bytes for frame in frames] if copy else frames

    async def send_multipart(self, frames: Sequence[Any], flags: int = 0, copy: bool = True, **_: Any) -> None:
        self.send_now(frames)

    def send_now(self, frames: Sequence[Any]) -> None:
        parts = tuple([frame.bytes if isinstance(frame, Frame) else bytes(frame) for frame in frames])
        if self.kind == zmq.ROUTER:
            route = self.routes.get(parts[0])
            if route is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            self._network.transmit(route, self, parts[1:])
            return
        connection = self.connection or next(iter(self.routes.values()), None)
        if connection is not None and connection.up[self]:
            self._network.transmit(connection, self, parts)
        elif self.options.get(zmq.IMMEDIATE):
            raise zmq.Again
        else:
            self._outgoing.append(parts)

    async def receive(self) -> list[Any]:
        return await self.recv_multipart(copy=False)

    # ---- called by the network --------------------------------------------------------------------------------------

    def next_retry_seconds(self) -> float:
        """libzmq's pause before the next attempt to connect, which doubles up to its limit."""
        first = self.options.get("reconnect_ivl", 100) / 1000
        last = self.options.get("reconnect_ivl_max", 0) / 1000
        self._retry_seconds = min(max(self._retry_seconds * 2, first), max(last, first))
        return self._retry_seconds

    def established(self) -> None:
        self._retry_seconds = 0.0
        if self.monitor is not None:
            self.monitor.report(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert self.connection is not None
        for parts in self._outgoing:
            self._network.transmit(self.connection, self, parts)
        self._outgoing.clear()

    def refused(self, event: int) -> None:
        self.connection = None
        if self.closed:
            return
        if self.monitor is not None:
            self.monitor.report(event)
        assert self._address is not None
        self._network.loop.call_in(
            self.process, self.next_retry_seconds(), self._network.begin_connect, self, self._address
        )

    def broken(self, connection: Connection) -> None:
        was_up = connection.up[self]
        connection.up[self] = False
        self.routes.pop(connection.identity, None)
        if self.connection is connection:
            self.connection = None
            if not self.closed:
                if was_up and self.monitor is not None:
                    self.monitor.report(zmq.EVENT_DISCONNECTED)
                assert self._address is not None
                self._network.loop.call_in(
                    self.process, self.next_retry_seconds(), self._network.begin_connect, self, self._address
                )

    def arrived(self, connection: Connection, parts: tuple[bytes, ...]) -> None:
        key = connection.client_key if self.routes else ""
        frames = [Frame(part, key) for part in parts]
        if self.kind == zmq.ROUTER:
            frames.insert(0, Frame(connection.identity, key))
        self._inbox.put(frames)


class Context:
    """A context with the interface of `zmq.asyncio.Context`, on the network of the current process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        process = CURRENT_PROCESS.get()
        self.network: Network = process.host.variables["network"]
        self.sockets: dict[Socket, None] = {}
        self.gatekeeper: Gatekeeper | None = None

    def socket(self, kind: int, **_: Any) -> Socket:
        socket = Socket(self, kind)
        self.sockets[socket] = None
        return socket

    def destroy(self, linger: int | None = None) -> None:
        for socket in list(self.sockets):
            socket.close()

    term = destroy

    def set(self, option: int, value: Any) -> None:
        pass

    def gatekeeper_admits(self, domain: str, key: str) -> bool:
        return self.gatekeeper is not None and self.gatekeeper.admits(domain, key)


class Gatekeeper:
    """Stands for `hearth.platform.security.Gatekeeper`: the same rules, asked at every handshake."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rules: dict[str, Callable[[str], bool]] = {}

    def admit(self, domain: str, rule: Callable[[str], bool]) -> None:
        self._rules[domain] = rule

    def has_worked(self) -> bool:
        return True

    def start(self) -> None:
        self._context.gatekeeper = self

    def stop(self) -> None:
        self._context.gatekeeper = None

    async def close(self) -> None:
        self.stop()

    def admits(self, domain: str, key: str) -> bool:
        rule = self._rules.get(domain)
        return rule is not None and bool(rule(key))
