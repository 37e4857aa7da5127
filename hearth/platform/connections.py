"""The TCP connections of this process, as the kernel knows them. They belong to ZeroMQ, which has no call to end one."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from hearth.protocol import WIRE_ROUND_TRIP_SECONDS

_RECEIVED = struct.Struct("=Q")  # the field `tcpi_bytes_received` of Linux's `tcp_info`
_RECEIVED_OFFSET = 128  # in bytes
_LISTEN = 10  # state of a listening socket
_MAX_PACING_RATE = 47  # Linux's socket option SO_MAX_PACING_RATE, for which Python has no name
_ROUND_TRIP = struct.Struct("=I")  # the field `tcpi_min_rtt` of `tcp_info`, in microseconds
_ROUND_TRIP_OFFSET = 148  # in bytes
_LONGEST_ROUND_TRIP_SECONDS = 60.0  # longer ones stand for none measured yet
_BBR = b"bbr"
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
    for view in _sockets():
        with suppress(OSError):  # no TCP
            if (received := _tcp_information(view, _RECEIVED, _RECEIVED_OFFSET)) is not None:
                found[view.fileno()] = received
    return found


def pace_connections(port: int, bytes_per_second: int) -> None:
    """Limit the rate at which the kernel sends on each TCP connection of this process from or to `port` (Linux only)."""
    for view in _sockets():
        with suppress(OSError, IndexError, TypeError):  # not connected, or its addresses have no port
            if port in (view.getsockname()[1], view.getpeername()[1]):
                view.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, bytes_per_second)


def use_bbr_on_radio(wire_seconds: float = WIRE_ROUND_TRIP_SECONDS) -> None:
    """Send by BBR on each TCP connection of this process whose shortest round trip was longer than `wire_seconds`.

    Over the emulated radio of the testbed, a transfer of 256 KiB after a pause takes about half as long as with CUBIC, Linux's
    default. Without the kernel's module `tcp_bbr`, or where it is not Linux, connections stay as they are.
    """
    for view in _sockets():
        with suppress(OSError):  # no TCP, or no such module
            microseconds = _tcp_information(view, _ROUND_TRIP, _ROUND_TRIP_OFFSET)
            if microseconds is not None and wire_seconds < microseconds / 1e6 < _LONGEST_ROUND_TRIP_SECONDS:
                view.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _BBR)


def _tcp_information(view: socket.socket, field: struct.Struct, offset: int) -> int | None:
    """A field of `tcp_info`; None if the socket listens, or the kernel has no such field. Raises OSError if it is not TCP."""
    size = offset + field.size
    information = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if information[0] == _LISTEN or len(information) < size:
        return None
    return int(field.unpack_from(information, offset)[0])


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
