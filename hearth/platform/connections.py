"""The TCP connections of this process, as the kernel knows them. They belong to ZeroMQ, which has no call to end one."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_RECEIVED = struct.Struct("=Q")  # the field `tcpi_bytes_received` of Linux's `tcp_info`
_RECEIVED_OFFSET = 128  # in bytes
_LISTEN = 10  # state of a listening socket
_MAX_PACING_RATE = 47  # Linux's socket option SO_MAX_PACING_RATE, for which Python has no name
# An address of no family: to connect a TCP socket to it ends its connection, and drops what it has received (Linux).
_NOWHERE = bytes(16)


def end_connection(descriptor: int) -> None:
    """End a connection; ZeroMQ notices that as if the peer had closed it, and reads nothing more of what has arrived.

    If it has ended already, another connection may have its descriptor by now: that peer connects again.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        with suppress(AttributeError, TypeError):  # no such function
            ctypes.CDLL(None).connect(connection.fileno(), _NOWHERE, len(_NOWHERE))
        connection.shutdown(socket.SHUT_RDWR)  # for other kernels


def received_bytes() -> dict[int, int]:
    """Bytes that each TCP connection has received so far, by descriptor. Empty where the kernel is not Linux."""
    found: dict[int, int] = {}
    size = _RECEIVED_OFFSET + _RECEIVED.size
    for view in _sockets():
        with suppress(OSError):  # no TCP
            information = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            if information[0] != _LISTEN and len(information) == size:  # an older kernel has no such field
                found[view.fileno()] = int(_RECEIVED.unpack_from(information, _RECEIVED_OFFSET)[0])
    return found


def pace_connections(port: int, bytes_per_second: int) -> None:
    """Limit the rate at which the kernel sends on each TCP connection of this process from or to `port` (Linux only)."""
    for view in _sockets():
        with suppress(OSError, IndexError, TypeError):  # not connected, or its addresses have no port
            if port in (view.getsockname()[1], view.getpeername()[1]):
                view.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, bytes_per_second)


def _sockets() -> Iterator[socket.socket]:
    """The sockets of this process; each object may be used until the next one is taken. None where the kernel is not Linux."""
    descriptors: list[str] = []
    with suppress(OSError):
        descriptors = os.listdir("/proc/self/fd")
    for descriptor in map(int, descriptors):
        with suppress(OSError):  # no socket, or closed meanwhile
            view = socket.socket(fileno=descriptor)
            try:
                yield view
            finally:
                view.detach()  # the descriptor stays open
