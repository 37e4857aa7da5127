"""Addresses with a port: how they are written, and whether a program listens there."""

from __future__ import annotations

import asyncio
import errno
import socket

from hearth.errors import BadSetting, PortInUse
from hearth.platform.asyncio_tools import with_timeout


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def local_address(bind_host: str, port: int) -> str:
    """The address at which programs on this computer reach a port that is bound to `bind_host`."""
    return f"{bracketed('127.0.0.1' if bind_host in ('0.0.0.0', '::') else bind_host)}:{port}"


def listening_socket(host: str, port: int, backlog: int, host_setting: str) -> socket.socket:
    """A listening socket that does not block; port 0: any free port. `::` is all addresses, those of IPv4 too.

    Raises PortInUse, and BadSetting that names `host_setting`.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(port=port, setting="--port") from None
        reason = f"{host} port {port} cannot be bound ({error.strerror or error})"
        raise BadSetting(setting=host_setting, reason=reason) from None
    listener.setblocking(False)
    return listener


async def refuses_connections(host: str, port: int, timeout_seconds: float) -> bool:
    """Whether the computer refuses TCP connections to this port, at all of its addresses: no program listens there.

    False if it accepts one, or does not answer in time.
    """

    async def attempt() -> bool:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                try:
                    await loop.sock_connect(connection, address)
                except ConnectionRefusedError:
                    continue
                return False
        return bool(found)

    try:
        return await with_timeout(timeout_seconds, attempt())
    except (OSError, asyncio.TimeoutError):
        return False
