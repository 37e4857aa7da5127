"""Systemd units checked with systemd's tools, and their settings files against the existing settings."""

from __future__ import annotations

import argparse
import ipaddress
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from agent.daemon.config import PREFIX as AGENT_PREFIX
from agent.daemon.config import AgentSettings
from agent.daemon.config import load_agent_settings as load_agent
from agent.daemon.liveness import MAX_THREADS
from coordinator.serve.config import ENVIRONMENT_PREFIX as COORDINATOR_PREFIX
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.config import load_coordinator_settings as load_coordinator
from hearth.platform.security import admin_key, format_credential, new_device_key, new_home_key

UNITS = Path(__file__).parents[1] / "systemd"
DAEMONS = ("hearth-agent", "hearth-coordinator")  # they hold a key of the home and keep state
SERVICES = (*DAEMONS, "hearth-gateway")
# From 0 (safest) to 10. A plain service has 9.6.
MAX_EXPOSURE = 3.0
# Command-line arguments that the unit passes on, not settings.
OPTIONS = {"hearth-coordinator": {"HEARTH_SERVE_OPTIONS"}, "hearth-gateway": {"HEARTH_GATEWAY_OPTIONS"}}

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here (package systemd)"
)


def unit(service: str) -> dict[str, list[str]]:
    """All directives of a unit, each with its values in order."""
    directives = defaultdict(list)
    for line in (UNITS / f"{service}.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            directives[name].append(value.strip())
    return directives


def variables(service: str) -> dict[str, str]:
    """Every variable that a settings file names, commented out or not, with its value."""
    text = (UNITS / f"{service}.env").read_text()
    return dict(re.findall(r"^#?(HEARTH_[A-Z_]+)=(.*)$", text, re.MULTILINE))


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_systemd_analyze_verify_accepts_the_unit(service: str, tmp_path: Path) -> None:
    """The unit's commands are replaced by stubs, since they need not be installed here."""
    (command,) = unit(service)["ExecStart"]
    installed = tmp_path / Path(command.split()[0]).name
    installed.write_text("#!/bin/sh\n")
    installed.chmod(installed.stat().st_mode | stat.S_IXUSR)
    copy = tmp_path / f"{service}.service"
    text = (UNITS / copy.name).read_text()
    copy.write_text(text.replace(command.split()[0], str(installed)))
    done = analyze("verify", "--man=no", str(copy))
    complaints = [line for line in done.stderr.splitlines() if service in line]
    assert (done.returncode, complaints) == (0, [])


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_unit_exposure_is_below_the_limit(service: str) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(UNITS / f"{service}.service"))
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize("service", SERVICES)
def test_service_has_its_own_user_and_a_key_credential(service: str) -> None:
    directives = unit(service)
    users = re.findall(r"^u (\S+)", (UNITS / "hearth.sysusers").read_text(), re.MULTILINE)
    assert directives["User"] == users
    name = "home" if service in DAEMONS else "gateway"
    assert directives["LoadCredential"] == [f"{name}.key:/etc/hearth/{name}.key"]
    assert directives["NoNewPrivileges"] == ["yes"]
    assert directives["CapabilityBoundingSet"] == [""]


@pytest.mark.parametrize("service", SERVICES)
def test_service_may_set_the_scheduling_that_libzmq_asks_for(service: str) -> None:
    """It aborted the coordinator at every start: found under a real systemd, see tools/boot/systemd.sh."""
    denied = " ".join(unit(service)["SystemCallFilter"]).replace("@system-service", "")
    assert "@resources" not in denied
    assert unit(service)["RestrictRealtime"] == ["yes"]


def test_agent_has_room_for_threads_beside_a_worker_that_starts_too_many() -> None:
    assert int(unit("hearth-agent")["TasksMax"][0]) >= 2 * MAX_THREADS


