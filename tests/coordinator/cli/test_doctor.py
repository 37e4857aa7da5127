"""Findings of `hearth doctor`: tables for its checks, and real multicast on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.devices import ready_device
from typer.testing import CliRunner
from zeroconf import DNSIncoming

import hearth
from coordinator.cli import doctor_checks as doctor
from coordinator.cli.app import app
from coordinator.cli.doctor_checks import ProgramOutput
from coordinator.devices.registry import Device
from hearth.errors import ProtocolMismatch
from hearth.platform.curve import new_keypair
from hearth.platform.discovery import COORDINATOR_SERVICE, DiscoveredService, advertised
from hearth.platform.network import Interface
from hearth.platform.security import AppKey, coordinator_access, new_device_key, new_home_key, save_credential
from hearth.wire.messages import AgentWelcome, Gpu

LOOPBACK = Interface("lo", "127.0.0.1", False, 0, "it reaches this machine only")
BRIDGE = Interface("docker0", "172.17.0.1", False, 10_000, "it is a container's bridge")


def device(name: str, version: str = hearth.__version__) -> Device:
    welcome = AgentWelcome(
        version=version, device_id=f"id of {name}", boot_id="1", name=name, device_public_key=new_keypair().public,
        link_port=47801,
    )  # fmt: skip
    return Device(welcome, "127.0.0.1", 47800, last_seen=0.0)


def programs(**outputs: ProgramOutput) -> Callable[[list[str]], ProgramOutput | None]:
    """A machine on which only these programs are installed."""
    return lambda command: outputs.get(command[0].replace("-", "_"))


def test_versions_check_passes_in_a_working_installation() -> None:
    finding = doctor.check_versions()
    assert finding.status == "ok"
    assert hearth.__version__ in finding.what


# ---- network -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "chosen", "status", "says", "advice"),
    [
        ([LOOPBACK, BRIDGE], "lo", "warning", ["docker0 (172.17.0.1): it is a container's bridge"], "--interface"),
        ([LOOPBACK, BRIDGE], "wlan7", "problem", ["wlan7", "docker0 (172.17.0.1)"], ""),
        # 203.0.113.77 belongs to no machine and cannot be bound.
        ([Interface("eth9", "203.0.113.77", False, 1000, "")], None, "problem", ["eth9"], ""),
    ],
    ids=["skipped", "unknown", "without its address"],
)
def test_interface_check_explains_its_choice(
    known: list[Interface], chosen: str | None, status: str, says: list[str], advice: str
) -> None:
    finding = doctor.check_interface(known, chosen)
    assert finding.status == status
    assert all(text in finding.what for text in says)
    assert advice in finding.do


def test_multicast_on_loopback_is_received() -> None:
    assert doctor.check_multicast(["127.0.0.1"], doctor.multicast_works).status == "ok"


def test_multicast_from_a_foreign_address_is_a_problem() -> None:
    finding = doctor.check_multicast(["127.0.0.1", "203.0.113.77"], doctor.multicast_works)
    assert finding.status == "problem"
    assert "203.0.113.77" in finding.what
    assert "127.0.0.1" not in finding.what


def test_multicast_probe_is_a_valid_mdns_query() -> None:
    packet = DNSIncoming(doctor.multicast_probe())
    assert packet.valid
    assert packet.is_query()
    assert [question.name.endswith(".local.") for question in packet.questions] == [True]
    assert doctor.multicast_probe() != doctor.multicast_probe()


@pytest.mark.parametrize(
    ("installed", "status", "says"),
    [
        ({}, "ok", "no filtering"),
        ({"ufw": ProgramOutput(True, "Status: inactive\n")}, "ok", "no filtering"),
        ({"ufw": ProgramOutput(True, "Status: active\n")}, "warning", "ufw filters"),
        ({"firewall_cmd": ProgramOutput(True, "running\n")}, "warning", "firewalld filters"),
        ({"firewall_cmd": ProgramOutput(False, "not running\n")}, "ok", "no filtering"),
        ({"nft": ProgramOutput(True, "chain input { policy drop; }")}, "warning", "nftables filters"),
        ({"nft": ProgramOutput(True, "")}, "ok", "no filtering"),
        ({"iptables": ProgramOutput(True, "-P INPUT ACCEPT\n")}, "ok", "no filtering"),
        ({"iptables": ProgramOutput(True, "-P INPUT DROP\n")}, "warning", "iptables filters"),
        ({"nft": ProgramOutput(False, ""), "ufw": ProgramOutput(False, "")}, "warning", "could not be read"),
        ({"nft": ProgramOutput(False, ""), "ufw": ProgramOutput(True, "Status: active")}, "warning", "ufw filters"),
    ],
)
def test_firewall_check_table(installed: dict[str, ProgramOutput], status: str, says: str) -> None:
    finding = doctor.check_firewall(programs(**installed))
    assert (finding.status, says in finding.what) == (status, True)
    if status == "warning":
        for port in ("47800", "47801", "47810-47829", "47830", "5353"):
            assert port in finding.do


@pytest.mark.parametrize(
    ("open_ports", "status", "says"),
    [
        (set(), "ok", "no agent, no coordinator"),
        ({47800, 47801}, "ok", "an agent answers on 47800 and 47801, no coordinator"),
        ({47800, 47801, 47830}, "ok", "a coordinator on 47830"),
        ({47800}, "warning", "port 47801 does not"),
        ({47801}, "warning", "port 47800 does not"),
    ],
)
def test_port_check_detects_an_agent_with_one_open_port(open_ports: set[int], status: str, says: str) -> None:
    finding = doctor.check_ports(lambda port: port in open_ports)
    assert (finding.status, says in finding.what) == (status, True)


def test_port_is_open_during_listen_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert doctor.port_is_open(port)
    assert not doctor.port_is_open(port)


# ---- key and disk --------------------------------------------------------------------------------


def test_valid_key_is_described_without_its_secret(tmp_path: Path) -> None:
    home = new_home_key()
    save_credential(tmp_path / "key", home)
    finding, credential = doctor.check_key(tmp_path / "key")
    assert (finding.status, credential) == ("ok", home)
    assert "home key" in finding.what
    assert home.key not in finding.what


def test_key_readable_by_others_is_a_problem(tmp_path: Path) -> None:
    save_credential(tmp_path / "key", new_home_key())
    (tmp_path / "key").chmod(0o644)
    finding, credential = doctor.check_key(tmp_path / "key")
    assert (finding.status, credential) == ("problem", None)
    assert f"chmod 600 {tmp_path / 'key'}" in finding.do


@pytest.mark.parametrize("content", [None, "hearth-home-1:cut-short", "nonsense"])
def test_missing_or_damaged_key_is_a_problem_with_a_remedy(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "key").write_text(content)
    finding, credential = doctor.check_key(tmp_path / "key")
    assert (finding.status, credential) == ("problem", None)
    assert "hearth key" in finding.do


def test_disk_check_works_before_the_state_directory_exists(tmp_path: Path) -> None:
    assert str(tmp_path) in doctor.check_disk(tmp_path / "not" / "yet").what


# ---- other devices -------------------------------------------------------------------------------


def test_wrong_clocks_are_named() -> None:
    finding = doctor.check_clocks({"pi": 1000.0, "jetson": 1004.0, "nas": 700.0}, now=1001.0)
    assert finding.status == "warning"
    assert "nas by -301 s" in finding.what
    assert "pi" not in finding.what
    assert doctor.check_clocks({"pi": 1000.0}, now=1001.0).status == "ok"


def test_refused_and_outdated_agents_are_findings() -> None:
    refusal = ProtocolMismatch(peer="tcp://10.0.0.7:47800", ours=1, theirs=2)
    findings = doctor.check_agents([device("pi"), device("jetson", version="0.0.1")], [refusal], now=0.0)
    by_status = {status: [f.what for f in findings if f.status == status] for status in ("problem", "warning")}
    assert by_status["problem"] == [refusal.explanation()]
    assert len(by_status["warning"]) == 1
    assert "jetson 0.0.1" in by_status["warning"][0]
    assert any(f.what == "2 answer: jetson, pi" for f in findings)


def test_agent_that_cannot_use_its_gpu_is_a_warning_with_the_reason() -> None:
    ready = ready_device("x").telemetry
    assert ready is not None
    gpu = Gpu(name="Orin", kind="cuda", memory_total_bytes=8, memory_free_bytes=4, compute_capability=(8, 7))
    devices = {
        "plain": ready,
        "jetson": ready.model_copy(update={"compute_device": "cuda", "gpu": gpu}),
        "pc": ready.model_copy(update={"gpu_problem": "torch 2.13.0+cpu is a build for the CPU only"}),
    }
    warning, used = doctor.check_gpus(devices)
    assert (warning.status, used.status) == ("warning", "ok")
    assert "pc computes on the CPU" in warning.what
    assert "torch 2.13.0+cpu is a build for the CPU only" in warning.what
    assert "--compute-device cpu" in warning.do
    assert used.what == "used by jetson (Orin)"
    assert doctor.check_gpus({"plain": ready}) == []


def test_devices_whose_workers_are_not_confined_are_named_with_what_is_missing() -> None:
    unknown = ready_device("x").telemetry
    assert unknown is not None
    reports = {"old-kernel": "calls", "pc": "files network calls", "none": "", "pi": "files network calls"}
    devices = {name: unknown.model_copy(update={"confined": each}) for name, each in reports.items()}
    none, old_kernel, fine = doctor.check_confinement({"earlier": unknown, **devices})
    assert (none.status, old_kernel.status, fine.status) == ("warning", "warning", "ok")
    assert "none are not confined in: files, network, calls" in none.what
    assert "old-kernel are not confined in: files, network" in old_kernel.what
    assert fine.what == "workers are confined on pc, pi"


def test_no_agent_is_a_warning_with_a_remedy() -> None:
    (finding,) = doctor.check_agents([], [], now=0.0)
    assert finding.status == "warning"
    assert "hearth-agent" in finding.do


@pytest.mark.parametrize(("count", "status"), [(0, "ok"), (1, "ok"), (2, "problem")])
def test_second_coordinator_is_a_problem(count: int, status: str) -> None:
    found = [DiscoveredService(str(i), (f"10.0.0.{i}",), 47830, 1, "same home") for i in range(count)]
    finding = doctor.check_coordinators(found)
    assert finding.status == status
    assert all(f"10.0.0.{i}:47830" in finding.what for i in range(count))


def test_coordinators_of_the_same_home_are_detected_by_mdns() -> None:
    home, other = new_home_key(), new_home_key()

    async def look() -> list[doctor.CheckResult]:
        async with AsyncExitStack() as stack:
            for key, port in ((home, 40001), (home, 40002), (other, 40003)):
                public = coordinator_access(key).server_public
                await stack.enter_async_context(
                    advertised(COORDINATOR_SERVICE, port, public, f"doctor-test-{port}", lambda: ["127.0.0.1"])
                )
            for _ in range(20):  # multicast is late on a busy machine
                found = await doctor.check_network(home, ["127.0.0.1"], search_seconds=1.5)
                if any(finding.status == "problem" for finding in found):
                    break
            return found

    (finding,) = [f for f in asyncio.run(look()) if f.check == "coordinator"]
    assert finding.status == "problem"
    assert "127.0.0.1:40001" in finding.what
    assert "127.0.0.1:40002" in finding.what
    assert "40003" not in finding.what


@pytest.mark.parametrize("address", ["203.0.113.77", "nonsense"])
def test_invalid_mdns_address_is_a_finding(address: str) -> None:
    findings = asyncio.run(doctor.check_network(new_home_key(), [address], search_seconds=0.1))
    assert [f.status for f in findings] == ["problem"]
    assert address in findings[0].what


def test_key_of_a_device_or_an_app_finds_coordinators_only() -> None:
    """Neither may talk to agents."""
    home = new_home_key()
    public = coordinator_access(home).server_public
    for key in (
        new_device_key(home, "kitchen"),
        AppKey(name="app", secret=new_keypair().secret, coordinator_public=public),
    ):
        findings = asyncio.run(doctor.check_network(key, ["127.0.0.1"], search_seconds=0.1))
        assert [finding.check for finding in findings] == ["coordinator"]


# ---- the command ---------------------------------------------------------------------------------


def test_command_prints_json_and_fails_on_problems(tmp_path: Path) -> None:
    key = tmp_path / "absent"
    result = CliRunner().invoke(
        app, ["doctor", "--json", "--key", str(key), "--interface", "lo", "--mdns-interfaces", "127.0.0.1"]
    )
    findings = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1
    problems = [f["check"] for f in findings if f["status"] == "problem"]
    problems = [each for each in problems if each != "libraries"]  # importing those may take too long on a busy machine
    assert problems == ["key"]
    assert {"versions", "interface", "disk", "multicast", "firewall", "ports"} <= {f["check"] for f in findings}


def test_command_prints_remedies(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--key", str(tmp_path / "absent"), "--mdns-interfaces", "127.0.0.1"])
    assert result.exit_code == 1
    assert "problem key: There is no key at" in result.stdout.replace("\n", "")
    assert "-> Create a key with `hearth key new`" in result.stdout
