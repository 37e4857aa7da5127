"""A running testbed: networks, cgroups, and the real programs in them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.errors import BadSetting, DeadlineExceeded, InternalError
from hearth.security import new_home_key, save_credential
from tools.testbed.cgroups import DeviceCgroup
from tools.testbed.network import Network
from tools.testbed.scenario import Device, Scenario

RUN_DIR = Path("/run/hearth-testbed")
_MAX_SLOTS = 32
_STOP_SECONDS = 5.0
_BIN = Path(sys.executable).parent
_HOST_RESERVE_BYTES = 512 << 20


class Running(BaseModel):
    """What is written down about a testbed, so that any later process can end it."""

    model_config = ConfigDict(frozen=True)

    slot: int
    scenario: Scenario
    folder: str
    owner_pid: int | None  # the process whose end is the testbed's end; none: until `down`
    owner_started: float | None

    @property
    def orphaned(self) -> bool:
        return self.owner_pid is not None and _started(self.owner_pid) != self.owner_started


class Testbed:
    """Build it, start programs in it, take it down. As a context manager nothing outlives it, whatever happens.

    Raises BadSetting: not root, a core that is not there, more memory than the machine has, a name that is in use.
    """

    __test__ = False  # not a test case, whatever pytest thinks

    def __init__(self, scenario: Scenario, folder: Path, owned: bool = True) -> None:
        check_possible(scenario)
        self.scenario = scenario
        self.folder = folder
        self.key = folder / "home.key"
        self._owned = owned
        self._processes: list[subprocess.Popen[bytes]] = []
        self._attach(_free_slot())

    @classmethod
    def attached(cls, running: Running) -> Testbed:
        """A testbed that `up` left running."""
        testbed = cls.__new__(cls)
        testbed.scenario = running.scenario
        testbed.folder = Path(running.folder)
        testbed.key = testbed.folder / "home.key"
        testbed._owned = False
        testbed._processes = []
        testbed._attach(running.slot)
        return testbed

    def _attach(self, slot: int) -> None:
        self.slot = slot
        self.prefix = f"ht{slot}"
        names = [device.name for device in self.scenario.devices]
        self.network = Network(self.prefix, slot, names)
        self._cgroups = {name: DeviceCgroup(f"hearth-{self.prefix}", name) for name in names}

    def __enter__(self) -> Testbed:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        RUN_DIR.mkdir(parents=True, exist_ok=True)
        owner = os.getpid() if self._owned else None
        running = Running(
            slot=self.slot,
            scenario=self.scenario,
            folder=str(self.folder),
            owner_pid=owner,
            owner_started=_started(owner) if owner else None,
        )
        _state_path(self.slot).write_text(running.model_dump_json())
        self.network.create({device.name: device.mbit for device in self.scenario.devices})
        for device in self.scenario.devices:
            self._cgroups[device.name].create(device, self.scenario.quota_period_ms)
        if not self.key.exists():
            save_credential(self.key, new_home_key())

    def down(self) -> None:
        """End every process of it, and remove every trace."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._kill_namespaces()
        for cgroup in self._cgroups.values():
            cgroup.remove()
        self.network.remove()
        _state_path(self.slot).unlink(missing_ok=True)

    # ---- devices --------------------------------------------------------------------------------------------------

    def device(self, name: str) -> Device:
        for device in self.scenario.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.scenario.devices)
        raise BadSetting(setting="device", reason=f"'{name}' is none of {known}")

    def address(self, name: str) -> str:
        return self.network.address(name)

    def set_mbit(self, mbit: float) -> None:
        """Every link to this rate."""
        for device in self.scenario.devices:
            self.network.set_mbit(device.name, mbit)

    def set_cpu_share(self, name: str, cpu_share: float) -> None:
        self._cgroups[name].set_cpu_share(cpu_share, self.scenario.quota_period_ms)

    def command(self, name: str, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.network.namespace(name), *arguments]

    def popen(
        self,
        name: str,
        *arguments: str,
        limited: bool = True,
        memory_limited: bool = True,
        environment: Mapping[str, str] = {},
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a device: in its namespace and, where `limited`, under its CPU limit.

        `memory_limited` adds the memory limit: a benchmark that keeps several plans loaded at once leaves it off.

        `ip netns exec` mounts /sys anew, so the cgroups are joined before it.
        """
        device = self.device(name)
        process = subprocess.Popen(
            self.command(name, *arguments),
            preexec_fn=_joining(device, self._cgroups[name].procs_files(memory_limited) if limited else []),
            env={**os.environ, **(device.environment if limited else {}), **environment},
            **options,
        )
        self._processes.append(process)
        return process

    # ---- the programs ---------------------------------------------------------------------------------------------

    def start_agents(self, *options: str) -> None:
        """The real `hearth-agent` on every device."""
        for device in self.scenario.devices:
            self.start_agent(device.name, *options)

    def start_agent(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        folder = self.folder / name
        return self._logged(
            name, f"{name}.log", True, str(_BIN / "hearth-agent"), "--name", name, "--key-path", str(self.key),
            "--state-dir", str(folder / "state"), "--store-dir", str(folder / "store"), "--bind-host",
            self.address(name), "--interface", self.address(name),
            "--threads", str(self.device(name).num_threads), *options,
        )  # fmt: skip

    def start_coordinator(self, *options: str) -> subprocess.Popen[bytes]:
        """`hearth serve` in its device's namespace; it shares that device's link, not its CPU quota (a PC beside it)."""
        name = self.scenario.coordinator_device
        return self._logged(
            name, "coordinator.log", False, str(_BIN / "hearth"), "serve", *options, "--key", str(self.key),
            "--state-dir", str(self.folder / "coordinator"), "--mdns-interfaces", self.address(name),
        )  # fmt: skip

    def hearth(self, *arguments: str, timeout_seconds: float = 300.0) -> str:
        """Run a `hearth` command beside the coordinator; its output. Raises InternalError with what it said."""
        name = self.scenario.coordinator_device
        done = subprocess.run(
            self.command(name, str(_BIN / "hearth"), *arguments, "--key", str(self.key)),
            capture_output=True, text=True, timeout=timeout_seconds, check=False,
            env={**os.environ, "HEARTH_COORDINATOR_STATE_DIR": str(self.folder / "coordinator")},
        )  # fmt: skip
        if done.returncode != 0:
            raise InternalError(where=f"hearth {arguments[0]}", reason=done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def _logged(self, device: str, log: str, limited: bool, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return self.popen(
                device, *arguments, limited=limited,
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=not self._owned,
            )  # fmt: skip

    def _kill_namespaces(self) -> None:
        """What runs in our namespaces outside the cgroups: the coordinator, commands of `run`."""
        for device in self.scenario.devices:
            found = subprocess.run(
                ["ip", "netns", "pids", self.network.namespace(device.name)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            for pid in map(int, found.stdout.split()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def check_possible(scenario: Scenario) -> None:
    """Raises BadSetting for what this machine cannot emulate."""
    if os.geteuid() != 0:
        raise BadSetting(setting="the testbed", reason="network namespaces and cgroups need root: run it with sudo")
    cores = os.sched_getaffinity(0)
    for device in scenario.devices:
        if device.core is not None and device.core not in cores:
            raise BadSetting(
                setting=f"scenario {scenario.name}, device {device.name}",
                reason=f"there is no core {device.core} here, only {', '.join(map(str, sorted(cores)))}",
            )
    by_core: dict[int | None, float] = {}
    for device in scenario.devices:
        by_core[device.core] = by_core.get(device.core, 0.0) + device.cpu_share
    crowded = [core for core, share in by_core.items() if core is not None and share > 1.0]
    if crowded or sum(by_core.values()) > len(cores):
        where = f"core {crowded[0]}" if crowded else "the machine"
        raise BadSetting(
            setting=f"scenario {scenario.name}",
            reason=f"its devices want more of {where} than there is: they would slow each other down",
        )
    wanted = sum(device.memory_bytes or 0 for device in scenario.devices)
    there = psutil.virtual_memory().available - _HOST_RESERVE_BYTES
    if wanted > there:
        raise BadSetting(
            setting=f"scenario {scenario.name}",
            reason=f"its devices have {wanted >> 20} MiB together, this machine has {there >> 20} MiB free",
        )


def running_testbeds() -> list[Running]:
    """Those that are up or were left behind."""
    found = []
    for path in sorted(RUN_DIR.glob("*.json")):
        try:
            found.append(Running.model_validate(json.loads(path.read_text())))
        except (ValidationError, ValueError, OSError):
            path.unlink(missing_ok=True)
    return found


def remove_orphans() -> None:
    """Take down the testbeds whose owner was killed."""
    for running in running_testbeds():
        if running.orphaned:
            Testbed.attached(running).down()
            shutil.rmtree(running.folder, ignore_errors=True)


def wait_until(what: str, probe: Callable[[], bool], seconds: float) -> None:
    """Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(action=what, seconds=seconds)
        time.sleep(0.05)


def _free_slot() -> int:
    remove_orphans()
    taken = {running.slot for running in running_testbeds()}
    free = [slot for slot in range(_MAX_SLOTS) if slot not in taken]
    if not free:
        raise BadSetting(setting="the testbed", reason=f"{_MAX_SLOTS} testbeds are up; take one down first")
    return free[0]


def _state_path(slot: int) -> Path:
    return RUN_DIR / f"{slot}.json"


def _started(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _joining(device: Device, procs_files: Sequence[str]) -> Callable[[], None]:
    """What the child does before it becomes the program: join the groups, take its core."""

    def join() -> None:
        for path in procs_files:
            stream: IO[str]
            with open(path, "w") as stream:
                stream.write(str(os.getpid()))
        if procs_files and device.core is not None:
            os.sched_setaffinity(0, {device.core})

    return join
