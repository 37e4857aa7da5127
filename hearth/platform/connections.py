"""The TCP connections of this process, as the kernel knows them. They belong to ZeroMQ, which has no call to end one."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
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
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # no socket, or no TCP
                if (received := _received_by(descriptor)) is not None:
                    found[descriptor] = received
    return found


def pace_connections(port: int, bytes_per_second: int) -> None:
    """Limit the rate at which the kernel sends on each TCP connection of this process from or to `port` (Linux only)."""
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError, IndexError, TypeError):  # no socket, no TCP, or not connected
                view = socket.socket(fileno=descriptor)
                try:
                    if port in (view.getsockname()[1], view.getpeername()[1]):
                        view.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, bytes_per_second)
                finally:
                    view.detach()  # the descriptor stays open


def _received_by(descriptor: int) -> int | None:
    """Bytes that one connection has received; None for a listening socket. Raises OSError."""
    view = socket.socket(fileno=descriptor)
    try:
        information = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size)
    finally:
        view.detach()  # the descriptor stays open
    if information[0] == _LISTEN or len(information) < _RECEIVED_OFFSET + _RECEIVED.size:
        return None
    return int(_RECEIVED.unpack_from(information, _RECEIVED_OFFSET)[0])
