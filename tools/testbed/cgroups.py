"""CPU quota and memory limit of a device's processes: cgroup v1 and v2, whichever this kernel runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hearth.errors import BadSetting
from tools.testbed.scenario import MIN_CPU_SHARE, Device, quota_and_period

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0
_UNIFIED = (_ROOT / "cgroup.controllers").exists()
_HIERARCHIES = (_ROOT,) if _UNIFIED else (_ROOT / "cpu", _ROOT / "memory")

# `ip netns exec` mounts a new /sys, and so hides the cgroups from what it starts: without them an agent sees the whole
# machine's memory as its own. They are mounted again, and then the program takes the shell's place.
MOUNT_AND_EXEC = (
    "mount -t cgroup2 none /sys/fs/cgroup; "
    if _UNIFIED
    else "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
    "mount -t cgroup -o memory none /sys/fs/cgroup/memory; "
) + 'exec "$@"'


def writable() -> bool:
    """Whether groups can be made here."""
    return all(os.access(hierarchy, os.W_OK) for hierarchy in _HIERARCHIES)


class DeviceCgroup:
    """The groups of one device. `procs_files` are what a process writes its pid to in order to join."""

    def __init__(self, testbed: str, device: str) -> None:
        self._parents = [hierarchy / testbed for hierarchy in _HIERARCHIES]
        self._groups = [parent / device for parent in self._parents]

    def procs_files(self, memory_limited: bool) -> list[str]:
        """Where a process writes its pid to join; v2 has one group for both limits."""
        groups = self._groups if memory_limited else self._groups[:1]
        return [str(group / "cgroup.procs") for group in groups]

    def create(self, device: Device) -> None:
        """Raises BadSetting when this kernel gives us no CPU or memory controller."""
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
        """Takes effect at once. Raises BadSetting for less than the kernel can give."""
        if cpu_share < MIN_CPU_SHARE:
            raise BadSetting(setting="cpu_share", reason=f"{cpu_share:g} of a core; the least is {MIN_CPU_SHARE}")
        quota, period = quota_and_period(cpu_share)
        if _UNIFIED:
            (self._groups[0] / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._groups[0] / "cpu.cfs_period_us").write_text(str(period))
            (self._groups[0] / "cpu.cfs_quota_us").write_text(str(quota))

    def cpu_share(self) -> float:
        """What the kernel holds the device to now, in cores."""
        group = self._groups[0]
        if _UNIFIED:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period)

    def held_bytes(self) -> int:
        """What its processes hold now, less the page cache, which they would give back."""
        rows = dict(line.split() for line in (self._groups[-1] / "memory.stat").read_text().splitlines())
        return int(rows["anon"] if _UNIFIED else rows["total_rss"])

    def times_out_of_memory(self) -> int:
        """How often the kernel killed one of its processes, since it was made."""
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
        """Remove the groups; the kernel takes a moment to let go of those whose last process has just ended."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for group in self._groups:
            while not _removed(group) and time.monotonic() < deadline:
                time.sleep(0.02)
        for parent in self._parents:
            _removed(parent)  # with other devices in it, it goes with the last of them

    def _limit_memory(self, memory_bytes: int) -> None:
        """And no swap beyond it: the device is out of memory when it is, rather than slow."""
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
