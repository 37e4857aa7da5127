"""The data plane over ZeroMQ: each worker binds one PULL socket, and every peer connects a PUSH socket to it.

A worker that goes on in a new plan keeps its port and its key pair.

A TCP connection that breaks takes along what its buffers held. ZeroMQ connects again within milliseconds, and the sender then
sends its newest messages once more: a step goes on as if nothing had happened.

Encrypted (CURVE): keys are ephemeral, ZAP admits only the plan's peers, and the authenticated User-Id identifies the source.
Unencrypted, only if the user asks for it: the source is sent as a leading frame, and the plan's token in each tile header is
the only protection.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from hearth.errors import PortInUse
from hearth.platform.curve import Gatekeeper, KeyPair, harden, secure_client, secure_server, user_id
from hearth.platform.network import bracketed
from hearth.protocol import MAX_PAYLOAD_FRAME_BYTES, WORKER_CONNECT_SECONDS
from hearth.transport.base import Buffer, PeerAddress, Received
from hearth.transport.resend import MAX_BACKGROUND_BYTES, MAX_BYTES, LargeMessages, RecentMessages

MAX_FRAMES = 8  # per tile message; a tile has a header and one or two buffers
_DOMAIN = "data"
# First interval between attempts to connect again, in milliseconds: short, because a step waits. It grows up to the second one,
# so that a lost peer costs little.
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 1000
_JOIN_SECONDS = 5.0  # longest wait for the watching thread at the end, which stops at once
_FREE_EVERY_MS = 5000  # milliseconds between looks for large messages that have arrived and still take memory
# A buffer that is copied for the case of a break is itself sent without another copy from this size on: ZeroMQ then notifies
# Python, which costs as much as copying some ten KiB.
_COPIED_AGAIN_BYTES = 256 << 10
_SMALL_BYTES = 32 << 10  # of one frame that takes the shortest path: the sums of a token, for which a peer waits
_LINK_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class _Link:
    """The outgoing connection to one peer. `lock` guards the socket and the recent messages.

    Frames of more than `copied_bytes` are not copied.
    """

    def __init__(
        self, socket: zmq.Socket[Any], monitor: zmq.Socket[Any], bytes_per_second: float, copied_bytes: int
    ) -> None:
        self.socket = socket
        self.monitor = monitor  # receives the socket's events; only the watching thread uses it
        self.lock = threading.Lock()
        self.recent = RecentMessages()
        self.recent_background = RecentMessages(MAX_BACKGROUND_BYTES)
        self.large = LargeMessages(bytes_per_second)
        self.broken_at: float | None = None  # monotonic time of the first break since the connection was last there
        self.has_connected = False
        self.sent_bytes = 0  # of all messages, each counted once
        self._copied_bytes = copied_bytes

    def send(self, frames: Sequence[Buffer], background: bool) -> None:
        """Send a message, and keep it for the case that it is lost."""
        if len(frames) == 1 and isinstance(frames[0], bytes) and len(frames[0]) <= _SMALL_BYTES and not background:
            now = time.monotonic()
            self.socket.send(frames[0])
            self.recent.add(frames, now)
            return None
        kept = [frame if len(frame) > self._copied_bytes else bytes(frame) for frame in frames]
        now = time.monotonic()
        if not background and sum(map(len, kept)) > MAX_BYTES:
            return self._send_large(kept, now)
        self._write(kept, self._copied_bytes)  # first, since the peer waits
        (self.recent_background if background else self.recent).add(kept, now)

    def send_again(self, broken_at: float) -> None:
        """Send what may be lost with the connection that broke then."""
        now = time.monotonic()
        for recent in (self.recent, self.recent_background):
            for frames in recent.sent_between(now, broken_at):
                self._write(frames, self._copied_bytes)
        for frames in self.large.take_lost(broken_at):
            self._send_large(frames, now)

    def _send_large(self, frames: Sequence[Buffer], now: float) -> None:
        self.large.add(frames, now)
        self._write(frames, _COPIED_AGAIN_BYTES)

    def _write(self, frames: Sequence[Buffer], copied_bytes: int) -> None:
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            self.socket.send(frame, zmq.SNDMORE if index < last else 0, copy=len(frame) <= copied_bytes)

    def close(self) -> None:
        """Close the socket, and end the thread that watches it."""
        with self.lock:
            if not self.socket.closed:
                self.socket.disable_monitor()
                self.socket.close(linger=0)


class SocketTransport:
    """The ZeroMQ `Transport`: binds when created, then `connect` to all peers. `dropped` counts refused messages.

    `leave` ends the plan; `connect` to the peers of the next one may follow.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        bind_host: str,
        ports: tuple[int, int],
        keypair: KeyPair | None,
        copied_bytes: int | None = None,
    ) -> None:
        """Bind a port in `ports` (first, last); (0, 0): any. Without a key pair, nothing is encrypted. Raises PortInUse.

        Frames larger than `copied_bytes` are sent without a copy (None: all are copied). Sending without a copy makes
        ZeroMQ notify Python for each frame, which pays off for whole tensors but not for chunks of tiles.
        """
        self._copied_bytes = copied_bytes if copied_bytes is not None else MAX_PAYLOAD_FRAME_BYTES
        self.rank = rank
        self.num_ranks = num_ranks
        self.dropped = 0
        self.public_key = keypair.public if keypair else "0" * 40
        self._keypair = keypair
        self._context: zmq.Context[Any] = zmq.Context()
        self._rank_of_key: dict[str, int] = {}
        self._peers_known = threading.Event()
        self._closed = threading.Event()
        # A worker has no event loop: the handshakes are answered in a thread.
        self._gatekeeper = Gatekeeper(ThreadAuthenticator(self._context))
        self._pull = self._context.socket(zmq.PULL)
        if keypair is not None:
            self._gatekeeper.admit(_DOMAIN, self._admits)
            self._gatekeeper.start()
            secure_server(self._pull, keypair, _DOMAIN)
        else:
            harden(self._pull)
        self.port = self._bind(bind_host, ports)
        self._links: dict[int, _Link] = {}  # keyed by rank
        self._watching: threading.Thread | None = None
        self._monitor_numbers = itertools.count()
        # An empty message over this inproc address, which is private to the process, wakes the receiver.
        self._pull.bind("inproc://wake")
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._receive_timeout_ms = -1

    def connect(self, peers: Sequence[PeerAddress]) -> None:
        """Admit these peers and connect to each. Drops what peers of an earlier plan have sent."""
        self._drop_received()
        self._rank_of_key = {peer.public_key: peer.rank for peer in peers}
        for peer in peers:
            push = self._context.socket(zmq.PUSH)
            if self._keypair is not None:
                secure_client(push, self._keypair, peer.public_key)
            else:
                harden(push)
            push.reconnect_ivl, push.reconnect_ivl_max = _RECONNECT_MS, _RECONNECT_MAX_MS
            push.sndhwm = 0  # unlimited: sending never blocks the compute thread, and a plan bounds the data in flight
            self._links[peer.rank] = _Link(push, self._monitor(push), peer.bytes_per_second, self._copied_bytes)
            push.connect(f"tcp://{bracketed(peer.host)}:{peer.port}")
        self._peers_known.set()
        self._watching = threading.Thread(
            target=self._watch, args=(list(self._links.values()),), name="connections", daemon=True
        )
        self._watching.start()

    def leave(self, rank: int, num_ranks: int) -> None:
        """Disconnect from all peers and take this rank in the next plan. No other thread may use the transport."""
        self._peers_known.clear()
        self._rank_of_key = {}
        self._close_links()
        self.rank, self.num_ranks, self.dropped = rank, num_ranks, 0

    def send(self, target: int, frames: Sequence[Buffer], background: bool = False) -> None:
        """Queue a message for a peer; after `close`, drop it. See `Transport.send`."""
        num_bytes = sum(map(len, frames))
        if self._keypair is None:
            frames = [bytes([self.rank]), *frames]
        link = self._links[target]
        with link.lock:
            if self._closed.is_set():
                return
            link.send(frames, background)
            link.sent_bytes += num_bytes

    @property
    def sent_bytes_by_rank(self) -> tuple[int, ...]:
        """Bytes of the messages for each rank since the plan began, without what encryption and TCP add. Thread-safe."""
        links = self._links
        return tuple(links[rank].sent_bytes if rank in links else 0 for rank in range(self.num_ranks))

    def receive(self, timeout_seconds: float) -> Received | None:
        """Return the next valid message; None after the timeout, when closed, or if the message was refused."""
        timeout_ms = int(timeout_seconds * 1000)
        if timeout_ms != self._receive_timeout_ms:
            self._pull.rcvtimeo = self._receive_timeout_ms = timeout_ms
        try:
            # Not `recv_multipart`, which asks the socket again whether there are more frames.
            frames = [self._pull.recv(copy=False)]
            while frames[-1].more:
                frames.append(self._pull.recv(copy=False))
        except zmq.Again:
            return None
        return None if self._closed.is_set() else self._read(frames)

    def interrupt(self) -> None:
        """See `Transport.interrupt`."""
        with self._wake_lock:
            self._wake.send(b"")

    def close(self) -> None:
        """Wake the receiver, whose `receive` then returns None, and close the sending sockets."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._peers_known.set()
        self.interrupt()
        self._close_links()
        if self._keypair is not None:
            self._gatekeeper.stop()

    def release(self) -> None:
        """Close the receiving sockets. Call it after `close`, when no thread is in `receive` any more."""
        self._pull.close()
        self._wake.close(linger=0)
        self._context.term()

    # ---- connections that break --------------------------------------------------------------------------------------

    def _monitor(self, socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
        """A socket that receives the events of the connection of `socket`."""
        address = f"inproc://connection-{next(self._monitor_numbers)}"
        socket.monitor(address, _LINK_EVENTS)
        monitor: zmq.Socket[Any] = self._context.socket(zmq.PAIR)
        monitor.connect(address)
        return monitor

    def _watch(self, links: Iterable[_Link]) -> None:
        """Send again what may be lost whenever a connection is back, until all links are closed."""
        by_monitor = {link.monitor: link for link in links}
        poller = zmq.Poller()
        for monitor in by_monitor:
            poller.register(monitor, zmq.POLLIN)
        while by_monitor:
            for monitor, _ in poller.poll(_FREE_EVERY_MS):
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                link = by_monitor[monitor]
                if event == zmq.EVENT_MONITOR_STOPPED:
                    poller.unregister(monitor)
                    del by_monitor[monitor]
                    monitor.close(linger=0)
                elif event == zmq.EVENT_DISCONNECTED:
                    link.broken_at = link.broken_at or time.monotonic()
                else:
                    self._connected(link)
            for link in by_monitor.values():
                if link.broken_at is None:
                    with link.lock:
                        link.large.free(time.monotonic())

    def _connected(self, link: _Link) -> None:
        broken_at, link.broken_at = link.broken_at, None
        if link.has_connected and broken_at is not None:
            with link.lock:
                if not link.socket.closed:
                    link.send_again(broken_at)
        link.has_connected = True

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links = {}
        if self._watching is not None:
            self._watching.join(_JOIN_SECONDS)
            self._watching = None

    # ---- receiving ----------------------------------------------------------------------------------------------------

    def _drop_received(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._pull.recv_multipart(zmq.NOBLOCK, copy=False)

    def _read(self, frames: list[zmq.Frame]) -> Received | None:
        if len(frames) == 1 and not len(frames[0]):
            return None  # of `interrupt`
        if len(frames) > MAX_FRAMES:
            self.dropped += 1
            return None
        if self._keypair is not None:
            source = self._rank_of_key.get(user_id(frames[0]))
        else:
            leading = frames.pop(0).buffer
            source = leading[0] if len(leading) == 1 and leading[0] in self._links else None
        if source is None or not frames:
            self.dropped += 1
            return None
        return Received(source, [frame.buffer for frame in frames])

    def _admits(self, public_key: str) -> bool:
        # A peer may start its handshake before `connect` has given us its key.
        self._peers_known.wait(WORKER_CONNECT_SECONDS)
        return public_key in self._rank_of_key

    def _bind(self, host: str, ports: tuple[int, int]) -> int:
        host = bracketed(host)
        if ports == (0, 0):
            return int(self._pull.bind_to_random_port(f"tcp://{host}"))
        for port in range(ports[0], ports[1] + 1):
            try:
                self._pull.bind(f"tcp://{host}:{port}")
                return port
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
        raise PortInUse(port=ports[0], setting="--data-ports")
