"""Kind `idle-cost`: what a home costs while nobody asks: CPU time, memory, disk and traffic, by program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hearth.platform.units import format_bytes
from tools.bench.census import Census, take_census
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_home import LOADS, LoadName, served_home
from tools.bench.results import Summary, Table

_SETTLE_SECONDS = 20.0  # from a served home to the first count: plans and weights for later have been made


class IdleRow(BaseModel):
    """A home at the beginning and at the end of a time without requests."""

    model_config = ConfigDict(frozen=True)

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
        used = [p.cpu_seconds - earlier[p.pid] for p in self.after.processes if p.role == role and p.pid in earlier]
        return statistics.mean(used) / self.minutes if used else 0.0


class IdleCost(Experiment):
    """A home without requests for `minutes`, for each model."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(IdleRow)

    loads: tuple[LoadName, ...] = LOADS
    minutes: float = Field(2.0, gt=0)
    devices: int = Field(4, ge=2, le=8)
    mbit: float = Field(1000.0, ge=1)  # real rate of every link

    def measure(self, context: Context) -> Iterator[IdleRow]:
        for load in self.loads:
            with served_home(load, context, self.devices, self.mbit) as home:
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

    def line(role: str) -> tuple[str, ...]:
        def most(values: list[float]) -> str:
            return format_bytes(max(values))

        return (
            role, str(len(after.of_role(role, lambda process: 1))), f"{row.cpu_seconds(role):.2f} s",
            most(after.of_role(role, lambda process: process.resident_bytes)),
            most(after.of_role(role, lambda process: process.proportional_bytes)),
            f"{max(after.of_role(role, lambda process: process.descriptors)):.0f}",
            f"{max(after.of_role(role, lambda process: process.threads)):.0f}",
        )  # fmt: skip

    columns = ("program", "processes", "CPU seconds a minute, mean", "resident, most", "proportional, most",
               "descriptors, most", "threads, most")  # fmt: skip
    yield Table.of(f"Idle home that serves the model of: {row.load}", columns, map(line, after.roles))
    sent = {name: (num - row.before.sent_bytes[name]) / row.minutes for name, num in after.sent_bytes.items()}
    stores = f"{format_bytes(after.store_bytes)} ({after.store_bytes / max(row.model_bytes, 1):.2f} x the model)"
    figures = [
        *((f"sent by {name} in a minute", format_bytes(num)) for name, num in sent.items()),
        ("stores, all devices", stores),
        ("state, all devices", format_bytes(after.state_bytes)),
        ("TCP connections, each end", str(after.sockets)),
    ]
    yield Table.of(f"Idle home, {row.load}: traffic and disk", ("figure", "measured"), figures)
