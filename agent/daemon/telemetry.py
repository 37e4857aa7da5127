"""The device's properties and current state, read only on request, so that an idle daemon uses no CPU for it."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from agent.daemon.config import AgentSettings
from agent.daemon.gpu import GpuReader
from hearth.platform.confine import confinement
from hearth.platform.machine import host_id
from hearth.wire.messages import Telemetry

_RESERVE_SHARE = 0.10  # fraction of all memory that is kept for the rest of the system if the user sets no limit
_RESERVE_BYTES = 256 << 20  # minimum of that reserve: enough for the system of a small board


class TelemetryReader:
    """Reads telemetry. `root` is the root of the file system, which tests replace by that of another machine."""

    def __init__(self, settings: AgentSettings, gpu: GpuReader, root: Path = Path("/")) -> None:
        self._settings = settings
        self._gpu = gpu
        self._root = root
        self._cpu_model = cpu_model(root)
        self.read_disk()
        self._num_cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
        known_ports = settings.data_ports != (0, 0)  # to workers at any port, others connect without a limit
        self._confined = " ".join(each for each in confinement() if known_ports or each != "network")
        psutil.cpu_percent()  # the first reading is measured from here on

    def read_disk(self) -> None:
        """Read how full the disk is, for the next `read`, which asks no disk."""
        self._disk_free_bytes = disk_free(self._settings.store_dir)

    def read(self, now: float, idle: bool = False) -> Telemetry:
        """Read the current state; `now` is the wall clock in Unix seconds. `idle`: there are no workers on this device."""
        total, available = memory(self._root)
        frequency = _frequency()
        gpu = self._gpu.read(idle)
        budget_total, budget_available = total, available
        if self._gpu.compute_device == "cuda" and gpu is not None and gpu.kind == "cuda":
            budget_total, budget_available = gpu.memory_total_bytes, gpu.memory_free_bytes
        return Telemetry(
            host_id=host_id(self._root),
            cpu_model=self._cpu_model[:256],
            num_cores=self._num_cores,
            load_1min=psutil.getloadavg()[0],
            frequency_mhz=frequency,
            memory_total_bytes=total,
            memory_available_bytes=available,
            memory_budget_bytes=memory_budget(
                budget_total, budget_available, self._settings.memory_bytes, self._memory_percent()
            ),
            disk_free_bytes=self._disk_free_bytes,
            temperature_celsius=temperature(self._root),
            gpu=gpu,
            gpu_problem=self._gpu.problem,
            num_threads=num_threads(self._num_cores, self._settings.threads, self._settings.percent),
            compute_device=self._gpu.compute_device,
            clock_unix_seconds=now,
            python_version=platform.python_version(),
            cpu_load=psutil.cpu_percent() / 100,
            confined=self._confined,
        )

    @property
    def budget_is_limit(self) -> bool:
        """Whether the memory budget is the user's limit, whatever the workers hold."""
        return self._settings.memory_bytes is not None or self._memory_percent() is not None

    def has_room(self, num_bytes: int) -> bool:
        """Whether that much main memory is free, without the reserve for the rest of the system."""
        return num_bytes <= self.free_memory_bytes()

    def free_memory_bytes(self) -> int:
        """Free main memory, without the reserve for the rest of the system. The page cache counts as free."""
        return memory_budget(*memory(self._root), None, None)

    def _memory_percent(self) -> float | None:
        """The memory limit in per cent. `percent` also limits memory unless a memory limit is set."""
        explicit_limit = self._settings.memory_bytes or self._settings.memory_percent
        return self._settings.memory_percent if explicit_limit else self._settings.percent


def num_threads(num_cores: int, threads: int | None, percent: float | None) -> int:
    """Number of compute threads of a worker: the user's `threads`, else `percent` of the cores, at least one."""
    if threads is not None:
        return threads
    return max(1, int(num_cores * percent / 100)) if percent is not None else num_cores


def memory_budget(total: int, available: int, limit_bytes: int | None, limit_percent: float | None) -> int:
    """Memory limit of a worker in bytes: the user's limit, else the available memory less a reserve.

    The user's limit applies even if less memory is available at the moment, because other programs come and go. The result
    is never more than the total memory.
    """
    limits = [limit for limit in (limit_bytes, int(total * limit_percent / 100) if limit_percent else None) if limit]
    if limits:
        return min(total, *limits)
    return max(available - max(int(total * _RESERVE_SHARE), _RESERVE_BYTES), 0)


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available memory in bytes, within the limits of this process's cgroups (v1 and v2).

    A cgroup's page cache counts as available, as in the kernel's MemAvailable, since it can be reclaimed. Otherwise a daemon
    that has just stored a model's chunks would report no memory for the model.
    """
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for cgroup, limit_name, usage_name, prefix in _cgroups(root):
        limit = _read_int(cgroup / limit_name)
        if limit is not None and 0 < limit < host.total:
            used = max((_read_int(cgroup / usage_name) or 0) - _page_cache(cgroup, prefix), 0)
            total = min(total, limit)
            available = min(available, max(limit - used, 0))
    return total, available


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """All cgroups that contain this process, up to the root; the limit of each applies.

    With each: the file names of its limit and its usage, and the prefix of statistics that include its children.
    """
    mount = root / "sys/fs/cgroup"
    v2 = ("memory.max", "memory.current", "")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    yield (mount, *v2)
    yield (mount / "memory", *v1)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), 0, -1):
            if controllers == "":
                yield (mount.joinpath(*names[:depth]), *v2)
            elif "memory" in controllers.split(","):
                yield (mount.joinpath("memory", *names[:depth]), *v1)


def _page_cache(cgroup: Path, prefix: str) -> int:
    """Bytes of the page cache of a cgroup and its children."""
    try:
        rows = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(rows[f"{prefix}inactive_file"]) + int(rows[f"{prefix}active_file"])
    except (OSError, ValueError, KeyError):
        return 0


def disk_free(path: Path) -> int:
    """Free bytes on the disk of `path`, or of its nearest existing parent if it was deleted."""
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(nearest).free


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name, or the board's name on ARM boards whose processor has none."""
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
    """Temperature of the hottest thermal zone in degrees Celsius, or None if none is reported."""
    readings = [
        millidegrees / 1000
        for zone in (root / "sys/class/thermal").glob("thermal_zone*/temp")
        if (millidegrees := _read_int(zone)) is not None and -40_000 < millidegrees < 150_000
    ]
    return max(readings, default=None)


def _frequency() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return frequency.current if frequency else None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
