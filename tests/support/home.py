"""A whole home on the loopback interface: real agents, a real coordinator, throw-away keys. Ended by pid."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from hearth.client import Home, connect
from hearth.errors import HearthError
from hearth.security import new_home_key, save_credential

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
_T = TypeVar("_T")


def wait_for(what: str, probe: Callable[[], _T | None], seconds: float = START_SECONDS) -> _T:
    """Poll until `probe` gives something; no luck involved, and never longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


class TestHome:
    """Start and kill its programs by name; everything is gone when the context ends."""

    __test__ = False

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.key = folder / "key"
        save_credential(self.key, new_home_key())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> TestHome:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start_agent(self, name: str, *options: str) -> None:
        self._start(
            name,
            "hearth-agent", "--name", name, "--key-path", str(self.key),
            "--state-dir", str(self.folder / name / "state"), "--store-dir", str(self.folder / name / "store"),
            "--interface", LOOPBACK, "--bind-host", LOOPBACK, "--control-port", "0", "--link-port", "0",
            "--data-ports", "0-0", "--threads", "1", *options,
        )  # fmt: skip

    def start_coordinator(self, *options: str, model: bool = True, name: str = "coordinator") -> None:
        arguments = [str(self.model_dir)] if model else []
        self._start(
            name,
            "hearth", "serve", *arguments, "--key", str(self.key), "--port", "0", "--name", name,
            "--state-dir", str(self.folder / name), "--mdns-interfaces", LOOPBACK, *options,
        )  # fmt: skip

    def connect(self, key: object = None, seconds: float = 30.0) -> Home:
        """A client of the coordinator, found over mDNS."""

        def attempt() -> Home | None:
            try:
                return connect(key=key or self.key, timeout_seconds=5.0, interfaces=[LOOPBACK])  # type: ignore[arg-type]
            except HearthError:
                return None

        return wait_for("a connection to the coordinator", attempt, seconds)

    def ready(self, seconds: float = START_SECONDS) -> Home:
        home = self.connect()
        try:
            home.wait_ready(seconds)
        except HearthError as error:
            home.close()
            raise AssertionError(f"{error}\n{self.log('coordinator')}") from None
        return home

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def worker_pid(self, agent: str) -> int | None:
        """The worker process of an agent, or None."""
        for child in psutil.Process(self.pid(agent)).children():
            if "agent.worker.process" in child.cmdline():
                return child.pid
        return None

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)
        self._processes[name].wait(10)

    def wait(self, name: str, seconds: float = 30.0) -> int:
        return self._processes[name].wait(seconds)

    def port(self, name: str) -> int:
        """The port that a program listens on, as its log says."""
        pattern = r"(?:control|listening on) port (\d+)"
        found = wait_for(f"the port of {name}", lambda: re.search(pattern, self.log(name)))
        return int(found[1])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        command = [str(Path(sys.executable).parent / program), *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
