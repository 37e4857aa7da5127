"""CPU quota and memory limit of a device's processes: cgroup v1 and v2, whichever this kernel runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hearth.errors import BadSetting
from tools.testbed.scenario import Device

_ROOT = Path("/sys/fs/cgroup")
_STOP_SECONDS = 5.0


class DeviceCgroup:
    """The groups of one device. `procs_files` are what a process writes its pid to in order to join."""

    def __init__(self, testbed: str, device: str) -> None:
        self._unified = (_ROOT / "cgroup.controllers").exists()
        hierarchies = (_ROOT,) if self._unified else (_ROOT / "cpu", _ROOT / "memory")
        self._parents = [hierarchy / testbed for hierarchy in hierarchies]
        self._groups = [parent / device for parent in self._parents]

    def procs_files(self, memory_limited: bool) -> list[str]:
        """Where a process writes its pid to join; v2 has one group for both limits."""
        groups = self._groups if memory_limited else self._groups[:1]
        return [str(group / "cgroup.procs") for group in groups]

    def create(self, device: Device, quota_period_ms: float) -> None:
        """Raises BadSetting when this kernel gives us no CPU or memory controller."""
        try:
            if self._unified:
                self._enable_controllers()
            for group in self._groups:
                group.mkdir(parents=True, exist_ok=True)
            self.set_cpu_share(device.cpu_share, quota_period_ms)
            if device.memory_bytes is not None:
                name = "memory.max" if self._unified else "memory.limit_in_bytes"
                (self._groups[-1] / name).write_text(str(device.memory_bytes))
        except OSError as error:
            raise BadSetting(
                setting="the testbed's cgroups",
                reason=f"{error.filename}: {error.strerror}; cgroups with the cpu and memory controllers are needed",
            ) from None

    def set_cpu_share(self, cpu_share: float, quota_period_ms: float) -> None:
        period = int(quota_period_ms * 1000)
        quota = int(cpu_share * period)
        if quota < 1000:
            raise BadSetting(
                setting="cpu_share",
                reason=f"{cpu_share} of {quota_period_ms} ms is {quota} us; the kernel refuses quotas under 1 ms: "
                f"raise quota_period_ms to {1 / cpu_share:.1f}",
            )
        if self._unified:
            (self._groups[0] / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._groups[0] / "cpu.cfs_period_us").write_text(str(period))
            (self._groups[0] / "cpu.cfs_quota_us").write_text(str(quota))

    def pids(self) -> list[int]:
        found: set[int] = set()
        for group in self._groups:
            try:
                found.update(map(int, (group / "cgroup.procs").read_text().split()))
            except (FileNotFoundError, OSError):
                continue
        return sorted(found)

    def remove(self) -> None:
        """End what still runs in the groups, and remove them."""
        deadline = time.monotonic() + _STOP_SECONDS
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
        for folder in (*self._groups, *self._parents):
            try:
                folder.rmdir()
            except OSError:  # a parent with other devices in it goes with the last of them
                pass

    def _enable_controllers(self) -> None:
        for folder in (_ROOT, *self._parents):
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.subtree_control").write_text("+cpu +memory")
