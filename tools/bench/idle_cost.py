"""Kind `idle-cost`: what a home costs while nobody asks: CPU time, memory, disk and traffic, by program."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import Field

from hearth.platform.units import format_bytes
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_home import LOADS, LoadName, served_home
from tools.bench.results import Record, Summary, Table
from tools.testbed import Testbed

_SETTLE_SECONDS = 20.0  # from a served home to the first count: plans and weights for later have been made


class ProcessUse(Record):
    """What one process uses. `role`: the module or the program that it runs."""

    device: str
    role: str
    pid: int
    cpu_seconds: float  # since its start
    proportional_bytes: int  # resident memory, with its part of pages that processes share


class Census(Record):
    """All processes of a home, and what else it holds."""

    seconds: float  # monotonic
    processes: tuple[ProcessUse, ...]
    store_bytes: int  # of all agents
    sent_bytes: dict[str, int]  # by device, since the testbed's start

    def of_role(self, role: str) -> list[ProcessUse]:
        return [process for process in self.processes if process.role == role]


class IdleRow(Record):
    """A home at the beginning and at the end of a time without requests."""

    load: str  # whose model is served
    model_bytes: int  # of its files
    before: Census
    after: Census

    @property
    def minutes(self) -> float:
        return (self.after.seconds - self.before.seconds) / 60

    def cpu_seconds(self, role: str) -> float:
        """CPU seconds per minute of the processes with a role, in the mean."""
        earlier = {process.pid: process.cpu_seconds for process in self.before.processes}
        used = [use.cpu_seconds - earlier[use.pid] for use in self.after.of_role(role) if use.pid in earlier]
        return statistics.mean(used) / self.minutes if used else 0.0


class IdleCost(Experiment[IdleRow]):
    """A home without requests for `minutes`, for each model."""

    loads: tuple[LoadName, ...] = LOADS
    minutes: float = Field(2.0, gt=0)
    devices: int = Field(4, ge=2, le=8)

    def measure(self, context: Context) -> Iterator[IdleRow]:
        for load in self.loads:
            with served_home([load], context, self.devices) as home:
                context.report(f"{load}: idle")
                time.sleep(_SETTLE_SECONDS)
                before = take_census(home.testbed, time.monotonic())
                time.sleep(self.minutes * 60)
                after = take_census(home.testbed, time.monotonic())
                yield IdleRow(load=load, model_bytes=home.model_bytes, before=before, after=after)

    def summary(self, rows: Sequence[IdleRow]) -> Summary:
        return Summary(tables=tuple(table for row in rows for table in _tables(row)))


def _tables(row: IdleRow) -> Iterator[Table]:
    after = row.after
    columns: Mapping[str, Callable[[str], object]] = {
        "program": lambda role: role,
        "processes": lambda role: len(after.of_role(role)),
        "CPU seconds a minute, mean": lambda role: f"{row.cpu_seconds(role):.2f} s",
        "memory (PSS), most": lambda role: format_bytes(max(use.proportional_bytes for use in after.of_role(role))),
    }
    roles = sorted({process.role for process in after.processes})
    yield Table.of_columns(f"Idle home that serves the model of: {row.load}", columns, roles)
    sent = {name: (num - row.before.sent_bytes[name]) / row.minutes for name, num in after.sent_bytes.items()}
    stored = f"{format_bytes(after.store_bytes)} ({after.store_bytes / max(row.model_bytes, 1):.2f} x the model)"
    figures = [(f"sent by {name} in a minute", format_bytes(num)) for name, num in sent.items()]
    figures.append(("stores, all devices", stored))
    yield Table.of(f"Idle home, {row.load}: traffic and disk", ("figure", "measured"), figures)


# ---- counting --------------------------------------------------------------------------------------------------------


def take_census(testbed: Testbed, seconds: float) -> Census:
    """Count a testbed's processes, except those of the benchmark. A process that ends meanwhile is left out."""
    names = [device.name for device in testbed.scenario.devices]
    found = [_use_of(name, pid) for name in names for pid in testbed.pids(name)]
    return Census(
        seconds=seconds,
        processes=tuple(process for process in found if process is not None),
        store_bytes=sum(_num_bytes(testbed.folder / name / "store") for name in names),
        sent_bytes={name: testbed.network.sent_bytes(name) for name in names},
    )


def _use_of(device: str, pid: int) -> ProcessUse | None:
    try:
        process = psutil.Process(pid)
        role, seconds, used = role_of(process.cmdline()), process.cpu_times(), process.memory_full_info()
    except psutil.NoSuchProcess:
        return None
    cpu_seconds = seconds.user + seconds.system
    use = ProcessUse(device=device, role=role, pid=pid, cpu_seconds=cpu_seconds, proportional_bytes=used.pss)
    return use if role else None


def role_of(command: Sequence[str]) -> str:
    """The program of a command line: "hearth-agent", "hearth serve", a module, or "--spare", an idle planner process.

    Empty for the benchmark's own processes.
    """
    if "-m" in command[:-1]:
        start = list(command).index("-m") + 1
        module = command[start + 2] if command[start] == "hearth.platform.child_main" else command[start]
        return "" if module.startswith("tools.") else module
    for index, part in enumerate(command):
        if (name := os.path.basename(part)) in ("hearth-agent", "hearth"):
            return " ".join([name, *command[index + 1 : index + 2]]) if name == "hearth" else name
    return ""


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.exists() else ():
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a temporary file
            continue
    return total
