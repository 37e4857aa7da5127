"""What is wrong with this device's Hearth, and what to do: each check gives findings."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import zmq
from pydantic import BaseModel, ConfigDict

import hearth
from coordinator.config import default_state_dir
from coordinator.fleet import Fleet
from hearth.client import COORDINATOR_PORT
from hearth.discovery import AGENT_PORT, COORDINATOR_SERVICE, Browser, Found
from hearth.errors import HearthError
from hearth.interfaces import Interface, choose, interfaces, verify_reachable
from hearth.messages import PROTOCOL_VERSION
from hearth.security import AdminKey, Credential, HomeKey, agent_access, coordinator_access, fingerprint, load_credential
from hearth.units import format_bytes

CLOCK_TOLERANCE_SECONDS = 5.0
_LOOK_SECONDS = 3.0
_MULTICAST_GROUP, _MULTICAST_PORT = "224.0.0.251", 5353
_MIN_FREE_BYTES = 1 << 30
_PORTS = f"tcp {AGENT_PORT}, {AGENT_PORT + 1}, {AGENT_PORT + 10}-{AGENT_PORT + 29} (agent), {COORDINATOR_PORT} (coordinator), udp 5353 (mDNS)"


class Finding(BaseModel):
    """One line of the doctor's report. `do` is empty where nothing needs doing."""

    model_config = ConfigDict(frozen=True)

    check: str
    status: Literal["ok", "warning", "problem"]
    what: str
    do: str = ""


def examine(key_path: Path, interface: str | None, mdns_interfaces: list[str] | None) -> list[Finding]:
    """Run every check. None of them raises; what fails is a finding."""
    findings = [check_versions(), *check_interface(interfaces(), interface), check_disk(default_state_dir(os.environ))]
    findings.append(check_multicast(mdns_interfaces or _usable_addresses()))
    findings.append(check_firewall(_run))
    key_finding, credential = check_key(key_path)
    findings.append(key_finding)
    if credential is not None:
        findings += asyncio.run(_look_around(credential, mdns_interfaces))
    return findings


def check_versions() -> Finding:
    what = f"Hearth {hearth.__version__}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}, ZeroMQ {zmq.zmq_version()}"
    if not zmq.has("curve"):
        return Finding(
            check="versions", status="problem", what=f"{what}, built without CURVE", do="Reinstall pyzmq from its wheel."
        )
    return Finding(check="versions", status="ok", what=what)


def check_interface(found: list[Interface], preferred: str | None) -> list[Finding]:
    """Which interface would be advertised, and why the others would not."""
    try:
        chosen = choose(found, preferred)
        verify_reachable(chosen)
    except HearthError as error:
        return [Finding(check="interface", status="problem", what=error.explanation(), do=error.next_step())]
    others = "; ".join(
        f"{i.name} ({i.address}): {i.skipped}" for i in found if i.skipped and ":" not in i.address and i != chosen
    )
    what = f"{chosen.name} ({chosen.address}) is advertised" + (f". Not used: {others}" if others else "")
    if chosen.address.startswith("127."):
        return [
            Finding(
                check="interface",
                status="warning",
                what=what,
                do="Other devices cannot reach this one: connect it to the network, or name an interface with --interface.",
            )
        ]
    return [Finding(check="interface", status="ok", what=what)]


def check_disk(state_dir: Path) -> Finding:
    existing = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        return Finding(
            check="disk", status="warning", what=f"only {format_bytes(free)} are free at {existing}", do="Free some space."
        )
    return Finding(check="disk", status="ok", what=f"{format_bytes(free)} are free at {existing}")


def check_multicast(addresses: list[str]) -> Finding:
    """Send one packet to the mDNS group from each address, and see it come back."""
    deaf = [address for address in addresses if not _multicast_works(address)]
    if deaf:
        return Finding(
            check="multicast",
            status="problem",
            what=f"multicast sent from {', '.join(deaf)} does not come back",
            do="Let udp 5353 and 224.0.0.251 through the firewall (and the Wi-Fi's client isolation), or list the agents with --devices.",
        )
    return Finding(check="multicast", status="ok", what=f"works on {', '.join(addresses)}")


def _multicast_works(address: str) -> bool:
    probe = b"hearth doctor " + os.urandom(8)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver, socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM
        ) as sender:
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            receiver.bind(("", _MULTICAST_PORT))
            member = struct.pack("4s4s", socket.inet_aton(_MULTICAST_GROUP), socket.inet_aton(address))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            sender.sendto(probe, (_MULTICAST_GROUP, _MULTICAST_PORT))
            deadline = time.monotonic() + 1.0
            while (left := deadline - time.monotonic()) > 0:
                receiver.settimeout(left)
                if receiver.recv(2048) == probe:
                    return True
    except OSError:
        pass
    return False


