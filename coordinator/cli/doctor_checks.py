"""The checks of `hearth doctor`: each gives findings, with advice where something is wrong.

Checks are functions of observed facts; what queries the network or runs programs is passed in.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq

import hearth
from coordinator.cli.doctor_libraries import (
    CheckResult,
    Libraries,
    check_gpu_in_service,
    check_libraries,
    read_libraries,
)
from coordinator.devices.fleet import Fleet
from coordinator.devices.registry import Device
from coordinator.serve.clients.key_registry import device_keys
from coordinator.serve.config import default_state_dir, device_registry_dir, load_coordinator_settings
from hearth.client.connection import COORDINATOR_PORT
from hearth.errors import HearthError
from hearth.platform import security
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.curve import fingerprint
from hearth.platform.discovery import AGENT_PORT, COORDINATOR_SERVICE, Browser, DiscoveredService
from hearth.platform.network import Interface, choose_interface, interfaces, verify_reachable
from hearth.platform.units import format_bytes
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire.messages import Telemetry

CLOCK_TOLERANCE_SECONDS = 5.0  # above the delay of a reply; smaller differences do not disturb logs and caches
_SEARCH_SECONDS = 3.0  # search of the network: long enough for repeated mDNS queries, short enough to wait for
_MULTICAST_GROUP, _MULTICAST_PORT = "224.0.0.251", 5353  # of mDNS (RFC 6762)
_MULTICAST_SECONDS = 1.0  # wait for our own multicast packet: far longer than it takes where multicast works
_MIN_FREE_BYTES = 1 << 30  # a warning before profiles, plans and logs fill the disk
_CONNECT_TIMEOUT_SECONDS = 1.0  # to a port of this device: it answers at once, or a firewall drops the packets
_COMMAND_TIMEOUT_SECONDS = 5  # of a firewall command: long enough for large rule sets
_PORTS = (
    f"tcp {AGENT_PORT}, {AGENT_PORT + 1}, {AGENT_PORT + 10}-{AGENT_PORT + 29} (agent), "
    f"{COORDINATOR_PORT} (coordinator), udp {_MULTICAST_PORT} (mDNS)"
)


class ProgramOutput(NamedTuple):
    """Output of a program, and whether it succeeded."""

    succeeded: bool
    text: str


def run_checks(key_path: Path, interface: str | None, mdns_interfaces: list[str] | None) -> list[CheckResult]:
    """Run every check and collect the findings."""
    available = interfaces()
    key_finding, credential = check_key(key_path)
    usable = [each.address for each in available if not each.skipped and ":" not in each.address]
    libraries = read_libraries()
    findings = [
        check_versions(),
        *check_libraries(libraries),
        check_interface(available, interface),
        check_disk(default_state_dir(os.environ)),
        check_multicast(mdns_interfaces or usable or ["127.0.0.1"], multicast_works),
        check_firewall(_run),
        check_ports(port_is_open),
        key_finding,
    ]
    if credential is not None:
        own = {each.address for each in available}
        findings += asyncio.run(check_network(credential, mdns_interfaces, libraries, own))
    return findings


def check_versions() -> CheckResult:
    """Report the versions in use, and check that ZeroMQ supports CURVE."""
    what = (
        f"Hearth {hearth.__version__}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}, "
        f"ZeroMQ {zmq.zmq_version()}"
    )
    if not zmq.has("curve"):
        return CheckResult("versions", "problem", f"{what}, built without CURVE", "Reinstall pyzmq from its wheel.")
    return CheckResult("versions", "ok", what)


def check_interface(available: list[Interface], preferred: str | None) -> CheckResult:
    """Check the interface that an agent would advertise, and list why the others are skipped."""
    try:
        chosen = choose_interface(available, preferred)
        verify_reachable(chosen)
    except HearthError as error:
        return _problem("interface", error)
    others = "; ".join(
        f"{i.name} ({i.address}): {i.skipped}" for i in available if i.skipped and ":" not in i.address and i != chosen
    )
    what = f"{chosen.name} ({chosen.address}) is advertised" + (f". Not used: {others}" if others else "")
    if chosen.address.startswith("127."):
        do = "Other devices cannot reach this one: connect it, or name an interface with --interface."
        return CheckResult("interface", "warning", what, do)
    return CheckResult("interface", "ok", what)


def check_disk(state_dir: Path) -> CheckResult:
    """Check the free space on the disk of the state directory."""
    existing = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        return CheckResult("disk", "warning", f"only {format_bytes(free)} are free at {existing}", "Free some space.")
    return CheckResult("disk", "ok", f"{format_bytes(free)} are free at {existing}")


def check_multicast(addresses: list[str], works: Callable[[str], bool]) -> CheckResult:
    """Check multicast. `works(address)`: a packet sent to the mDNS group from that address comes back."""
    failing = [address for address in addresses if not works(address)]
    if not failing:
        return CheckResult("multicast", "ok", f"works on {', '.join(addresses)}")
    do = (
        "Let udp 5353 and 224.0.0.251 through the firewall (and the Wi-Fi's client isolation), "
        "or list the agents with `hearth serve --devices`."
    )
    return CheckResult("multicast", "problem", f"multicast sent from {', '.join(failing)} does not come back", do)


def multicast_works(address: str) -> bool:
    """Whether a packet sent to the mDNS group from a local address comes back within `_MULTICAST_SECONDS`."""
    probe = multicast_probe()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as member, suppress(OSError):
        interface = socket.inet_aton(address)
        member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        member.bind(("", _MULTICAST_PORT))
        member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_MULTICAST_GROUP) + interface)
        member.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
        member.sendto(probe, (_MULTICAST_GROUP, _MULTICAST_PORT))
        deadline = time.monotonic() + _MULTICAST_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            member.settimeout(left)
            if member.recv(2048) == probe:
                return True
    return False


def multicast_probe() -> bytes:
    """A valid mDNS query for a random name, which no host answers; the name identifies the probe."""
    header = struct.pack("!6H", 0, 0, 1, 0, 0, 0)
    labels = (f"hearth-doctor-{os.urandom(8).hex()}".encode(), b"local")
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return header + name + struct.pack("!2H", 12, 1)  # PTR, IN


def check_firewall(run: Callable[[list[str]], ProgramOutput | None]) -> CheckResult:
    """Detect an active firewall. Its rules are not interpreted: the advice names the ports that must be open.

    `run(command)` returns a program's output, or None if it is not installed.
    """
    signs: tuple[tuple[str, list[str], tuple[str, ...]], ...] = (
        ("ufw", ["ufw", "status"], ("Status: active",)),
        ("nftables", ["nft", "list", "ruleset"], ("drop", "reject")),
        ("iptables", ["iptables", "-S"], ("-j DROP", "-j REJECT", "-P INPUT DROP")),
    )
    active, unreadable = [], []
    state = run(["firewall-cmd", "--state"])
    if state is not None and state.succeeded and state.text.strip() == "running":
        active.append("firewalld")
    for name, command, words in signs:
        output = run(command)
        if output is None:
            continue
        if not output.succeeded:
            unreadable.append(name)
        elif any(word in output.text for word in words):
            active.append(name)
    do = f"Make sure that these are open: {_PORTS}."
    if active:
        return CheckResult("firewall", "warning", f"{', '.join(active)} filters traffic on this device", do)
    if unreadable:
        what = f"the rules of {', '.join(unreadable)} could not be read"
        return CheckResult("firewall", "warning", what, f"Run the doctor as root. {do}")
    return CheckResult("firewall", "ok", "no filtering rules found")


def _run(command: list[str]) -> ProgramOutput | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ProgramOutput(done.returncode == 0, done.stdout)


def check_ports(is_open: Callable[[int], bool]) -> CheckResult:
    """Check which Hearth services answer on their default ports. An agent must answer on both of its ports."""
    control, link, coordinator = (is_open(port) for port in (AGENT_PORT, AGENT_PORT + 1, COORDINATOR_PORT))
    if control != link:
        answers, silent = (AGENT_PORT, AGENT_PORT + 1) if control else (AGENT_PORT + 1, AGENT_PORT)
        what = f"port {answers} answers on this device, but port {silent} does not"
        do = "An agent opens both: see `journalctl -u hearth-agent`, and which program uses the port (`ss -ltnp`)."
        return CheckResult("ports", "warning", what, do)
    agent_text = f"an agent answers on {AGENT_PORT} and {AGENT_PORT + 1}" if control else "no agent"
    coordinator_text = f"a coordinator on {COORDINATOR_PORT}" if coordinator else "no coordinator"
    return CheckResult("ports", "ok", f"on this device: {agent_text}, {coordinator_text}")


def port_is_open(port: int) -> bool:
    """Whether a TCP connection to this port of this device succeeds."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


