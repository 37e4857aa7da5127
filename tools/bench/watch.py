"""A testbed's agents and workers, and memory: peaks of processes, and samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
from typing_extensions import Self

from tools.testbed import Testbed

COORDINATOR_BYTES = 256 << 20  # target: most resident memory of the coordinator, independent of the model's size
_SAMPLE_SECONDS = 0.2  # interval of memory samples: shorter than a request, so that its peak is seen


def agent_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The agent process of a device, if it runs."""
    return with_argument(testbed.pids(device), "/hearth-agent")


def worker_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The worker process of a device, if there is one."""
    return with_argument(testbed.pids(device), "agent.worker.main")


def template_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The process from which a device's workers are forked, if there is one."""
    return with_argument(testbed.pids(device), "agent.worker.template")


def worker_peaks(testbed: Testbed, devices: Iterable[str]) -> list[int]:
    """Peak resident memory of each device's worker in bytes; 0 if there is none."""
    workers = [worker_of(testbed, device) for device in devices]
    return [peak_bytes(worker.pid) if worker else 0 for worker in workers]


def with_argument(pids: Iterable[int], end: str) -> psutil.Process | None:
    """The first of these processes that has an argument with this end, if one does."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if any(part.endswith(end) for part in process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


class MemoryWatch:
    """Samples memory until the end of the block. `probes`: by name, functions that return bytes."""

    def __init__(self, probes: Mapping[str, Callable[[], int]]) -> None:
        self._probes = probes
        self.peak = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> dict[str, int]:
        return {name: probe() for name, probe in self._probes.items()}

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            for name, num_bytes in self.now().items():
                self.peak[name] = max(self.peak[name], num_bytes)