def check_firewall(run: Callable[[list[str]], str | None]) -> Finding:
    """Is a firewall active? Its rules are its owner's; we say which ports must be open."""
    active = []
    if "active" in (run(["ufw", "status"]) or "").replace("inactive", ""):
        active.append("ufw")
    if (run(["firewall-cmd", "--state"]) or "").strip() == "running":
        active.append("firewalld")
    if any(word in (run(["nft", "list", "ruleset"]) or "") for word in ("drop", "reject")):
        active.append("nftables")
    if any(word in (run(["iptables", "-S"]) or "") for word in ("-j DROP", "-j REJECT", "-P INPUT DROP")):
        active.append("iptables")
    if active:
        return Finding(
            check="firewall", status="warning", what=f"{', '.join(active)} filters traffic here", do=f"Make sure that these are open: {_PORTS}."
        )
    return Finding(check="firewall", status="ok", what="no filtering rules found")


def _run(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def check_key(path: Path) -> tuple[Finding, Credential | None]:
    try:
        credential = load_credential(path)
    except HearthError as error:
        return Finding(check="key", status="problem", what=error.explanation(), do=error.next_step()), None
    what = f"{credential.kind} key in {path}, home {fingerprint(coordinator_access(credential).server_public)}"
    if path.stat().st_mode & 0o077:
        return Finding(check="key", status="warning", what=f"{what}, readable by others", do=f"chmod 600 {path}"), credential
    return Finding(check="key", status="ok", what=what), credential


async def _look_around(credential: Credential, mdns_interfaces: list[str] | None) -> list[Finding]:
    """Agents and coordinators on the network: protocol, clock, how many."""
    coordinators: dict[str, Found] = {}
    home = fingerprint(coordinator_access(credential).server_public)
    browser = Browser(COORDINATOR_SERVICE, lambda found: coordinators.update({found.id: found}), mdns_interfaces)
    await browser.start()
    findings = []
    try:
        if isinstance(credential, HomeKey | AdminKey):
            async with Fleet(agent_access(credential), None, interfaces=mdns_interfaces) as fleet:
                await fleet.settle(1.0, 1, _LOOK_SECONDS)
                findings += check_agents(fleet, time.time())
        else:
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        await browser.stop()
    findings.append(check_coordinators([found for found in coordinators.values() if found.fingerprint == home]))
    return findings


def check_agents(fleet: Fleet, now: float) -> list[Finding]:
    findings = [
        Finding(check="agents", status="problem", what=error.explanation(), do=error.next_step()) for error in fleet.refusals
    ]
    devices = list(fleet.devices.values())
    if not devices:
        findings.append(
            Finding(
                check="agents",
                status="warning",
                what=f"no agent of this home answered within {_LOOK_SECONDS:g} s",
                do="Start hearth-agent on your devices with this home's key; where multicast is blocked, use --devices.",
            )
        )
        return findings
    names = ", ".join(sorted(device.name for device in devices))
    findings.append(Finding(check="agents", status="ok", what=f"{len(devices)} answer: {names}"))
    clocks = {device.name: device.telemetry.clock_unix_seconds for device in devices if device.telemetry}
    return [*findings, check_clocks(clocks, now)]


def check_clocks(clocks: Mapping[str, float], now: float) -> Finding:
    """Clocks matter for logs and caches only, so a wrong one is a warning."""
    wrong = [f"{name} by {clock - now:+.0f} s" for name, clock in clocks.items() if abs(clock - now) > CLOCK_TOLERANCE_SECONDS]
    if wrong:
        return Finding(
            check="clock", status="warning", what=f"clocks differ from this one's: {', '.join(wrong)}", do="Turn on time synchronisation (timedatectl set-ntp true) there."
        )
    return Finding(check="clock", status="ok", what="all clocks agree")


def check_coordinators(found: list[Found]) -> Finding:
    where = ", ".join(f"{coordinator.hosts[0]}:{coordinator.port}" for coordinator in found)
    if len(found) > 1:
        return Finding(
            check="coordinator",
            status="problem",
            what=f"{len(found)} coordinators of this home run at once: {where}",
            do="Stop all but one: an agent works for one at a time.",
        )
    return Finding(check="coordinator", status="ok", what=f"one runs at {where}" if found else "none runs")


def _usable_addresses() -> list[str]:
    return [i.address for i in interfaces() if not i.skipped and ":" not in i.address] or ["127.0.0.1"]