def check_key(path: Path) -> tuple[CheckResult, security.Credential | None]:
    """Check that the key file can be read, by its owner only. Also returns the credential; None if there is none."""
    try:
        credential = security.load_credential(path)
    except HearthError as error:
        return _problem("key", error), None
    home = fingerprint(security.coordinator_access(credential).server_public)
    return CheckResult("key", "ok", f"{credential.kind} key in {path}, home {home}"), credential


async def check_network(
    credential: security.Credential,
    mdns_interfaces: list[str] | None,
    libraries: Libraries | str = Libraries(),  # noqa: B008 (immutable)
    own_addresses: Collection[str] = (),
    search_seconds: float = _SEARCH_SECONDS,
) -> list[CheckResult]:
    """Search the network for `search_seconds`: check agents (protocol, version, clock, GPU) and count coordinators.

    `libraries`: this device's; its own agents, which have one of `own_addresses`, are compared with them.
    """
    coordinators: dict[str, DiscoveredService] = {}
    home = security.coordinator_access(credential).server_public
    browser = Browser(COORDINATOR_SERVICE, lambda found: coordinators.update({found.id: found}), mdns_interfaces)
    findings: list[CheckResult] = []
    try:
        await browser.start()
        deadline = loop_time() + search_seconds
        if isinstance(credential, security.HomeKey | security.AdminKey):
            own_keys = device_keys(device_registry_dir(load_coordinator_settings({}).state_dir))
            access = security.agent_access(credential)
            async with Fleet(access, None, interfaces=mdns_interfaces, device_keys=own_keys) as fleet:
                await fleet.settle(1.0, 1, search_seconds)
                devices = list(fleet.devices.values())
                findings += check_agents(devices, fleet.refusals, time.time())
                local = {each.name: each.telemetry for each in devices if each.telemetry and each.host in own_addresses}
                findings += check_gpu_in_service(libraries, local)
        if not coordinators:
            await asyncio.sleep(max(0.0, deadline - loop_time()))
    except (OSError, ValueError) as error:  # no network, or an address that is not this device's
        where = ", ".join(mdns_interfaces) if mdns_interfaces else "any interface"
        what = f"the network cannot be searched on {where}: {error}"
        do = "Connect the device to the network, or name local addresses with --mdns-interfaces."
        return [*findings, CheckResult("agents", "problem", what, do)]
    finally:
        await browser.stop()
    return [*findings, check_coordinators([found for found in coordinators.values() if found.is_of(home)])]


