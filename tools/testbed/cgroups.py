"""CPU quota and memory limit of a device's processes, with cgroup v1 or v2."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from hearth.errors import BadSetting
from tools.testbed.scenario import MIN_CPU_SHARE, EmulatedDevice, quota_and_period

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0  # to wait for the kernel to release a group
_UNIFIED = (_ROOT / "cgroup.controllers").exists()
HIERARCHIES = (_ROOT,) if _UNIFIED else (_ROOT / "cpu", _ROOT / "memory")

# `ip netns exec` mounts a new /sys, which hides the cgroups, so an agent would take the whole machine's memory as its own.
# Mount them again, then exec the program.
MOUNT_AND_EXEC = (
    "mount -t cgroup2 none /sys/fs/cgroup; "
    if _UNIFIED
    else "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
    "mount -t cgroup -o memory none /sys/fs/cgroup/memory; "
) + 'exec "$@"'


class DeviceCgroup:
    """The cgroups of one device: with v2 one for both limits."""

    def __init__(self, testbed: str, device: str) -> None:
        self._groups = [hierarchy / testbed / device for hierarchy in HIERARCHIES]
        self._cpu, self._memory = self._groups[0], self._groups[-1]

    def procs_files(self, memory_limited: bool) -> list[Path]:
        """Files to which a process writes its pid to join."""
        return [group / "cgroup.procs" for group in self._groups if memory_limited or group == self._cpu]

    def create(self, device: EmulatedDevice) -> None:
        """Create the groups with the device's limits. Raises BadSetting if the CPU or memory controller is missing."""
        try:
            for folder in (_ROOT, self._cpu.parent) if _UNIFIED else ():
                folder.mkdir(exist_ok=True)
                (folder / "cgroup.subtree_control").write_text("+cpu +memory")
            for group in self._groups:
                group.mkdir(parents=True, exist_ok=True)
            self.set_cpu_share(device.cpu_share)
            if device.memory_bytes is not None:
                self._limit_memory(device.memory_bytes)
        except OSError as error:
            raise BadSetting(
                setting="the testbed's cgroups",
                reason=f"{error.filename}: {error.strerror}; cgroups with the cpu and memory controllers are needed",
            ) from None

    def set_cpu_share(self, cpu_share: float) -> None:
        """Change the CPU quota. Raises BadSetting for less than the kernel supports."""
        if cpu_share < MIN_CPU_SHARE:
            raise BadSetting(setting="cpu_share", reason=f"{cpu_share:g} of a core; the minimum is {MIN_CPU_SHARE}")
        quota, period = quota_and_period(cpu_share)
        if _UNIFIED:
            (self._cpu / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._cpu / "cpu.cfs_period_us").write_text(str(period))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(quota))

    def cpu_share(self) -> float:
        """The current CPU quota, in cores."""
        names = ("cpu.max",) if _UNIFIED else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = " ".join((self._cpu / name).read_text() for name in names).split()
        return int(quota) / int(period)

    def held_bytes(self) -> int:
        """Memory of the device's memory-limited processes, without the page cache, which the kernel can reclaim."""
        return self._memory_figures("memory.stat")["anon" if _UNIFIED else "total_rss"]

    def times_out_of_memory(self) -> int:
        """Number of the device's processes that the kernel has killed for the memory limit."""
        return self._memory_figures("memory.events" if _UNIFIED else "memory.oom_control").get("oom_kill", 0)

    def pids(self) -> list[int]:
        found: set[int] = set()
        for file in self.procs_files(memory_limited=True):
            with suppress(OSError):
                found.update(map(int, file.read_text().split()))
        return sorted(found)

    def remove(self) -> None:
        """Remove the groups. Retries, since the kernel releases a group some time after its last process has ended."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for group in self._groups:
            while not _removed(group) and time.monotonic() < deadline:
                time.sleep(0.02)
            _removed(group.parent)  # fails while other devices are in it; the last one removes it

    def _memory_figures(self, name: str) -> dict[str, int]:
        lines = (self._memory / name).read_text().splitlines()
        return {key: int(value) for key, value in map(str.split, lines)}

    def _limit_memory(self, memory_bytes: int) -> None:
        """Limit memory and forbid swap, so that the device runs out of memory instead of becoming slow."""
        if _UNIFIED:
            limits = {"memory.max": memory_bytes, "memory.swap.max": 0}
        else:
            limits = {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes}
        for name, limit in limits.items():
            if "sw" not in name or (self._memory / name).exists():  # kernels without swap have no such file
                (self._memory / name).write_text(str(limit))


def _removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()
