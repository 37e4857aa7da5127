"""Loaded into every Python of the emulated root: QEMU refuses IP_MULTICAST_IF, a socket option that zeroconf sets at its start.

The demo runs in a network that has loopback only and a multicast route to it, so that packets go there without the option.
"""

import errno
import socket

_plain = socket.socket.setsockopt


def _setsockopt(self, level, option, *value):  # type: ignore[no-untyped-def]
    try:
        return _plain(self, level, option, *value)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT or (level, option) != (socket.IPPROTO_IP, socket.IP_MULTICAST_IF):
            raise


socket.socket.setsockopt = _setsockopt  # type: ignore[method-assign]
