"""What this device is and how it is now. Sampled only when asked: an idle daemon reads nothing."""

from __future__ import annotations

import hashlib
import platform
import shutil
from pathlib import Path

import psutil

from agent.config import AgentSettings
from agent.gpu import GpuReader
from hearth.messages import Telemetry

_RESERVE_SHARE = 0.10  # of all memory, kept for the rest of the system when the user sets no limit
_RESERVE_BYTES = 256 << 20


class TelemetryReader:
    """`root` stands for the file system's root, so that a test can show another machine's."""

    def __init__(self, settings: AgentSettings, gpu: GpuReader, root: Path = Path("/")) -> None:
        self._settings = settings
        self._gpu = gpu
        self._root = root
        self._cpu_model = cpu_model(root)
        self._num_cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1

    def read(self, now: float) -> Telemetry:
        """One sample; `now` is the wall clock in Unix seconds."""
        total, available = memory(self._root)
        frequency = _frequency()
        gpu = self._gpu.read()
        budget_from = available
        if self._gpu.compute_device == "cuda" and gpu is not None and gpu.kind == "cuda":
            budget_from = total = gpu.memory_free_bytes
        return Telemetry(
            host_id=host_id(self._root),
            cpu_model=self._cpu_model[:256],
            num_cores=self._num_cores,
            load_1min=psutil.getloadavg()[0],
            frequency_mhz=frequency,
            memory_total_bytes=memory(self._root)[0],
            memory_available_bytes=available,
            memory_budget_bytes=memory_budget(
                total, budget_from, self._settings.memory_bytes, self._settings.memory_percent
            ),
            disk_free_bytes=shutil.disk_usage(self._settings.store_dir).free,
            temperature_celsius=temperature(self._root),
            gpu=gpu,
            num_threads=self._settings.threads or self._num_cores,
            compute_device=self._gpu.compute_device,
            clock_unix_seconds=now,
            python_version=platform.python_version(),
        )


def memory_budget(total: int, available: int, limit_bytes: int | None, limit_percent: float | None) -> int:
    """What a worker may hold: the user's limit where there is one, else what is free less a reserve.

    The user's limit wins even over what is free just now: it is a promise, and other programs come and go.
    """
    limits = [limit for limit in (limit_bytes, int(total * limit_percent / 100) if limit_percent else None) if limit]
    if limits:
        return min(limits)
    return max(available - max(int(total * _RESERVE_SHARE), _RESERVE_BYTES), 0)


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available bytes, no more than this process's cgroup allows (v1 and v2)."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
        *_own_cgroup(root),
    ):
        limit, usage = _number(root / limit_file), _number(root / usage_file)
        if limit is not None and 0 < limit < total:
            total = limit
            available = min(available, max(limit - (usage or 0), 0))
    return total, available


def _own_cgroup(root: Path) -> list[tuple[str, str]]:
    """The limit files of the cgroup this process is in."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = f"sys/fs/cgroup{path}"
            found.append((f"{base}/memory.max", f"{base}/memory.current"))
        elif "memory" in controllers.split(","):
            base = f"sys/fs/cgroup/memory{path}"
            found.append((f"{base}/memory.limit_in_bytes", f"{base}/memory.usage_in_bytes"))
    return found


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name; on ARM boards, where it has none, the board's."""
    try:
        for line in (root / "proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    try:
        return (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        return platform.processor() or platform.machine()


def temperature(root: Path = Path("/")) -> float | None:
    """The hottest zone in degrees Celsius, or None where the system does not tell."""
    readings = [
        millidegrees / 1000
        for zone in (root / "sys/class/thermal").glob("thermal_zone*/temp")
        if (millidegrees := _number(zone)) is not None and -40_000 < millidegrees < 150_000
    ]
    return max(readings, default=None)


def host_id(root: Path = Path("/")) -> str:
    """The same for all agents on one machine; a hash, since the machine-id itself is private."""
    try:
        machine = (root / "etc/machine-id").read_text().strip()
    except OSError:
        machine = platform.node()
    return hashlib.sha256(f"hearth host {machine}".encode()).hexdigest()[:16]


def _frequency() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return frequency.current if frequency else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
