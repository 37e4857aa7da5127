"""A whole home on the loopback interface: real agents, a real coordinator, temporary keys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from support import file_calls
from support.profiles import MeasuredProfiles
from support.waiting import WAIT_LIMIT_SECONDS, wait_for

from agent.daemon.identity import load_identity
from hearth.client.sync import Home, connect
from hearth.errors import HearthError
from hearth.platform.security import Credential, new_home_key, save_credential

LOOPBACK = "127.0.0.1"
# Tests set the number of devices that a plan waits for; no others appear.
_SETTLE_SECONDS = "0.2"
_IN_PROCESSES = Path(__file__).parent / "in_processes"


class TestHome:
    """Start and kill its programs by name; everything is gone when the context ends.

    With `profiles`, coordinators find a profile of every device in their caches. Without, they measure the devices.
    """

    __test__ = False

    def __init__(self, folder: Path, model_dir: Path, profiles: MeasuredProfiles | None = None) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self._profiles = profiles
        self.key = folder / "key"
        save_credential(self.key, new_home_key())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._device_ids: dict[str, str] = {}  # by agent
        self._served: dict[tuple[Path, Path, tuple[str, ...]], None] = {}  # cache of profiles, model, options
        self._began: dict[str, int] = {}  # by program: offset in its log of the current run

    def __enter__(self) -> TestHome:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lines = {line for name in self._processes for line in self.log(name).splitlines() if file_calls.MARK in line}
        assert not lines or kind is not None, "\n".join(sorted(lines))

    def start_agent(self, name: str, *options: str) -> None:
        with load_identity(self.folder / name / "state") as identity:  # made here, as its profile must be there first
            self._device_ids[name] = identity.device_id
        for cache_dir, model, options_of_serve in self._served:
            self._copy_profiles(cache_dir, model, options_of_serve)
        self._start(
            name,
            "hearth-agent", "--name", name, "--key-path", str(self.key),
            "--state-dir", str(self.folder / name / "state"), "--store-dir", str(self.folder / name / "store"),
            "--interface", LOOPBACK, "--bind-host", LOOPBACK, "--control-port", "0", "--link-port", "0",
            "--data-ports", "0-0", "--threads", "1", *options,
        )  # fmt: skip

    def have_agents(self, names: Iterable[str]) -> None:
        """Start those of these agents that do not run, and stop all others."""
        for name in self._device_ids.keys() - set(names):
            self.stop(name)
        for name in names:
            if not self.runs(name):
                self.start_agent(name)

    def start_coordinator(self, *options: str, model: Path | bool = True, name: str = "coordinator") -> None:
        """Start it again if it runs. `model`: True is the home's; with False, it serves what it served before."""
        if self.runs(name):
            self.stop(name, 60.0)
        served = self.model_dir if model is True else model
        if served:
            self.add_profiles(served, *options, name=name)
        arguments = [str(served)] if served else []
        self._start(
            name,
            "hearth", "serve", *arguments, "--key", str(self.key), "--port", "0", "--name", name,
            "--state-dir", str(self.folder / name), "--mdns-interfaces", LOOPBACK, *options,
        )  # fmt: skip

    def start_gateway(self, *options: str, name: str = "gateway") -> None:
        """An HTTP gateway of the running coordinator, on any free port."""
        self._start(
            name, "hearth", "gateway", "--key", str(self.key), "--port", "0",
            "--address", f"{LOOPBACK}:{self.port('coordinator')}", *options,
        )  # fmt: skip

    def connect(self, key: Credential | None = None, seconds: float = 30.0, found: bool = False) -> Home:
        """A client of the coordinator: at its address, or `found` over mDNS, which takes a second longer."""
        address = None if found else f"{LOOPBACK}:{self.port('coordinator')}"

        def attempt() -> Home | None:
            try:
                return connect(address, key=key or self.key, timeout_seconds=15.0, interfaces=[LOOPBACK])
            except HearthError:
                return None

        return wait_for("a connection to the coordinator", attempt, seconds)

    def ready(self, seconds: float = WAIT_LIMIT_SECONDS) -> Home:
        home = self.connect()
        try:
            home.wait_ready(seconds)
        except HearthError as error:
            home.close()
            raise AssertionError(f"{error}\n{self.log('coordinator')}") from None
        return home

    def run(
        self, *arguments: str, said: str = "", name: str = "coordinator", check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `hearth` against the running coordinator. `said`: its standard input."""
        connection = () if arguments[0] == "serve" else ("--address", f"{LOOPBACK}:{self.port(name)}")
        return subprocess.run(
            [str(Path(sys.executable).parent / "hearth"), *arguments, "--key", str(self.key), *connection],
            input=said, capture_output=True, text=True, timeout=WAIT_LIMIT_SECONDS, check=check,
        )  # fmt: skip

    @contextmanager
    def serving(self, names: Iterable[str], *options: str, model: Path | bool = True) -> Iterator[Home]:
        """A client of the home while it has these agents, which stay, and a coordinator with these options, which ends."""
        self.have_agents(names)
        self.start_coordinator(*options, model=model)
        try:
            with self.ready() as home:
                yield home
        finally:
            self.stop("coordinator", 60.0)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def worker_pid(self, agent: str) -> int | None:
        """The worker process of an agent, or None."""
        for child in psutil.Process(self.pid(agent)).children(recursive=True):
            try:
                if "agent.worker.main" in child.cmdline():
                    return child.pid
            except psutil.NoSuchProcess:  # a profiler that has just exited
                continue
        return None

    def runs(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)
        self._processes[name].wait(30)

    def stop(self, name: str, seconds: float = 30.0) -> int:
        """Ask a program to end, and return its exit status."""
        self._processes[name].terminate()
        return self.wait(name, seconds)

    def wait(self, name: str, seconds: float = 30.0) -> int:
        return self._processes[name].wait(seconds)

    def port(self, name: str, http: bool = False) -> int:
        """The port that a program listens on, according to its log; after a restart, the new one."""
        pattern = r"listening on https?://\S+:(\d+)" if http else r"(?:control|listening on) port (\d+)"

        def found() -> list[str]:
            output = self.log_of_run(name)
            ended = self._processes[name].poll()
            ports = re.findall(pattern, output)
            assert ports or ended is None, f"{name} ended with {ended}: {output}"
            return ports

        return int(wait_for(f"the port of {name}", found)[-1])

    def log(self, name: str) -> str:
        """A program's log, including runs before a restart."""
        return self._log_bytes(name).decode(errors="replace")

    def log_of_run(self, name: str) -> str:
        """A program's log since its last start."""
        return self._log_bytes(name)[self._began.get(name, 0) :].decode(errors="replace")

    def _log_bytes(self, name: str) -> bytes:
        return (self.folder / f"{name}.log").read_bytes()

    def add_profiles(self, model: Path, *options: str, name: str = "coordinator") -> None:
        """Have a coordinator find the profiles of this model for all devices in its cache, unless it is to measure them."""
        served = (self.folder / name / "profiles", model, options)
        self._served[served] = None
        self._copy_profiles(*served)

    def _copy_profiles(self, cache_dir: Path, model: Path, options: tuple[str, ...]) -> None:
        if self._profiles is not None:
            self._profiles.copy_to(cache_dir, model, self._device_ids.values(), *options)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        command = [str(Path(sys.executable).parent / program), *arguments]
        watched = os.pathsep.join(filter(None, [str(_IN_PROCESSES), os.environ.get("PYTHONPATH")]))
        environ = {"HEARTH_COORDINATOR_SETTLE_SECONDS": _SETTLE_SECONDS, **os.environ, "PYTHONPATH": watched}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._began[name] = log.tell()
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ
            )


def plan_of(client: Home) -> Any:
    """The plan that the home serves."""
    plan = client.status().plan
    assert plan is not None
    return plan


def plan_devices(client: Home) -> list[str]:
    """The names of its devices, by rank; none while there is no plan."""
    plan = client.status().plan
    return [device.name for device in plan.devices] if plan is not None else []


@contextmanager
def home_of(
    names: Sequence[str], folder: Path, model_dir: Path, profiles: MeasuredProfiles | None, *options: str
) -> Iterator[TestHome]:
    """Agents with these names, and a coordinator that waits for all of them. `options`: of `hearth serve`."""
    with TestHome(folder, model_dir, profiles) as home:
        for name in names:
            home.start_agent(name)
        home.start_coordinator("--min-devices", str(len(names)), *options)
        yield home
