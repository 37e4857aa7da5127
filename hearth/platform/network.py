"""Addresses of this machine and ports: which address to advertise, sockets that listen, and whether others listen.

The address is never that of a container's bridge or of a Jetson's USB network. psutil is imported on first use.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hearth.errors import BadSetting, PortInUse
from hearth.platform.asyncio_tools import with_timeout

log = logging.getLogger(__name__)

# Networks inside this machine: other devices cannot reach their addresses.
_CONTAINER = re.compile(r"^(docker|br-|veth|virbr|vnet|cni|flannel|cali|podman|lxc|lxd|kube|vmnet|vboxnet|nerdctl)")
# A Jetson provides a network over its USB port, with the same address on every board.
_JETSON_USB = re.compile(r"^(l4tbr|usb|rndis)")
# Tunnels: reachable, but slow and not the home network; used only if the user names them.
_TUNNEL = re.compile(r"^(tun|tap|wg|tailscale|zt|ppp)")
_MIN_RTT = slice(148, 152)  # of Linux's `struct tcp_info`: `tcpi_min_rtt`, in microseconds
_NO_RTT = 0xFFFFFFFF


class Interface(NamedTuple):
    """One address of an interface. `skipped` is the reason not to use it, or empty."""

    name: str
    address: str
    is_wireless: bool
    speed_mbit: int  # Mbit/s; 0: unknown
    skipped: str
    has_default_route: bool = False


def reason_to_skip(name: str, address: str, is_up: bool) -> str:
    """The reason not to choose an interface automatically, or an empty text."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if not is_up:
        return "it is down"
    if _CONTAINER.match(name):
        return "it is a container's or virtual machine's bridge, unreachable from other devices"
    if _JETSON_USB.match(name):
        return "it is a USB network: a Jetson has the same address there on every board"
    if _TUNNEL.match(name):
        return "it is a tunnel; name it with --interface to use it"
    if ip.is_link_local:
        return "it has a link-local address only"
    if ip.is_loopback:
        return "it reaches this machine only"
    return ""


def default_route_holders(proc_root: Path = Path("/proc")) -> frozenset[str]:
    """Names of the interfaces that have an IPv4 default route."""
    try:
        rows = [line.split() for line in (proc_root / "net/route").read_text().splitlines()[1:]]
    except OSError:
        return frozenset()
    # Columns: interface, destination, gateway, flags, ..., mask (proc(5)); a default route has destination and mask 0.
    return frozenset(row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000")


def link_states(stats: Callable[[], Mapping[str, Any]], sys_root: Path = Path("/sys")) -> dict[str, tuple[bool, int]]:
    """Whether each interface is up, and its speed in Mbit/s (0: unknown), by name.

    `stats` is psutil's, which asks drivers by an ioctl. QEMU's user emulation refuses it, and with it all interfaces; then
    sysfs tells.
    """
    try:
        return {name: (found.isup, found.speed) for name, found in stats().items()}
    except OSError:
        names = [entry.name for entry in sorted((sys_root / "class/net").glob("*"))]
        return {name: (_number(sys_root, name, "carrier") == 1, _number(sys_root, name, "speed")) for name in names}


def _number(sys_root: Path, name: str, what: str) -> int:
    """A number of an interface from sysfs; 0 if it has none, as a bridge has no speed, or if it says -1."""
    try:
        return max(int((sys_root / "class/net" / name / what).read_text()), 0)
    except (OSError, ValueError):
        return 0


def interfaces(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> list[Interface]:
    """All addresses of this machine's interfaces, best first."""
    import psutil

    states = link_states(psutil.net_if_stats, sys_root)
    with_default_route = default_route_holders(proc_root)
    all_found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            is_up, speed_mbit = states.get(name, (False, 0))
            all_found.append(
                Interface(
                    name,
                    address.address,
                    any((sys_root / "class/net" / name / mark).exists() for mark in ("wireless", "phy80211")),
                    speed_mbit,
                    reason_to_skip(name, address.address, is_up),
                    name in with_default_route,
                )
            )
    return ranked(all_found)


def ranked(addresses: Sequence[Interface]) -> list[Interface]:
    """Sort: usable before skipped, IPv4 before IPv6, wired before wireless, fast before slow, default route first."""
    return sorted(
        addresses,
        key=lambda i: (
            bool(i.skipped), ":" in i.address, i.is_wireless, -i.speed_mbit, not i.has_default_route, i.name,
        ),
    )  # fmt: skip


def choose_interface(addresses: Sequence[Interface], preferred: str | None) -> Interface:
    """The interface to advertise on: the preferred one (name or address), else the best usable one, else loopback.

    Raises BadSetting if the preferred interface does not exist (listing those that do), or if there is none at all.
    """
    if preferred:
        named = [i for i in addresses if preferred in (i.name, i.address)]
        if not named:
            known = ", ".join(sorted({f"{i.name} ({i.address})" for i in addresses if ":" not in i.address}))
            raise BadSetting(setting="--interface", reason=f"there is no '{preferred}'; there are: {known}")
        return ranked(named)[0]
    usable = [i for i in ranked(addresses) if not i.skipped]
    loopback = [i for i in ranked(addresses) if ipaddress.ip_address(i.address.split("%")[0]).is_loopback]
    for interface in (*usable, *loopback):
        return interface
    raise BadSetting(setting="--interface", reason="this device has no network interface with an address")


def current_address(preferred: str | None) -> str:
    """The local address to advertise now; as `choose_address`, but untested. Raises BadSetting."""
    return choose_interface(interfaces(), preferred).address


def choose_address(preferred: str | None) -> str:
    """The local address to advertise, after a test that it can be bound and connected to. Raises BadSetting."""
    interface = choose_interface(interfaces(), preferred)
    if interface.skipped and not preferred:
        log.warning(
            "the only usable interface is %s (%s), and %s", interface.name, interface.address, interface.skipped
        )
    verify_reachable(interface)
    return interface.address


def verify_reachable(interface: Interface) -> None:
    """Raise BadSetting unless a connection to this address arrives here. This detects firewalls and stale addresses."""
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    try:
        with socket.socket(family) as listener, socket.socket(family) as caller:
            listener.bind((interface.address.split("%")[0], 0))
            listener.listen(1)
            listener.settimeout(2)  # seconds; a local connection takes far less
            caller.settimeout(2)
            caller.connect(listener.getsockname())
            listener.accept()[0].close()
    except OSError as error:
        reason = f"{interface.name} ({interface.address}) cannot be reached: {error}"
        raise BadSetting(setting="--interface", reason=reason) from None


def all_addresses() -> list[str]:
    """All addresses at which other devices may reach this one; loopback if there are none."""
    addresses = interfaces()
    return [i.address.split("%")[0] for i in addresses if not i.skipped] or ["127.0.0.1"]


# ---- ports ----------------------------------------------------------------------------------------------------------


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


async def numeric_address(host: str) -> str:
    """The address of a host, of IPv4 if it has one; a name that is not known within 5 s stays as it is."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = await with_timeout(5.0, asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, asyncio.TimeoutError):
        return host
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def shortest_round_trip(descriptor: int) -> float | None:
    """The shortest round trip of a TCP connection in the last five minutes, in seconds, by the kernel (`tcpi_min_rtt`).

    None if it has measured none, or if this descriptor is no TCP connection (any more).
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.stop)
    except OSError:
        return None
    microseconds = int.from_bytes(info[_MIN_RTT], sys.byteorder)
    return microseconds / 1e6 if len(info) == _MIN_RTT.stop and microseconds != _NO_RTT else None


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
