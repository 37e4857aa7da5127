"""Addresses with a port: how they are written, and whether a program listens there."""

from __future__ import annotations

import asyncio
import socket

from hearth.platform.asyncio_tools import with_timeout


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


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