def check_agents(devices: Sequence[Device], refusals: Sequence[HearthError], now: float) -> list[CheckResult]:
    """Check agents: refusals, versions, and clocks against `now` (this device's clock, Unix seconds)."""
    findings = [_problem("agents", error) for error in refusals]
    if not devices:
        do = (
            "Start hearth-agent on your devices with this home's key; where multicast is blocked, "
            "list them with `hearth serve --devices`."
        )
        return [*findings, CheckResult("agents", "warning", "no agent of this home answered", do)]
    names = ", ".join(sorted(device.name for device in devices))
    findings.append(CheckResult("agents", "ok", f"{len(devices)} answer: {names}"))
    others = {d.name: d.welcome.version for d in devices if d.welcome.version != hearth.__version__}
    if others:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(others.items()))
        what = f"other versions of Hearth than this device's {hearth.__version__}: {listed}"
        findings.append(CheckResult("agents", "warning", what, "Install the same version on every device."))
    findings += check_gpus({device.name: device.telemetry for device in devices if device.telemetry})
    findings += check_confinement({device.name: device.telemetry for device in devices if device.telemetry})
    clocks = {device.name: device.telemetry.clock_unix_seconds for device in devices if device.telemetry}
    return [*findings, check_clocks(clocks, now)]


def check_gpus(telemetry: Mapping[str, Telemetry]) -> list[CheckResult]:
    """A warning for each device that computes on the CPU although it has a GPU, and a line for those that use theirs."""
    do = "Install a torch for its GPU and driver there, or start its agent with --compute-device cpu if it is not to be used."
    findings = [
        CheckResult("GPU", "warning", f"{name} computes on the CPU, although it has a GPU: {each.gpu_problem}", do)
        for name, each in sorted(telemetry.items())
        if each.gpu_problem
    ]
    on_gpu = {name: each.gpu for name, each in sorted(telemetry.items()) if each.compute_device == "cuda"}
    used = [f"{name} ({gpu.name})" for name, gpu in on_gpu.items() if gpu is not None]
    return [*findings, CheckResult("GPU", "ok", f"used by {', '.join(used)}")] if used else findings


