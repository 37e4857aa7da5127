"""A running testbed: networks, cgroups, and real Hearth programs in them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from hearth.errors import BadSetting, DeadlineExceeded, InternalError
from hearth.platform.security import new_home_key, save_credential
from tools.interrupts import shielded
from tools.testbed.cgroups import HIERARCHIES, MOUNT_AND_EXEC, DeviceCgroup
from tools.testbed.medium import Medium
from tools.testbed.network import SWITCH, Network
from tools.testbed.scenario import NOMINAL_CORE_SECONDS, EmulatedDevice, Scenario, tomllib

_STOP_SECONDS = 5.0  # that programs get to end after SIGTERM
_CALIBRATION_SECONDS = 60.0  # timeout on a whole core, importing torch included
_PLAN_SECONDS = 600.0  # timeout of `hearth plan`, profiling on slow devices included
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # capabilities(7)
_BIN = Path(sys.executable).parent
_RELAY_SECONDS = 30.0  # that the relay of a medium gets to start
_REPOSITORY = Path(__file__).parents[2]
_HOST_RESERVE_BYTES = 512 << 20  # memory left for the host itself


class Testbed:
    """Sets up a testbed, starts programs in it and removes it. The context manager removes it after errors too.

    An interrupt (`tools.interrupts`) takes effect after the networks have been set up or removed. Raises BadSetting: not
    root, a missing core, more memory than the machine has.
    """

    __test__ = False  # not a test case; the name makes pytest collect it
    network: Network  # set by `up`
    cgroups: dict[str, DeviceCgroup]  # by device; set by `up`

    def __init__(self, scenario: Scenario, folder: Path, tree: Path | None = None) -> None:
        """`tree`: run programs from this checkout of Hearth."""
        self.scenario = scenario
        self.folder = folder
        self.key = folder / "home.key"
        self.link_scale = 1.0  # real rate of a link / the scenario's; set by `calibrate`
        self._names = [device.name for device in scenario.devices]
        self._tree = tree
        self._tree_environment = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} if tree else {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._slot: int | None = None

    @classmethod
    def attached(cls, running: Running) -> Testbed:
        """A testbed that another process has started."""
        testbed = cls(running.scenario, Path(running.folder))
        testbed._attach(running.slot)
        return testbed

    def _attach(self, slot: int) -> None:
        self._slot = slot
        self.network = Network(f"ht{slot}", slot, self._names)
        self.cgroups = {name: DeviceCgroup(f"hearth-ht{slot}", name) for name in self._names}

    def __enter__(self) -> Testbed:
        try:
            with shielded(with_children=True):
                self.up()
            self.calibrate()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with shielded(with_children=True):
            self.down()

    def up(self) -> None:
        """Create networks and cgroups. Raises BadSetting if this is not possible.

        Call `down` after an error too.
        """
        check_possible(self.scenario)
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked():
            for running in running_testbeds():
                if running.orphaned:
                    Testbed.attached(running).down()
            self._attach(claim(self.scenario, self.folder).slot)
        media = {medium.name: medium for medium in self.scenario.media}
        self.network.create(
            {device.name: device.mbit for device in self.scenario.devices},
            {device.name: media[device.medium] for device in self.scenario.devices if device.medium is not None},
        )
        for medium in self.scenario.media:
            self._start_relay(medium)
        for device in self.scenario.devices:
            self.cgroups[device.name].create(device)
        save_credential(self.key, new_home_key())

    def _start_relay(self, medium: Medium) -> None:
        """Start the relay of a shared medium, outside all devices' limits, and wait until it carries frames."""
        started = self.folder / f"relay-{medium.name}.started"
        ends = {station: self.network.relayed_ends(station) for station in self.scenario.stations(medium.name)}
        with (self.folder / f"relay-{medium.name}.log").open("ab") as log:
            relay = subprocess.Popen(
                ["ip", "netns", "exec", self.network.namespace(SWITCH), sys.executable, "-m", "tools.testbed.relay",
                 medium.model_dump_json(), str(started), json.dumps(ends)],
                cwd=_REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._processes.append(relay)

        def carries() -> bool:
            if relay.poll() is not None:
                said = self.log(f"relay-{medium.name}.log").strip()[-500:]
                raise InternalError(where=f"the relay of the medium {medium.name}", reason=said or "it ended at once")
            return started.exists()

        wait_until(f"the start of the relay of {medium.name}", carries, _RELAY_SECONDS)

    def calibrate(self) -> None:
        """If the scenario scales its links: measure the devices' speed, set the rates. About 10 s. Raises SubprocessError."""
        if self.scenario.scale_links:
            self.link_scale = NOMINAL_CORE_SECONDS / self._core_seconds()
            self.set_mbit(None)

    def _core_seconds(self) -> float:
        """Seconds of one layer on a whole core while all devices compute. Raises SubprocessError."""
        program = (sys.executable, "-m", "tools.testbed.calibrate")
        running = {
            device: self.popen(device.name, *program, stdout=subprocess.PIPE, memory_limited=False)
            for device in self.scenario.devices
        }
        found = []
        for device, process in running.items():
            output, _ = process.communicate(timeout=_CALIBRATION_SECONDS / min(device.cpu_share, 1.0))
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, program)
            found.append(float(output) * device.cpu_share)
        return statistics.median(found)

    def down(self) -> None:
        """Stop all processes and remove everything except the folder."""
        if self._slot is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._stop(number)
        for process in self._processes:  # one that is ending has left its namespace already
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
        for cgroup in self.cgroups.values():
            cgroup.remove()
        self.network.remove()
        _path(self._slot).unlink(missing_ok=True)
        self._slot = None

    def pids(self, name: str) -> list[int]:
        """Processes of a device: those in its namespace or its cgroups."""
        return sorted({*self.network.pids(name), *self.cgroups[name].pids()})

    def _stop(self, number: int) -> None:
        """Signal all processes of devices and the relays, also later ones, and wait for their end."""

        def running() -> set[int]:
            return {*self.network.pids(SWITCH), *(pid for name in self._names for pid in self.pids(name))}

        deadline = time.monotonic() + _STOP_SECONDS
        signalled: set[int] = set()
        while (pids := running()) and time.monotonic() < deadline:
            for process in self._processes:
                process.poll()  # reaps it
            for pid in pids - signalled:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= pids
            time.sleep(0.02)

    # ---- devices --------------------------------------------------------------------------------------------------

    def device(self, name: str) -> EmulatedDevice:
        """The device of this name. Raises ValueError."""
        return self.scenario.devices[self._names.index(name)]

    def address(self, name: str) -> str:
        return self.network.address(name)

    def mbit(self, name: str, mbit: float | None = None) -> float:
        """The real rate of a device's link: `mbit`, or the scenario's, scaled."""
        return mbit or self.device(name).mbit * self.link_scale

    def set_mbit(self, mbit: float | None) -> None:
        """Set every link to this real rate, or to the scenario's, scaled."""
        for name in self._names:
            self.network.set_mbit(name, self.mbit(name, mbit))

    def command(self, name: str, *arguments: str) -> list[str]:
        """The command line that runs a program in the device's namespace."""
        return ["ip", "netns", "exec", self.network.namespace(name), "sh", "-c", MOUNT_AND_EXEC, "sh", *arguments]

    def program(self, name: str) -> list[str]:
        """The start of the command line of `hearth` or `hearth-agent`."""
        if self._tree is None:
            return [str(_BIN / name)]
        project = tomllib.loads((self._tree / "pyproject.toml").read_text())["project"]
        module, _, function = project["scripts"][name].partition(":")
        return [sys.executable, "-c", f"from {module} import {function}; {function}()"]

    def environment(self) -> dict[str, str]:
        """Variables with which a plain `hearth` finds its key, the coordinator's state and its own program."""
        return {
            **self._tree_environment,
            "HEARTH_KEY": str(self.key),
            "HEARTH_COORDINATOR_STATE_DIR": str(self.folder / "coordinator"),
            "PATH": f"{_BIN}:{os.environ.get('PATH', os.defpath)}",
        }

    def popen(
        self,
        name: str,
        *arguments: str,
        limited: bool = True,
        memory_limited: bool = True,
        environment: Mapping[str, str] = {},
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a program in a device's namespace and, if `limited`, under its CPU limit.

        `memory_limited` also applies the memory limit; benchmarks that keep several plans loaded switch it off. The child
        joins the cgroups before it enters the namespace, where /sys is a different mount.
        """
        device = self.device(name)
        process = subprocess.Popen(
            self.command(name, *arguments),
            preexec_fn=partial(_join, self.cgroups[name].procs_files(memory_limited), device.core) if limited else None,
            env={**os.environ, **self._tree_environment, **(device.environment if limited else {}), **environment},
            cwd=self._tree,
            **options,
        )
        self._processes.append(process)
        return process

    # ---- the programs ---------------------------------------------------------------------------------------------

    def start_agent(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        folder = self.folder / name
        return self._logged(
            name, f"{name}.log", True, *self.program("hearth-agent"), "--name", name, "--key-path", str(self.key),
            "--state-dir", str(folder / "state"), "--store-dir", str(folder / "store"), "--bind-host",
            self.address(name), "--interface", self.address(name),
            "--threads", str(self.device(name).num_threads), *options,
        )  # fmt: skip

    def start_coordinator(self, *options: str, device: str | None = None) -> subprocess.Popen[bytes]:
        """Start `hearth serve` in its device's namespace: it shares the device's link but not its CPU quota.

        `device`: another one, for a second coordinator with a state and a log of its own.
        """
        name = device or self.scenario.coordinator_device
        folder, log = (self.folder / name, f"coordinator-{name}.log") if device else (self.folder, "coordinator.log")
        return self._logged(
            name, log, False, *self.program("hearth"), "serve", *options, "--key", str(self.key),
            "--state-dir", str(folder / "coordinator"), "--mdns-interfaces", self.address(name),
        )  # fmt: skip

    def hearth(self, *arguments: str, timeout_seconds: float = 300.0) -> str:
        """Run a `hearth` command on the coordinator's device; returns its output. Raises InternalError with its error text."""
        name = self.scenario.coordinator_device
        done = subprocess.run(
            self.command(name, *self.program("hearth"), *arguments, "--key", str(self.key)),
            capture_output=True, text=True, timeout=timeout_seconds, check=False,
            env={**os.environ, **self.environment()}, cwd=self._tree,
        )  # fmt: skip
        if done.returncode != 0:
            raise InternalError(where=f"hearth {arguments[0]}", reason=done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def plan(self, *arguments: str) -> str:
        """Plan with `hearth plan`, which caches its profiles; returns the plan file. Raises InternalError."""
        path = self.folder / "plan.json"
        self.hearth("plan", *arguments, "--save", str(path), timeout_seconds=_PLAN_SECONDS)
        return path.read_text()

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def _logged(self, device: str, log: str, limited: bool, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return self.popen(
                device, *arguments, limited=limited, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )


def what_is_missing() -> str:
    """The first missing requirement of a testbed, or "". Root in a container often lacks the capabilities."""
    if os.geteuid() != 0:
        return "network namespaces and cgroups need root: run it with sudo"
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if not all(capabilities >> number & 1 for number in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN)):
        return "network namespaces need CAP_NET_ADMIN and CAP_SYS_ADMIN: run it outside of a container"
    if not all(os.access(hierarchy, os.W_OK) for hierarchy in HIERARCHIES):
        return "the cgroups of the cpu and memory controllers cannot be written here"
    return ""


def check_possible(scenario: Scenario) -> None:
    """Raise BadSetting if this machine cannot emulate the scenario."""
    if reason := what_is_missing():
        raise BadSetting(setting="the testbed", reason=reason)
    if reason := _what_is_too_much(scenario):
        raise BadSetting(setting=f"scenario {scenario.name}", reason=reason)


def _what_is_too_much(scenario: Scenario) -> str:
    cores = os.sched_getaffinity(0)
    shares: dict[int | None, float] = defaultdict(float)
    for device in scenario.devices:
        if device.core is not None and device.core not in cores:
            return f"{device.name}: there is no core {device.core} here, only {', '.join(map(str, sorted(cores)))}"
        shares[device.core] += device.cpu_share
    crowded = [f"core {core}" for core, share in shares.items() if core is not None and share > 1.0]
    if crowded or sum(shares.values()) > len(cores):
        where = crowded[0] if crowded else "the machine"
        return f"its devices want more of {where} than is available and would slow each other down"
    wanted = sum(device.memory_bytes or 0 for device in scenario.devices)
    there = psutil.virtual_memory().available - _HOST_RESERVE_BYTES
    if wanted > there:
        return f"its devices have {wanted >> 20} MiB together, this machine has {there >> 20} MiB free"
    return ""


def wait_until(what: str, probe: Callable[[], bool], seconds: float) -> None:
    """Poll until `probe` returns True. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(action=what, seconds=seconds)
        time.sleep(0.05)


def _join(procs_files: Iterable[Path], core: int | None) -> None:
    """The work of a child before exec: join the cgroups and pin itself to the device's core."""
    for path in procs_files:
        path.write_text(str(os.getpid()))
    if core is not None:
        os.sched_setaffinity(0, {core})


# ---- the testbeds of this machine, as files, so that any later process can remove one ----------------------------------

RUN_DIR = Path("/run/hearth-testbed")
_MAX_SLOTS = 32  # testbeds at a time


class Running(BaseModel):
    """A running or orphaned testbed."""

    model_config = ConfigDict(frozen=True)

    slot: int
    scenario: Scenario
    folder: str
    owner_pid: int  # process with which the testbed ends
    owner_ticks: int | None  # start time of that process, since pids are reused

    @property
    def orphaned(self) -> bool:
        return start_ticks(self.owner_pid) != self.owner_ticks


@contextmanager
def locked() -> Iterator[None]:
    """Lock for claiming slots and removing orphans, across processes."""
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    with (RUN_DIR / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def running_testbeds() -> list[Running]:
    """All running and orphaned testbeds."""
    found = []
    for path in sorted(RUN_DIR.glob("[0-9]*.json"), key=lambda path: int(path.stem)):
        try:
            found.append(Running.model_validate_json(path.read_text()))
        except (ValueError, OSError):  # written by another version, or just removed
            continue
    return found


def claim(scenario: Scenario, folder: Path) -> Running:
    """Claim a free slot while holding `locked`. Raises BadSetting if none is free."""
    slot = next((slot for slot in range(_MAX_SLOTS) if not _path(slot).exists()), None)
    if slot is None:
        raise BadSetting(setting="the testbed", reason=f"{_MAX_SLOTS} of them are up; end one first")
    owner = os.getpid()
    running = Running(slot=slot, scenario=scenario, folder=str(folder), owner_pid=owner, owner_ticks=start_ticks(owner))
    _path(running.slot).write_text(running.model_dump_json())
    return running


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it has ended, even if not yet reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


def _path(slot: int) -> Path:
    return RUN_DIR / f"{slot}.json"
