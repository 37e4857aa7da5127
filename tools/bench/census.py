"""What the processes of a home use: memory, descriptors, CPU time, sockets, disk and network, at one time."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from tools.testbed import Testbed


class ProcessUse(BaseModel):
    """What one process uses. `role`: the module or the program that it runs."""

    model_config = ConfigDict(frozen=True)

    device: str
    role: str
    pid: int
    cpu_seconds: float  # since its start
    resident_bytes: int
    proportional_bytes: int  # resident, with its part of pages that processes share
    descriptors: int
    threads: int


class Census(BaseModel):
    """All processes of a home, and what else it holds."""

    model_config = ConfigDict(frozen=True)

    seconds: float  # monotonic
    processes: tuple[ProcessUse, ...]
    sockets: int  # open TCP connections, each end counted
    store_bytes: int  # of all agents
    state_bytes: int  # of all agents and coordinators
    temporary_folders: int  # of this machine's Hearth processes, also of those outside of the testbed
    sent_bytes: dict[str, int]  # by device, since the testbed's start

    def of_role(self, role: str, figure: Callable[[ProcessUse], float]) -> list[float]:
        """A figure of each process with this role."""
        return [figure(process) for process in self.processes if process.role == role]

    @property
    def roles(self) -> list[str]:
        return sorted({process.role for process in self.processes})

    @property
    def descriptors(self) -> int:
        return sum(process.descriptors for process in self.processes)


def take_census(testbed: Testbed, seconds: float) -> Census:
    """Count a testbed's processes, except those of the benchmark. A process that ends meanwhile is left out."""
    names = [device.name for device in testbed.scenario.devices]
    found = [_use_of(name, pid) for name in names for pid in testbed.pids(name)]
    states = [testbed.folder / "coordinator", *(testbed.folder / name / "state" for name in names)]
    return Census(
        seconds=seconds,
        processes=tuple(process for process in found if process is not None),
        sockets=sum(testbed.network.num_connections(name) for name in names),
        store_bytes=sum(_num_bytes(testbed.folder / name / "store") for name in names),
        state_bytes=sum(map(_num_bytes, states)),
        temporary_folders=len(list(Path(tempfile.gettempdir()).glob("hearth-*"))),
        sent_bytes={name: testbed.network.sent_bytes(name) for name in names},
    )


def _use_of(device: str, pid: int) -> ProcessUse | None:
    try:
        process = psutil.Process(pid)
        role = role_of(process.cmdline())
        if not role:
            return None
        memory, times = process.memory_full_info(), process.cpu_times()
        return ProcessUse(
            device=device, role=role, pid=pid, cpu_seconds=times.user + times.system, resident_bytes=memory.rss,
            proportional_bytes=memory.pss, descriptors=process.num_fds(), threads=process.num_threads(),
        )  # fmt: skip
    except psutil.NoSuchProcess:
        return None


def role_of(command: Sequence[str]) -> str:
    """What a command line runs: "hearth-agent", "hearth serve" or a module; empty for the benchmark's own processes."""
    if "-m" in command[:-1]:
        start = list(command).index("-m") + 1
        module = command[start + 2] if command[start] == "hearth.platform.parent_death" else command[start]
        return "" if module.startswith("tools.") else module
    for index, part in enumerate(command):
        if (name := os.path.basename(part)) in ("hearth-agent", "hearth"):
            return " ".join([name, *command[index + 1 : index + 2]]) if name == "hearth" else name
    return ""


def growth(before: Census, after: Census) -> dict[str, tuple[float, float]]:
    """Figures that must not grow, before and after; memory of processes that live in both, by role and device."""
    figures: dict[str, tuple[float, float]] = {
        "descriptors": (before.descriptors, after.descriptors),
        "TCP connections, each end": (before.sockets, after.sockets),
        "temporary folders": (before.temporary_folders, after.temporary_folders),
    }
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for side, census in enumerate((before, after)):
        for process in census.processes:
            counts[process.role][side] += 1
    for role, (one, other) in sorted(counts.items()):
        figures[f"processes: {role}"] = (one, other)
    lived = {process.pid: process for process in before.processes}
    for process in after.processes:
        if (earlier := lived.get(process.pid)) is not None and earlier.role == process.role:
            of = f"{process.role} on {process.device}"
            figures[f"memory: {of}"] = (earlier.resident_bytes, process.resident_bytes)
    return figures


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.exists() else ():
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a temporary file
            continue
    return total