@pytest.mark.parametrize("service", DAEMONS)
def test_service_may_confine_its_children(service: str) -> None:
    """systemd's group for services lacks Landlock: without these names, no worker was confined under systemd."""
    allowed = unit(service)["SystemCallFilter"][0].split()
    assert {f"landlock_{name}" for name in ("create_ruleset", "add_rule", "restrict_self")} <= set(allowed)


@pytest.mark.parametrize("service", SERVICES)
def test_service_restarts_automatically(service: str) -> None:
    """After a crash, a hang, or a worker killed for lack of memory; the state is kept."""
    directives = unit(service)
    assert directives["Restart"] == ["on-failure"]
    assert directives["OOMPolicy"] == ["continue"]
    assert directives["StartLimitIntervalSec"] == ["0"]  # systemd never gives up
    assert directives["RestartSec"] == ["1"]  # part of the pause after a crash


@pytest.mark.parametrize("service", DAEMONS)
def test_daemon_is_watched_and_keeps_its_state(service: str) -> None:
    directives = unit(service)
    assert directives["Type"] == ["notify"]
    assert int(directives["WatchdogSec"][0]) > 0
    assert directives["StateDirectory"] == [service]


def test_agent_may_use_the_gpu_and_executable_memory() -> None:
    """Both directives would be safer, but break torch: see the unit."""
    directives = unit("hearth-agent")
    assert "yes" not in directives["PrivateDevices"]
    assert "yes" not in directives["MemoryDenyWriteExecute"]
    assert directives["DevicePolicy"] == ["closed"]
    assert set(directives["SupplementaryGroups"][0].split()) == {"video", "render"}
    allowed = {value.split()[0] for value in directives["DeviceAllow"]}
    assert {"char-nvidia*", "char-drm"} <= allowed
    # Of a Jetson Orin: what NVIDIA's container runtime hands to a container that uses CUDA.
    assert {"char-nvhost*", "char-nvgpu*", "char-*.ga10b", "char-*.gpu"} <= allowed
    assert {"/dev/nvmap", "/dev/host1x-fence", "/dev/nvsciipc"} <= allowed


@pytest.mark.parametrize("service", SERVICES)
def test_unit_reaches_private_networks_only_and_dumps_no_core(service: str) -> None:
    directives = unit(service)
    assert directives["IPAddressDeny"] == ["any"]
    allowed = directives["IPAddressAllow"][0].split()
    assert {"localhost", "link-local", "multicast"} < set(allowed)
    networks = [ipaddress.ip_network(each) for each in allowed if "/" in each]
    assert all(not each.is_global for each in networks)
    for home in ("10.1.2.3", "172.20.0.1", "192.168.178.20", "fd00::1"):
        assert any(ipaddress.ip_address(home) in each for each in networks)
    assert directives["LimitCORE"] == ["0"]
    assert int(directives["LimitNOFILE"][0]) >= 8192
    assert int(directives["OOMScoreAdjust"][0]) < 0


@pytest.mark.parametrize("service", SERVICES)
def test_unit_allows_socket_families_of_multicast_dns(service: str) -> None:
    families = set(unit(service)["RestrictAddressFamilies"][0].split())
    assert {"AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"} == families


@pytest.mark.parametrize(
    ("service", "prefix", "settings"),
    [("hearth-agent", AGENT_PREFIX, AgentSettings), ("hearth-coordinator", COORDINATOR_PREFIX, CoordinatorSettings)],
)
def test_settings_file_lists_exactly_the_settings(
    service: str, prefix: str, settings: type[AgentSettings | CoordinatorSettings]
) -> None:
    assert set(variables(service)) - OPTIONS.get(service, set()) == {
        prefix + name.upper() for name in settings.model_fields
    }


@pytest.mark.parametrize("service", SERVICES)
def test_settings_file_sets_nothing_by_default(service: str) -> None:
    lines = (UNITS / f"{service}.env").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == []


def test_example_values_are_valid() -> None:
    """Uncommented examples must work."""
    agent = load_agent(argparse.Namespace(), variables("hearth-agent"))
    assert agent.data_ports == (47810, 47829)
    assert agent.store_bytes == 16 << 30
    coordinator = load_coordinator({}, variables("hearth-coordinator"))
    assert coordinator.port == 47830
    assert coordinator.encrypt_data_plane


