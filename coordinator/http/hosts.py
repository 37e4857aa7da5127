"""Host names that requests may name: a page on the Internet whose name resolves to this gateway (DNS rebinding) is refused."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

LOCAL_SUFFIXES = (".local", ".localhost", ".lan", ".home", ".home.arpa", ".internal")


def is_allowed(host_header: str, more: Sequence[str] = ()) -> bool:
    """Whether a `Host` header names an address, this computer, a name of the local network, or one of `more`."""
    host = _without_port(host_header).lower().rstrip(".")
    if not host or host in ("localhost", socket.gethostname().lower()) or host in more:
        return True
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return host.endswith(LOCAL_SUFFIXES)


def _without_port(host_header: str) -> str:
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    name, _, port = host_header.rpartition(":")
    return name if name and port.isdigit() else host_header
