"""Kind `churn`: devices come and go under load: calls that fail, wrong answers, pauses, and what the home holds afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from hearth.platform.units import format_bytes
from tools.bench.census import Census, growth, take_census
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_actions import power_off, power_on
from tools.bench.fault_home import FaultHome, LoadName, served_home
from tools.bench.fault_rows import FaultRow, phases_since, summarise_faults, worst_pause
from tools.bench.findings import COUNT, Finding, at_most, findings_table
from tools.bench.results import Summary

_MOST_GROWTH_BYTES = 16 << 20  # of a process's memory: slack of its allocator, as in the soak test
_MOST_DESCRIPTORS = 20  # of all processes: connections that are being made or closed when they are counted
_SETTLE_SECONDS = 10.0  # without load, before counting: connections of workers that have ended are closed


class Churn(Experiment):
    """Every `every_seconds` a device leaves or one comes back; at least two stay.

    The first half of the devices lose only their link, so that their processes live on and can be compared.
    """

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(FaultRow | Census)

    load: LoadName = "embed"
    minutes: float = Field(30.0, gt=0)
    every_seconds: float = Field(20.0, ge=1)
    devices: int = Field(4, ge=3, le=8)
    mbit: float = Field(1000.0, ge=1)  # real rate of every link
    recover_seconds: float = Field(90.0, ge=1)  # for all devices to be there again at the end
    seed: int = 1

    def measure(self, context: Context) -> Iterator[FaultRow | Census]:
        chance = random.Random(self.seed)
        with served_home(self.load, context, self.devices, self.mbit) as home:
            time.sleep(_SETTLE_SECONDS)
            yield take_census(home.testbed, time.monotonic())
            home.begin()
            home.wait_until_recovered(self.every_seconds / 2, self.recover_seconds)  # the clients' usual gaps
            gone: list[str] = []
            number, end = 0, time.monotonic() + self.minutes * 60
            while time.monotonic() < end:
                context.report(f"{number} changes, {(end - time.monotonic()) / 60:.1f} minutes left; gone: {gone}")
                yield self._change(home, chance, gone, number)
                number += 1
            while gone:
                yield self._change(home, chance, gone, number, only_back=True)
                number += 1
            home.wait_until_recovered(self.every_seconds / 2, self.recover_seconds)
            home.end()
            time.sleep(_SETTLE_SECONDS)
            yield take_census(home.testbed, time.monotonic())

    def _change(
        self, home: FaultHome, chance: random.Random, gone: list[str], number: int, only_back: bool = False
    ) -> FaultRow:
        """Let a device leave or come back, and observe the clients until the next change."""
        leaves = not gone or (not only_back and len(gone) < len(home.names) - 2 and chance.random() < 0.5)
        before, moment = home.take(), time.monotonic()
        workers = home.workers()
        target = chance.choice([name for name in home.names if name not in gone] if leaves else gone)
        only_link = home.names.index(target) < len(home.names) // 2
        if leaves:
            home.testbed.network.cut(target) if only_link else power_off(home, target)
            gone.append(target)
        else:
            home.testbed.network.mend(target) if only_link else power_on(home, target)
            gone.remove(target)
        time.sleep(max(moment + self.every_seconds - time.monotonic(), 0.0))
        state, end, happened = home.look(), time.monotonic(), [*before, *home.take()]
        pause, gap = worst_pause(happened, moment, end, end)
        harm = {kind: tuple(what for _, _, each, what in happened if each == kind) for kind in ("failed", "wrong")}
        return FaultRow(
            load=home.load, number=number, fault=f"{'link' if only_link else 'power'} {'off' if leaves else 'on'}",
            target=target, moment_seconds=moment - home.began, answers=sum(each[2] == "answer" for each in happened),
            failed=harm["failed"], wrong=harm["wrong"], pause_seconds=pause,
            again_seconds=max(gap.end - moment, 0.0), workers_before=workers, workers_after=home.workers(),
            phases=phases_since(state.history, end - moment), plan_devices=len(state.planned),
        )  # fmt: skip

    def summary(self, rows: Sequence[FaultRow | Census]) -> Summary:
        faults = [row for row in rows if isinstance(row, FaultRow)]
        censuses = [row for row in rows if isinstance(row, Census)]
        summary = summarise_faults(faults) if faults else Summary()
        if len(censuses) < 2:
            return summary
        findings = list(leaks(*censuses))
        leaked = [each for each in findings if each.holds is False]
        return summary.model_copy(update={
            "tables": (*summary.tables, findings_table("Before and after", findings)),
            "conclusions": (*summary.conclusions, f"{len(leaked)} figures have grown beyond their limits"),
            "failure": summary.failure or ("a figure has grown" if leaked else ""),
        })  # fmt: skip


def leaks(before: Census, after: Census) -> Iterator[Finding]:
    """The figures that must not grow, with their limits."""
    for figure, (one, other) in growth(before, after).items():
        if figure.startswith("memory"):
            detail = f"{format_bytes(one)} to {format_bytes(other)}"
            yield at_most(f"{figure}, growth", max(other - one, 0), _MOST_GROWTH_BYTES, format_bytes, detail)
        else:
            slack = _MOST_DESCRIPTORS if figure.startswith(("descriptors", "TCP")) else 0
            yield at_most(figure, other, one + slack, COUNT, f"{one:.0f} before")
    yield at_most("stores, all devices", after.store_bytes, len(after.sent_bytes) * before.store_bytes, format_bytes)
