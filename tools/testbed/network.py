"""Network namespaces on one switch, with a token bucket in both directions of every link; isolated from real networks.

The switch is a bridge in its own namespace: the host's network is unchanged but for the list of TCP's congestion control
algorithms that may be chosen (below), and its firewall does not see the traffic.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hearth.errors import BadSetting
from tools.testbed.medium import Medium

# Real network cards split large segments themselves, so the bucket must pass a whole segment; otherwise the emulated device
# would pay CPU time for every packet. The burst is larger than that to compensate for late timers: with 20 KiB and all
# cores busy, a 500 Mbit/s link carried 63 % of its rate, with 2.5 ms worth of bytes 89 %. The cost is that an idle device
# may exceed its rate for a moment, as with the buffers of a real switch.
_SEGMENT_BYTES = 16 << 10
_LEAST_BURST_BYTES = _SEGMENT_BYTES + (4 << 10)  # a segment and a margin, at any rate
_BURST_SECONDS = 2.5e-3  # of the link's rate
_QUEUE_BYTES = 1 << 20  # behind the bucket
_COMMAND_SECONDS = 20.0  # timeout of an ip or tc command
_BRIDGE = "bridge"
SWITCH = "switch"  # in place of a device's name; no device may be called so
_QUIET = "for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e $f ] || echo 1 > $f; done"  # the switch itself
_NOBODY = "02:00:00:00:00:01"  # a link address that no device has
# If the br_netfilter module is loaded, a bridge passes every packet to iptables, which costs CPU time: switch it off.
_NO_FIREWALL = "for f in /proc/sys/net/bridge/bridge-nf-call-*; do [ ! -e $f ] || echo 0 > $f; done"

# Linux's default, which devices have: a namespace would take over this machine's, such as BBR. Where that is the default, the
# kernel admits CUBIC in a namespace only once it is on a list of the whole machine, and what was added stays there: it only
# says which algorithms programs without privileges may choose.
_CUBIC = "echo cubic > /proc/sys/net/ipv4/tcp_congestion_control"
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class Network:
    """The network of testbed `prefix` (a short unique name) in the subnet 10.213.`slot`.0/24."""

    def __init__(self, prefix: str, slot: int, names: Sequence[str]) -> None:
        self._prefix = prefix
        self._slot = slot
        self._names = list(names)
        self._switch = self.namespace(SWITCH)

    def namespace(self, device: str) -> str:
        return f"{self._prefix}-{device}"

    def address(self, device: str) -> str:
        return f"10.213.{self._slot}.{self._names.index(device) + 1}"

    def create(self, mbit: Mapping[str, float], media: Mapping[str, Medium] = {}) -> None:
        """Create namespaces, switch and links with these rates. Raises BadSetting if the kernel refuses.

        Devices in `media` get a gap in their link, which the relay of their medium has to bridge (`relayed_ends`).
        """
        self.remove()
        run_command("ip", "netns", "add", self._switch)
        run_command("ip", "netns", "exec", self._switch, "sh", "-c", f"{_NO_FIREWALL}; {_QUIET}")
        _ip(self._switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip(self._switch, "link", "set", _BRIDGE, "up")
        if _ALLOWED.exists() and "cubic" not in (allowed := _ALLOWED.read_text()).split():
            run_command("sh", "-c", f"echo {allowed.strip()} cubic > {_ALLOWED}")
        for name in self._names:
            namespace, port = self.namespace(name), _port(name)
            run_command("ip", "netns", "add", namespace)
            run_command("ip", "netns", "exec", namespace, "sh", "-c", _CUBIC)
            outer, inner = self.relayed_ends(name)
            end = outer if name in media else port
            _ip(namespace, "link", "add", "eth0", "type", "veth", "peer", "name", end, "netns", self._switch)
            if name in media:
                _ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", inner)
                for each in (outer, inner):
                    _ip(self._switch, "link", "set", each, "up")
            _ip(self._switch, "link", "set", port, "gso_max_size", str(_SEGMENT_BYTES), "master", _BRIDGE, "up")
            _ip(namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip(namespace, "link", "set", "lo", "up")
            _ip(namespace, "link", "set", "eth0", "gso_max_size", str(_SEGMENT_BYTES), "up")
            _ip(namespace, "route", "add", "224.0.0.0/4", "dev", "eth0")
            if name in media and media[name].lost:  # packet by packet, so that a loss is that of one
                _ip(namespace, "link", "set", "eth0", "gso_max_segs", "1")
                _ip(self._switch, "link", "set", port, "gso_max_segs", "1")
            self.set_mbit(name, mbit[name])

    def relayed_ends(self, device: str) -> tuple[str, str]:
        """The interfaces in the switch's namespace between which the relay of a device's medium carries its frames.

        The outer one is the end of the device's own link, the inner one leads to the bridge.
        """
        return f"air-{device}", f"up-{device}"

    def set_mbit(self, device: str, mbit: float) -> None:
        """Set the rate of both directions of a device's link. Raises BadSetting for a rate out of range."""
        if not 0.008 <= mbit <= 100_000:
            raise BadSetting(setting="the rate of a link", reason=f"{mbit:g} Mbit/s; 0.008 to 100000 can be emulated")
        rate = f"{mbit * 1e6:.0f}bit"
        burst = max(_LEAST_BURST_BYTES, int(mbit * 1e6 / 8 * _BURST_SECONDS))
        shape = ("root", "tbf", "rate", rate, "burst", str(burst), "limit", str(burst + _QUEUE_BYTES))
        run_command("tc", "-n", self.namespace(device), "qdisc", "replace", "dev", "eth0", *shape)
        run_command("tc", "-n", self._switch, "qdisc", "replace", "dev", _port(device), *shape)

    def cut(self, device: str) -> None:
        """Disconnect a device: connections stay open, but no packet passes."""
        _ip(self._switch, "link", "set", _port(device), "down")

    def mend(self, device: str) -> None:
        _ip(self._switch, "link", "set", _port(device), "up")

    def part(self, device: str, other: str) -> None:
        """Drop all packets between two devices; both still reach the others. Connections stay open."""
        for one, peer in ((device, other), (other, device)):
            entry = (self.address(peer), "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")
            _ip(self.namespace(one), "neigh", "replace", *entry)

    def rejoin(self, device: str, other: str) -> None:
        """End `part`."""
        for one, peer in ((device, other), (other, device)):
            _ip(self.namespace(one), "neigh", "del", self.address(peer), "dev", "eth0")

    def connections(self, device: str, ports: range) -> list[tuple[str, str]]:
        """The device's end and the other end (address:port) of TCP connections that it accepted on these ports."""
        which = f"( sport >= :{ports.start} and sport < :{ports.stop} )"
        lines = self._sockets(device, "-Htn", "state", "established", which).splitlines()
        return [(own, peer) for _, _, own, peer, *_ in map(str.split, lines)]

    def reset(self, device: str, connection: tuple[str, str]) -> None:
        """Break a TCP connection: both ends see a reset. The kernel needs INET_DIAG_DESTROY."""
        own, peer = connection
        self._sockets(device, "-HKtn", "src", own, "dst", peer)

    def sent_bytes(self, device: str) -> int:
        """Bytes that a device has sent since the network was created."""
        (link,) = json.loads(run_command("ip", "-n", self.namespace(device), "-s", "-json", "link", "show", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    def _sockets(self, device: str, *arguments: str) -> str:
        return run_command("ip", "netns", "exec", self.namespace(device), "ss", *arguments)

    def pids(self, device: str) -> list[int]:
        """Ids of the processes in the namespace of a device, or of the switch; none if it is gone."""
        return list(map(int, run_command("ip", "netns", "pids", self.namespace(device), check=False).split()))

    def remove(self) -> None:
        """Remove the namespaces, and with them their links. Missing ones are ignored."""
        for namespace in (*map(self.namespace, self._names), self._switch):
            run_command("ip", "netns", "del", namespace, check=False)


def _port(device: str) -> str:
    """Interface name of the switch's end of a device's link."""
    return f"to-{device}"


def _ip(namespace: str, *arguments: str) -> None:
    run_command("ip", "-n", namespace, *arguments)


def run_command(*command: str, check: bool = True) -> str:
    """Run a program that changes this machine; returns its output. Raises BadSetting, with `check` also if it fails."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except FileNotFoundError:
        raise BadSetting(setting="the testbed", reason=f"{command[0]} is missing: install it") from None
    except subprocess.TimeoutExpired:
        raise BadSetting(setting="the testbed", reason=f"`{' '.join(command)}` does not end") from None
    if check and done.returncode:
        raise BadSetting(setting="the testbed", reason=f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout
