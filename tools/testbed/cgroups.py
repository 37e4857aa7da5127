"""CPU quota and memory limit of a device's processes, with cgroup v1 or v2."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hearth.errors import BadSetting
from tools.testbed.scenario import MIN_CPU_SHARE, Device, quota_and_period

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0  # to wait for the kernel to release a group
_UNIFIED = (_ROOT / "cgroup.controllers").exists()
_HIERARCHIES = (_ROOT,) if _UNIFIED else (_ROOT / "cpu", _ROOT / "memory")

# `ip netns exec` mounts a new /sys, which hides the cgroups, so an agent would take the whole machine's memory as its own.
# Mount them again, then exec the program.
MOUNT_AND_EXEC = (
    "mount -t cgroup2 none /sys/fs/cgroup; "
    if _UNIFIED
    else "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
    "mount -t cgroup -o memory none /sys/fs/cgroup/memory; "
) + 'exec "$@"'


def writable() -> bool:
    """Whether this process may create groups."""
    return all(os.access(hierarchy, os.W_OK) for hierarchy in _HIERARCHIES)


class DeviceCgroup:
    """The cgroups of one device."""

    def __init__(self, testbed: str, device: str) -> None:
        self._parents = [hierarchy / testbed for hierarchy in _HIERARCHIES]
        self._groups = [parent / device for parent in self._parents]

    def procs_files(self, memory_limited: bool) -> list[str]:
        """Files to which a process writes its pid to join; v2 has one group for both limits."""
        groups = self._groups if memory_limited else self._groups[:1]
        return [str(group / "cgroup.procs") for group in groups]

    def create(self, device: Device) -> None:
        """Create the groups with the device's limits. Raises BadSetting if the CPU or memory controller is missing."""
        try:
            if _UNIFIED:
                self._enable_controllers()
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
            (self._groups[0] / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._groups[0] / "cpu.cfs_period_us").write_text(str(period))
            (self._groups[0] / "cpu.cfs_quota_us").write_text(str(quota))

    def cpu_share(self) -> float:
        """The current CPU quota, in cores."""
        group = self._groups[0]
        if _UNIFIED:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period)

    def held_bytes(self) -> int:
        """Memory of the device's processes, without the page cache, which the kernel can reclaim."""
        rows = dict(line.split() for line in (self._groups[-1] / "memory.stat").read_text().splitlines())
        return int(rows["anon"] if _UNIFIED else rows["total_rss"])

    def times_out_of_memory(self) -> int:
        """Number of processes that the kernel has killed for the memory limit."""
        name = "memory.events" if _UNIFIED else "memory.oom_control"
        rows = dict(line.split() for line in (self._groups[-1] / name).read_text().splitlines())
        return int(rows.get("oom_kill", 0))

    def pids(self) -> list[int]:
        found: set[int] = set()
        for group in self._groups:
            try:
                found.update(map(int, (group / "cgroup.procs").read_text().split()))
            except OSError:
                continue
        return sorted(found)

    def remove(self) -> None:
        """Remove the groups. Retries, since the kernel releases a group some time after its last process has ended."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for group in self._groups:
            while not _removed(group) and time.monotonic() < deadline:
                time.sleep(0.02)
        for parent in self._parents:
            _removed(parent)  # fails while other devices are in it; the last one removes it

    def _limit_memory(self, memory_bytes: int) -> None:
        """Limit memory and forbid swap, so that the device runs out of memory instead of becoming slow."""
        group = self._groups[-1]
        if _UNIFIED:
            limits = {"memory.max": memory_bytes, "memory.swap.max": 0}
        else:
            limits = {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes}
        for name, limit in limits.items():
            if "sw" not in name or (group / name).exists():  # kernels without swap have no such file
                (group / name).write_text(str(limit))

    def _enable_controllers(self) -> None:
        for folder in (_ROOT, *self._parents):
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.subtree_control").write_text("+cpu +memory")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True
