"""Kind `faults`: faults at random moments in a home under load: calls that fail, wrong answers, and pauses.

Every fault happens to a home that has recovered from the last one and whose plan has all devices.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter, field_validator, model_validator
from typing_extensions import Self

from hearth.platform.units import format_seconds
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_actions import FAULTS
from tools.bench.fault_home import LOADS, FaultHome, LoadName, served_home
from tools.bench.fault_rows import FaultRow, Happened, phases_since, summarise_faults, worst_pause
from tools.bench.load import load_between, snapshot
from tools.bench.results import Summary

_MOMENT_SECONDS = (0.5, 2.5)  # range of the time from a warm home to the fault
_LOG_CHARACTERS = 3000  # of the coordinator's log that are kept where something went wrong


class Faults(Experiment):
    """`count` faults of each kind under each load, in random order."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(FaultRow)

    loads: tuple[LoadName, ...] = LOADS
    faults: tuple[str, ...] = Field(tuple(FAULTS), min_length=1)
    count: int = Field(5, ge=1)  # of each fault, under each load
    devices: int = Field(4, ge=2, le=8)
    mbit: float = Field(1000.0, ge=1)  # real rate of every link
    standby: bool = False  # a second coordinator follows on the last device; then only coordinators fail
    seed: int = 1
    quiet_seconds: float = Field(8.0, ge=0)  # from a recovered home to the next fault: spare processes get warm
    answer_seconds: float = Field(3.0, gt=0)  # for which every client must get answers until a home counts as recovered
    recover_seconds: float = Field(90.0, ge=1)  # after the last repair; then the home counts as not recovered
    rejoin_seconds: float = Field(15.0, ge=0)  # for the plan to have all devices; then it is deployed by hand

    @field_validator("faults")
    @classmethod
    def _known(cls, faults: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in faults if name not in FAULTS]:
            raise ValueError(f"'{unknown[0]}' is none of {', '.join(FAULTS)}")
        return faults

    @model_validator(mode="after")
    def _fails_only_coordinators(self) -> Self:
        if self.standby and not all(name.startswith("coordinator") for name in self.faults):
            raise ValueError("standby: the faults must be those of a coordinator, such as 'coordinator killed'")
        return self

    def measure(self, context: Context) -> Iterator[FaultRow]:
        yield from context.known
        for load in self.loads:
            schedule = self._schedule(load)
            done = {row.number for row in context.known if row.load == load}
            waiting = [number for number in range(len(schedule)) if number not in done]
            while waiting:
                with served_home(load, context, self.devices, self.mbit, self.standby) as home:
                    home.begin()
                    recovered = True
                    while waiting and recovered:
                        number = waiting.pop(0)
                        context.report(f"{load}: fault {number + 1} of {len(schedule)}, {schedule[number]}")
                        row = self._measure_one(home, number, schedule[number])
                        recovered = row.recovered
                        yield row

    def summary(self, rows: Sequence[FaultRow]) -> Summary:
        return summarise_faults(rows)

    def _schedule(self, load: str) -> list[str]:
        schedule = [name for name in self.faults for _ in range(self.count)]
        random.Random(f"{self.seed} {load}").shuffle(schedule)
        return schedule

    def _measure_one(self, home: FaultHome, number: int, name: str) -> FaultRow:
        chance, fault = random.Random(f"{self.seed} {home.load} {number}"), FAULTS[name]
        if not home.wait_until_on_all(self.rejoin_seconds):
            home.redeploy()
        home.take()
        time.sleep(self.quiet_seconds + chance.uniform(*_MOMENT_SECONDS))
        target, before = chance.choice(home.planned()), home.take()
        workers, log_offset, load_before = home.workers(), len(home.testbed.log("coordinator.log")), snapshot()
        moment = time.monotonic()
        repairs = sorted(fault.act(home, target, chance), key=lambda repair: repair.seconds)
        for repair in repairs:
            time.sleep(max(moment + repair.seconds - time.monotonic(), 0.0))
            repair.act()
        repaired = time.monotonic()
        recovered, after = home.wait_until_recovered(self.answer_seconds, self.recover_seconds)
        state, end, happened = home.look(), time.monotonic(), [*before, *after]
        harm = [each for each in happened if each[0] >= moment and each[2] in ("failed", "wrong")]
        # Until the repair of a silent device, or else for as long as it takes
        pause, gap = worst_pause(happened, moment, repaired if repairs else end, end)
        back = max(repaired, gap.end)
        rejoin, _ = worst_pause(happened, back, end, end) if repairs else (0.0, gap)
        limit = fault.standby_limit_seconds if home.has_standby else fault.limit_seconds
        background = load_between([(load_before, snapshot())])
        return FaultRow(
            load=home.load, number=number, fault=name, target=target, moment_seconds=moment - home.began,
            answers=sum(each[0] >= moment and each[2] == "answer" for each in happened),
            failed=_details(harm, "failed", moment), wrong=_details(harm, "wrong", moment),
            pause_seconds=pause, rejoin_pause_seconds=rejoin, again_seconds=max(gap.end - moment, 0.0),
            limit_seconds=limit, recovered=recovered, workers_before=workers,
            workers_after=home.workers(), phases=phases_since(state.history, end - moment),
            plan_devices=len(state.planned), disturbed=background.distrust,
            log=home.log_since(log_offset)[-_LOG_CHARACTERS:] if harm or not recovered else "",
        )  # fmt: skip


def _details(happened: Sequence[Happened], kind: str, moment: float) -> tuple[str, ...]:
    return tuple(f"+{format_seconds(seconds - moment)}: {what}" for seconds, _, each, what in happened if each == kind)
