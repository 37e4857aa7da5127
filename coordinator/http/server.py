"""Runs the application in uvicorn: listens, serves, and closes its connections to the coordinator at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

import uvicorn

from coordinator.http.app import MAX_HEADER_BYTES, http_app
from coordinator.http.connections import BoundedProtocol, Connections
from coordinator.http.homes import Homes
from coordinator.http.settings import HttpSettings
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.discovery import HTTP_SERVICE, advertised
from hearth.platform.network import bracketed, listening_socket

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ALL_ADDRESSES = ("0.0.0.0", "::")
_IDLE_SECONDS = 30  # after an answer, for the next request to begin; the first one has ARRIVAL_SECONDS
_BACKLOG = 128  # connections that the kernel accepts while the process is busy
_DRAIN_SECONDS = 5  # for answers in progress at the end


def serve(settings: HttpSettings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status."""
    try:
        listening = listening_socket(settings.host, settings.port, _BACKLOG, "--listen")
        asyncio.run(_serve(settings, listening))
    except HearthError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _serve(settings: HttpSettings, listening: socket.socket) -> None:
    homes = Homes(settings)
    # Otherwise uvicorn logs a warning for each request that is not valid HTTP.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(homes.close)
        certificate = None
        if settings.tls_folder is not None:
            from coordinator.http.certificates import OwnTls  # with `cryptography`, which takes 9 MB

            certificate = OwnTls(settings.tls_folder, listening.getsockname()[0], settings.allowed_hosts)
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
            accepting = asyncio.create_task(Connections(server).accept(listening))
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