def check_confinement(telemetry: Mapping[str, Telemetry]) -> list[CheckResult]:
    """A warning for each device whose workers are not fully confined, and a line for the others."""
    do = "Files need Linux 5.13 or newer with Landlock, the network 6.7 and data ports other than 0-0, calls x86-64 or ARM64."
    missing = {name: each.unconfined() for name, each in sorted(telemetry.items()) if each.confined is not None}
    found = [
        CheckResult("confinement", "warning", f"workers on {name} are not confined in: {', '.join(each)}", do)
        for name, each in missing.items()
        if each
    ]
    if confined := [name for name, each in missing.items() if not each]:
        found.append(CheckResult("confinement", "ok", f"workers are confined on {', '.join(confined)}"))
    return found


def check_clocks(clocks: Mapping[str, float], now: float) -> CheckResult:
    """Compare clocks with `now`. Only logs and caches use them, so a wrong clock is a warning."""
    differences = {name: clock - now for name, clock in clocks.items()}
    far = {name: seconds for name, seconds in differences.items() if abs(seconds) > CLOCK_TOLERANCE_SECONDS}
    wrong = [f"{name} by {seconds:+.0f} s" for name, seconds in far.items()]
    if wrong:
        do = "Turn on time synchronisation (timedatectl set-ntp true) there."
        return CheckResult("clock", "warning", f"clocks differ from this one's: {', '.join(wrong)}", do)
    return CheckResult("clock", "ok", "all clocks agree")


def check_coordinators(coordinators: list[DiscoveredService]) -> CheckResult:
    """Check that at most one coordinator of this home is running."""
    where = ", ".join(f"{coordinator.hosts[0]}:{coordinator.port}" for coordinator in coordinators)
    if len(coordinators) > 1:
        what = f"{len(coordinators)} coordinators of this home are running: {where}"
        return CheckResult("coordinator", "problem", what, "Stop all but one: an agent works for one at a time.")
    return CheckResult("coordinator", "ok", f"one is running at {where}" if coordinators else "none is running")


def _problem(check: str, error: HearthError) -> CheckResult:
    return CheckResult(check, "problem", error.explanation(), error.next_step())