@pytest.mark.parametrize("service", OPTIONS)
def test_settings_file_lists_options_passed_by_the_unit(service: str) -> None:
    (command,) = unit(service)["ExecStart"]
    assert set(re.findall(r"\$(\w+)", command)) == OPTIONS[service]
    assert set(variables(service)) >= OPTIONS[service]


def test_purge_removes_every_folder_of_the_services() -> None:
    (removed,) = re.findall(r"^  rm -rf (/etc/.*)$", (UNITS / "debian/postrm").read_text(), re.MULTILINE)
    folders = {
        f"{parent}/{name}"
        for service in SERVICES
        for directive, parent in (("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache"))
        for name in unit(service).get(directive, [])
    }
    assert folders
    assert set(removed.split()) == {"/etc/hearth", *folders}


def detect(tmp_path: Path, machine: str, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What install.sh takes a device for that has these files."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "HEARTH_SYSROOT": str(tmp_path), "HEARTH_MACHINE": machine}
    command = [str(UNITS / "install.sh"), "--detect"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def jetson(release: int) -> dict[str, str]:
    return {"etc/nv_tegra_release": f"# R{release} (release), REVISION: 4.3, GCID: 1, BOARD: generic, EABI: aarch64"}


@pytest.mark.parametrize(
    ("machine", "files", "found"),
    [
        ("x86_64", {}, "computer (x86_64): hearth-home[worker,coordinator,gateway]"),
        ("aarch64", {}, "computer (aarch64): hearth-home[worker,coordinator,gateway]"),
        (
            "aarch64", {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"},
            "Raspberry Pi 5 Model B Rev 1.0: hearth-home[worker,coordinator,gateway]",
        ),
        ("aarch64", jetson(36), "Jetson, JetPack 6: hearth-home[gpu,coordinator,gateway]"),
        ("aarch64", jetson(38), "Jetson, JetPack 7: hearth-home[gpu,coordinator,gateway]"),
    ],
)  # fmt: skip
def test_installer_detects_the_device(tmp_path: Path, machine: str, files: dict[str, str], found: str) -> None:
    done = detect(tmp_path, machine, files)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, found, "")


@pytest.mark.parametrize(
    ("machine", "files", "reason"),
    [
        ("aarch64", jetson(32), "JetPack 5 or older"),
        ("aarch64", jetson(35), "JetPack 5 or older"),
        ("aarch64", jetson(99), "does not know"),
        ("armv7l", {"proc/device-tree/model": "Raspberry Pi 4 Model B"}, "32-bit"),
        ("riscv64", {}, "no torch for this processor: riscv64"),
    ],
)
def test_installer_refuses_what_cannot_work_and_says_why(
    tmp_path: Path, machine: str, files: dict[str, str], reason: str
) -> None:
    done = detect(tmp_path, machine, files)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr


def test_installer_explains_its_options() -> None:
    done = subprocess.run(
        [str(UNITS / "install.sh"), "--what"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    for option in re.findall(r"^    (--[a-z-]+)", (UNITS / "install.sh").read_text(), re.MULTILINE):
        assert f"  {option} " in done.stderr


# ---- install.sh: whose key is taken ----------------------------------------------------------------------------------

HOME = new_home_key()
LINES = {"home": format_credential(HOME), "device": format_credential(new_device_key(HOME, "kitchen"))}
LINES["admin"] = format_credential(admin_key(HOME))
STUBS = {
    "id": "echo 0",
    "chown": "",
    "systemd-sysusers": "",
    # `systemctl is-enabled --quiet NAME` and `systemctl --quiet enable NAME...`, with a file in place of systemd.
    "systemctl": 'case $1$2 in is-enabled*) grep -qx "$3" "$HEARTH_SYSROOT/enabled" ;; '
    '--quietenable) shift 2; printf "%s\\n" "$@" >> "$HEARTH_SYSROOT/enabled" ;; esac',
    "opt/hearth/bin/python": 'case "$*" in "-m pip"* | "-c import pip") echo "$*" >> "$HEARTH_SYSROOT/pip" ;; '
    f'*) exec {sys.executable} "$@" ;; esac',
}


def install(root: Path, *options: str, given: str = "", terminal: bool = False) -> tuple[int, str]:
    """Run install.sh in a folder, with neither pip nor systemd: its status, and what it says. `given`: its input."""
    for name, body in STUBS.items():
        path = root / ("bin" if "/" not in name else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    os.write(ours if terminal else theirs, f"{given}\n".encode())
    stdin = theirs if terminal else ours
    if not terminal:
        os.close(theirs)
    environment = {
        **os.environ,
        "HEARTH_SYSROOT": str(root),
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "HOSTNAME": "Pi_4.lan",
    }
    environment |= {"PYTHONPATH": str(UNITS.parent)}
    command = [str(UNITS / "install.sh"), "--python", sys.executable, "--no-start", *options]
    done = subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    os.close(stdin)
    if terminal:
        os.close(ours)
    return done.returncode, done.stdout + done.stderr


def test_installer_enrols_each_device_with_a_key_of_its_own(tmp_path: Path) -> None:
    status, said = install(tmp_path, given=LINES["device"], terminal=True)
    assert status == 0, said
    assert "hearth key add-device pi-4-lan --key /etc/hearth/home.key" in said
    key = tmp_path / "etc/hearth/home.key"
    assert (key.read_text().strip(), key.stat().st_mode & 0o777) == (LINES["device"], 0o600)
    assert install(tmp_path)[0] == 0  # an upgrade
    assert key.read_text().strip() == LINES["device"]


def test_installer_makes_a_home_on_its_coordinator_only(tmp_path: Path) -> None:
    key = tmp_path / "etc/hearth/home.key"
    status, said = install(tmp_path, "--key", "new")
    assert (status, key.exists()) == (1, False), said
    assert "add-device NAME" in said
    assert install(tmp_path, "--coordinator", "--key", "new")[0] == 0
    home = key.read_text()
    assert home.startswith("hearth-home-1:")
    status, said = install(tmp_path)  # an upgrade knows the coordinator by its unit
    assert (status, key.read_text()) == (0, home)
    assert "one of its own" not in said
    assert install(tmp_path, "--key", "-", given=LINES["device"])[0] == 1
    assert key.read_text() == home


@pytest.mark.parametrize("kind", ["home", "admin"])
def test_installer_refuses_other_keys_on_a_device(tmp_path: Path, kind: str) -> None:
    status, said = install(tmp_path, "--key", "-", given=LINES[kind])
    assert status == 1
    assert f"a key of the kind '{kind}'" in said
    assert LINES[kind] not in said
    assert not (tmp_path / "etc/hearth/home.key").exists()


def test_installer_tells_a_device_that_still_holds_the_home_key(tmp_path: Path) -> None:
    key = tmp_path / "etc/hearth/home.key"
    key.parent.mkdir(parents=True)
    key.write_text(LINES["home"])
    status, said = install(tmp_path)
    assert (status, key.read_text()) == (0, LINES["home"])
    assert "needs only one of its own" in said
    assert install(tmp_path, "--key", "-", given=LINES["device"])[0] == 0
    assert key.read_text().strip() == LINES["device"]


def test_installer_takes_files_with_known_hashes_only(tmp_path: Path) -> None:
    """Unless it is told otherwise, or on a Jetson, where NVIDIA's builds need other versions than the pinned ones."""
    for option, verified in (("--small", True), ("--unverified", False)):
        (tmp_path / "pip").unlink(missing_ok=True)
        assert install(tmp_path, option)[0] == 0
        installs = [line for line in (tmp_path / "pip").read_text().splitlines() if " install " in line]
        assert len(installs) == 2
        source = f" --no-index --find-links {UNITS}/../constraints.html "
        assert [source in line for line in installs] == [verified] * 2
