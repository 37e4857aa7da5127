"""Which network interface to use: never a container bridge, never a Jetson's USB network. psutil is imported late."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hearth.errors import BadSetting

log = logging.getLogger(__name__)

# Networks that exist inside this machine only: their addresses mean nothing to other devices.
_CONTAINER = re.compile(r"^(docker|br-|veth|virbr|vnet|cni|flannel|cali|podman|lxc|lxd|kube|vmnet|vboxnet|nerdctl)")
# A Jetson offers a network over its USB port, with the same address on every board.
_JETSON_USB = re.compile(r"^(l4tbr|usb|rndis)")
# Tunnels: reachable, but slow and not the home's own network; only when named.
_TUNNEL = re.compile(r"^(tun|tap|wg|tailscale|zt|ppp)")


class Interface(NamedTuple):
    """One interface with an address. `skipped` says why it is not to be used, or is empty."""

    name: str
    address: str
    is_wireless: bool
    speed_mbit: int
    skipped: str
    has_default_route: bool = False


def why_skipped(name: str, address: str, is_up: bool) -> str:
    """The reason not to use an interface by itself, or an empty text."""
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
    """The names of the interfaces that an IPv4 default route goes through."""
    try:
        rows = [line.split() for line in (proc_root / "net/route").read_text().splitlines()[1:]]
    except OSError:
        return frozenset()
    # Columns: interface, destination, gateway, flags, ..., mask (proc(5)); a default route has neither of the two set.
    return frozenset(row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000")


def interfaces(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> list[Interface]:
    """All interfaces of this machine with an address, best first."""
    import psutil

    stats = psutil.net_if_stats()
    with_default_route = default_route_holders(proc_root)
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            is_up = name in stats and stats[name].isup
            found.append(
                Interface(
                    name,
                    address.address,
                    any((sys_root / "class/net" / name / mark).exists() for mark in ("wireless", "phy80211")),
                    stats[name].speed if name in stats else 0,
                    why_skipped(name, address.address, is_up),
                    name in with_default_route,
                )
            )
    return ranked(found)


def ranked(found: Sequence[Interface]) -> list[Interface]:
    """Usable before skipped, IPv4 before IPv6, wired before wireless, fast before slow, then the default route's."""
    return sorted(
        found,
        key=lambda i: (
            bool(i.skipped), ":" in i.address, i.is_wireless, -i.speed_mbit, not i.has_default_route, i.name,
        ),
    )  # fmt: skip


def choose(found: Sequence[Interface], preferred: str | None) -> Interface:
    """The interface to advertise on: the one named (by name or address), else the best; loopback when nothing else is.

    Raises BadSetting that lists what there is when the named one is not.
    """
    if preferred:
        named = [i for i in found if preferred in (i.name, i.address)]
        if not named:
            known = ", ".join(sorted({f"{i.name} ({i.address})" for i in found if ":" not in i.address}))
            raise BadSetting(setting="--interface", reason=f"there is no '{preferred}'; there are: {known}")
        return ranked(named)[0]
    usable = [i for i in ranked(found) if not i.skipped]
    loopback = [i for i in ranked(found) if ipaddress.ip_address(i.address.split("%")[0]).is_loopback]
    for interface in (*usable, *loopback):
        return interface
    raise BadSetting(setting="--interface", reason="this device has no network interface with an address")


def choose_address(preferred: str | None) -> str:
    """The local address to advertise, verified: we can bind it and connect to it."""
    interface = choose(interfaces(), preferred)
    if interface.skipped and not preferred:
        log.warning("only %s (%s) can be used, and %s", interface.name, interface.address, interface.skipped)
    verify_reachable(interface)
    return interface.address


def verify_reachable(interface: Interface) -> None:
    """Raise BadSetting unless a connection to this address arrives here: a firewall or a stale address shows so."""
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    try:
        with socket.socket(family) as listener, socket.socket(family) as caller:
            listener.bind((interface.address.split("%")[0], 0))
            listener.listen(1)
            listener.settimeout(2)
            caller.settimeout(2)
            caller.connect(listener.getsockname())
            listener.accept()[0].close()
    except OSError as error:
        raise BadSetting(
            setting="--interface", reason=f"{interface.name} ({interface.address}) cannot be reached: {error}"
        ) from None


def all_addresses() -> list[str]:
    """Every address that other devices may reach us by; loopback when there is none."""
    found = interfaces()
    return [i.address.split("%")[0] for i in found if not i.skipped] or ["127.0.0.1"]
