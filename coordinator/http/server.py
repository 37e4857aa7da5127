"""Runs the application in uvicorn: listens, serves, and closes its connections to the coordinator at the end.

uvicorn closes a connection without a request only after an answer. A client that sends half a request, or nothing, or that
does not read its answer, would keep one of the gateway's connections for ever, so that they have deadlines here. Where there
are too many, the oldest one without a complete request makes room. A connection counts from before its TLS handshake.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.http.app import MAX_HEADER_BYTES, http_app
from coordinator.http.homes import Homes
from coordinator.http.settings import HttpSettings
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import cancel_all, loop_time, supervised
from hearth.platform.discovery import HTTP_SERVICE, advertised
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.network import bracketed, listening_socket

log = logging.getLogger(__name__)

ARRIVAL_SECONDS = 30.0  # for a whole request, from the connection or from its first byte on: 8 MiB at 2.2 Mbit/s
UNREAD_SECONDS = 60.0  # for which a client may leave 64 KiB of its answer unread, besides what the kernel holds
MAX_CONNECTIONS = 512
MAX_CONNECTIONS_OF_ADDRESS = 128
HANDSHAKE_SECONDS = 5.0  # of TLS
REQUEST_SECONDS = 1.0  # that a connection has for its request until another one may take its place
_NO_DESCRIPTOR_SECONDS = 0.1  # to wait after an error of accepting, such as too many open files
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ALL_ADDRESSES = ("0.0.0.0", "::")
_IDLE_SECONDS = 30  # after an answer, for the next request to begin; the first one has ARRIVAL_SECONDS
_BACKLOG = 2048  # connections that the kernel accepts while the process is busy; it drops further ones, for a second
_ACCEPTED_AT_ONCE = 100
_RECEIVED_BYTES = 64 << 10  # of a connection that wait to be read; of a body that is refused, no more comes
_DRAIN_SECONDS = 5  # for answers in progress at the end


def serve(settings: HttpSettings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status."""
    try:
        listening = listening_socket(settings.host, settings.port, _BACKLOG, "--listen")
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
        asyncio.run(_serve(settings, listening))
    except HearthError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _serve(settings: HttpSettings, listening: socket.socket) -> None:
    homes = Homes(settings)
    # A connection with TLS has a buffer of this size from before its handshake on: 256 KiB by default.
    SSLProtocol.max_size = _RECEIVED_BYTES  # type: ignore[attr-defined]
    # Otherwise uvicorn logs a warning for each request that is not valid HTTP.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(homes.close)
        certificate = None
        if (tls := settings.tls_folder) is not None:
            from coordinator.http.certificates import OwnTls  # with `cryptography`, which takes 9 MB

            own = (tls, listening.getsockname()[0], settings.allowed_hosts)
            certificate = await on_disk(tls, FILE_SECONDS, OwnTls, *own)
        files = (settings.certificate, settings.private_key) if certificate is None else (certificate.chain, None)
        config = uvicorn.Config(
            http_app(homes, settings.allowed_hosts), http=BoundedProtocol, ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, date_header=True,
            timeout_keep_alive=_IDLE_SECONDS, timeout_graceful_shutdown=_DRAIN_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, ssl_certfile=files[0], ssl_keyfile=files[1],
            proxy_headers=False,
        )  # fmt: skip
        config.load()
        if certificate is not None:
            assert config.ssl is not None
            keeping = asyncio.create_task(certificate.keep(config.ssl))
            stack.push_async_callback(cancel_all, [keeping])
            _tell(f"certificate of the authority in {certificate.authority}, SHA-256 {certificate.fingerprint}")
        elif settings.scheme == "http" and settings.host not in _LOOPBACK:
            _tell("warning: clients send their tokens unencrypted; use --tls, or this on a trusted network only")
        _tell(f"listening on {settings.scheme}://{bracketed(settings.host)}:{listening.getsockname()[1]}")
        fields = {"scheme": settings.scheme, **({"tls": certificate.fingerprint} if certificate is not None else {})}
        async with _advertised(settings, listening, homes.coordinator_public, fields):
            server = uvicorn.Server(config)
            accepting = supervised(Connections(server).accept(listening), "the gateway's acceptance of connections")
            stack.push_async_callback(cancel_all, [accepting])
            await server.serve(sockets=[])


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _advertised(
    settings: HttpSettings, listening: socket.socket, public_key: str, fields: Mapping[str, str]
) -> AbstractAsyncContextManager[None]:
    """Advertise the gateway over mDNS, if others can reach it. `public_key`: of the home that it belongs to."""
    if not settings.advertise or settings.host in _LOOPBACK:
        return nullcontext()
    host, port = listening.getsockname()[:2]
    interfaces = settings.interfaces if host in _ALL_ADDRESSES else (host,)
    return advertised(HTTP_SERVICE, port, public_key, secrets.token_hex(8), lambda: interfaces, fields)


