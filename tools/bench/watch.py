"""Memory of a testbed's processes: current, peak since the watch began, and lifetime peak."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from tools.testbed import Testbed

_SAMPLE_SECONDS = 0.25  # interval of memory samples


def agent_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The agent process of a device, if it runs."""
    for pid in testbed.pids(device):
        try:
            process = psutil.Process(pid)
            if any(part.endswith("/hearth-agent") for part in process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def worker_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The worker process of a device, if there is one."""
    agent = agent_of(testbed, device)
    for child in agent.children() if agent else []:
        try:
            if "agent.worker.main" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def peak_bytes(process: psutil.Process) -> int:
    """Peak resident memory of a process; 0 if it has ended."""
    return _of_status(process.pid, "VmHWM")


def resident_bytes(process: psutil.Process) -> int:
    return _of_status(process.pid, "VmRSS")


def _of_status(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


class MemoryWatch:
    """Samples the memory of processes, by name, until the end of the block."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self.start = {name: resident_bytes(process) for name, process in processes.items()}
        self.peak = dict(self.start)
        self._processes = dict(processes)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> dict[str, int]:
        return {name: resident_bytes(process) for name, process in self._processes.items()}

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for name, num_bytes in self.now().items():
                self.peak[name] = max(self.peak[name], num_bytes)