# ---- connections -------------------------------------------------------------------------------------------------------


class Connections:
    """Accepts connections of a listening socket for a server of uvicorn, which is told of no socket itself."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._open: dict[_Connection, None] = {}  # the oldest first

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled, which ends handshakes and leaves connections to the server."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    self._open_or_close(*await loop.sock_accept(listening))
                    with suppress(BlockingIOError):
                        for _ in range(_ACCEPTED_AT_ONCE):
                            self._open_or_close(*listening.accept())
                    await asyncio.sleep(0)  # `sock_accept` does not let others run while connections wait
                except OSError as error:
                    log.warning("a connection cannot be accepted: %s", error)
                    await asyncio.sleep(_NO_DESCRIPTOR_SECONDS)
        finally:
            await cancel_all([each.opening for each in self._open if each.opening is not None])

    def _open_or_close(self, accepted: socket.socket, address: tuple[Any, ...]) -> None:
        if self._server.should_exit or not self._has_room(address[0]):
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(address[0])
        self._open[connection] = None
        connection.opening = asyncio.create_task(self._connect(connection, accepted))
        connection.opening.add_done_callback(partial(self._opened, connection, accepted))

    def _has_room(self, address: str) -> bool:
        """Whether one more connection of this address may be open, if need be in place of an older one."""
        crowded = [each for each in self._open if each.address == address]
        if len(crowded) < MAX_CONNECTIONS_OF_ADDRESS:
            crowded = list(self._open)
            if len(crowded) < MAX_CONNECTIONS:
                return True
        oldest = next((each for each in crowded if each.awaits_request), None)
        if oldest is None or loop_time() < oldest.opened + REQUEST_SECONDS:
            return False
        del self._open[oldest]
        oldest.abort()
        return True

    async def _connect(self, connection: _Connection, accepted: socket.socket) -> None:
        config = self._server.config
        loop = asyncio.get_running_loop()

        def make_protocol() -> BoundedProtocol:
            protocol = BoundedProtocol(config=config, server_state=self._server.server_state, app_state={})
            protocol.on_lost = lambda: self._open.pop(connection, None)
            return protocol

        with suppress(OSError):  # of the handshake; also an SSLError, and a ConnectionError
            _, connection.protocol = await loop.connect_accepted_socket(
                make_protocol, accepted, ssl=config.ssl,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if config.ssl is not None else None,
            )  # fmt: skip

    def _opened(self, connection: _Connection, accepted: socket.socket, _: object) -> None:
        """The handshake has ended. It may have failed, or have been given up, perhaps before it began."""
        connection.opening = None
        if connection.protocol is None:
            self._open.pop(connection, None)
            accepted.close()


class _Connection:
    """A connection that was accepted. Its protocol is there once its handshake has ended."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.opened = loop_time()
        self.opening: asyncio.Task[None] | None = None
        self.protocol: BoundedProtocol | None = None

    @property
    def awaits_request(self) -> bool:
        """Whether no complete request of it is being answered."""
        return self.protocol is None or self.protocol.awaits_request

    def abort(self) -> None:
        if self.protocol is not None:
            self.protocol.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class BoundedProtocol(H11Protocol):
    """One connection. It is closed if a request takes too long to arrive, or an answer to be read."""

    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    on_lost: Callable[[], object] | None = None

    @property
    def awaits_request(self) -> bool:
        """Whether a part of a request is missing."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_arrival()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:  # the next request has begun
            self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_arrival()
        self._stop_unread()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.body.clear()  # what was not read would stay until the next garbage collection

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _watch_arrival(self) -> None:
        """Keep a deadline while a part of a request is missing."""
        if not self.awaits_request:
            self._stop_arrival()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_SECONDS, self.transport.abort)

    def _stop_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
