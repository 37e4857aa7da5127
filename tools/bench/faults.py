"""Kind `faults`: faults at random moments in a home under load: calls that fail, wrong answers, and pauses.

Every fault happens to a home that has recovered from the last one: all devices are there, its plan has all of them but
`missing` ones, and the loss of each of them has been prepared for.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from tools.bench.experiment import Context, Experiment, one_of
from tools.bench.fault_actions import FAULTS
from tools.bench.fault_home import CLIENTS, LOADS, FaultHome, LoadName, served_home
from tools.bench.fault_rows import FaultRow, Gap, Happened, pauses, summarise_faults, two_leaders, worst_pause
from tools.bench.load import load_between, snapshot
from tools.bench.results import Summary

_MOMENT_SECONDS = (0.5, 2.5)  # range of the time from a home that is ready to the fault
OF_COORDINATORS = tuple(name for name in FAULTS if name.startswith("coordinator"))  # with a standby
SINGLE = (
    "worker killed", "agent killed", "worker stopped", "device stopped", "link cut", "data connection reset", "store full",
    "power cycled", "coordinator killed", "coordinator stopped",
)  # fmt: skip
_RECOVER_SECONDS = 90.0  # after the last repair; then the home counts as not recovered
_REJOIN_SECONDS = 20.0  # for the home to be ready for the next fault; then another one is made
_LOG_CHARACTERS = 3000  # of the log of each coordinator and agent that are kept where something went wrong


class Faults(Experiment[FaultRow]):
    """`count` faults of each kind, divided among the loads, in random order."""

    loads: tuple[LoadName, ...] = LOADS
    faults: tuple[Annotated[str, one_of(FAULTS)], ...] = Field(SINGLE, min_length=1)
    count: int = Field(15, ge=1)  # of each fault, under all loads together
    devices: int = Field(4, ge=2, le=8)
    standby: bool = False  # a second coordinator follows on the last device
    together: bool = False  # all loads at once, each with its model, instead of one after the other
    busy: int = Field(0, ge=0)  # processes for each core that compute without end
    seed: int = 1
    # Devices that the plan may lack when a fault happens. A device that was lost is there again after seconds, but joins a plan
    # after 10 s at the earliest: 1 measures a home that has such a spare device, and 0 needs a new home after most faults.
    missing: int = Field(1, ge=0)

    @model_validator(mode="after")
    def _parts_only_coordinators(self) -> Self:
        if not self.standby and self._parts_network:
            raise ValueError("standby: a network can only be parted between two coordinators")
        return self

    @property
    def _parts_network(self) -> bool:
        return any(FAULTS[name].parts_network for name in self.faults)

    def measure(self, context: Context) -> Iterator[FaultRow]:
        yield from context.known
        groups: list[tuple[LoadName, ...]] = [self.loads] if self.together else [(load,) for load in self.loads]
        for place, loads in enumerate(groups):
            load = "+".join(loads)
            schedule = self._schedule(load, place, len(groups))
            done = {row.number for row in context.known if row.load == load}
            waiting = [number for number in range(len(schedule)) if number not in done]
            happened: list[Happened] = []  # since the last fault
            while waiting:
                with (
                    served_home(loads, context, self.devices, self.standby, self._parts_network) as home,
                    busy_processes(self.busy * (os.cpu_count() or 1)),
                ):
                    home.steady_seconds *= 1 + self.busy
                    home.begin()
                    can_lose = partial(home.is_ready, self.missing)
                    happened += home.wait_until_steady(can_lose, self._recover_seconds)[1]
                    is_ready = True
                    while waiting and is_ready:
                        number = waiting.pop(0)
                        context.report(f"{load}: fault {number + 1} of {len(schedule)}, {schedule[number]}")
                        yield self._measure_one(home, number, schedule[number], happened)
                        is_ready, happened = home.wait_until_steady(can_lose, _REJOIN_SECONDS * (1 + self.busy))

    def summary(self, rows: Sequence[FaultRow]) -> Summary:
        return summarise_faults(rows)

    @property
    def _recover_seconds(self) -> float:
        return _RECOVER_SECONDS * (1 + self.busy)

    def _schedule(self, load: str, place: int, places: int) -> list[str]:
        """The faults of the load with this place of so many."""
        # Where `count` is no multiple of the number of loads, the rest falls to another load for each fault.
        schedule = [
            name for first, name in enumerate(self.faults) for number in range(first, first + self.count)
            if number % places == place
        ]  # fmt: skip
        random.Random(f"{self.seed} {load}").shuffle(schedule)
        return schedule

    def _measure_one(self, home: FaultHome, number: int, name: str, before: list[Happened]) -> FaultRow:
        """`before`: what happened since the last fault."""
        chance, fault = random.Random(f"{self.seed} {home.load} {number}"), FAULTS[name]
        learning_seconds = 0.0 if name.startswith("coordinator") else home.learning_seconds()
        time.sleep(learning_seconds + chance.uniform(*_MOMENT_SECONDS))
        target, planned = fault.choose(home, chance), home.planned()
        log_sizes, load_before = home.log_sizes(), snapshot()
        before = [*before, *home.take()]
        moment = time.monotonic()
        repairs = sorted(fault.act(home, target, chance), key=lambda repair: repair.seconds)
        acted = repairing = time.monotonic()
        for repair in repairs:
            time.sleep(max(moment + repair.seconds - time.monotonic(), 0.0))
            repairing = time.monotonic()
            repair.act()
        repaired = time.monotonic()
        recovered, after = home.wait_until_steady(home.is_complete, self._recover_seconds)
        end, happened = time.monotonic(), [*before, *after]
        failed, wrong = _details(happened, "failed", moment), _details(happened, "wrong", moment)
        if fault.parts_network and (both := two_leaders(after, CLIENTS, acted, repairing)):
            wrong = (*wrong, both)
        # Until the repair of a silent device, or else for as long as it takes
        found = pauses(happened, moment, repaired if repairs else end, end)
        pause, gap = worst_pause(found, moment)
        back = max(repaired, gap.end)
        rejoin, _ = worst_pause(pauses(happened, back, end, end) if repairs else {}, back)
        limit = fault.standby_limit_seconds if self.standby and name in OF_COORDINATORS else fault.limit_seconds
        row = FaultRow(
            load=home.load, number=number, fault=name, target=target,
            answers=sum(each[0] >= moment and each[2] == "answer" for each in happened), failed=failed, wrong=wrong,
            pause_seconds=pause, rejoin_pause_seconds=rejoin,
            limit_seconds=None if self.busy else limit, recovered=recovered,
            plan_devices_before=len(planned), disturbed=load_between([(load_before, snapshot())]).distrust,
        )  # fmt: skip
        if row.harmless and not row.is_late:
            return row
        return row.model_copy(update={"log": _describe(found, moment) + home.logs_since(log_sizes, _LOG_CHARACTERS)})


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run so many processes that compute without end."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _describe(gaps: Mapping[int, tuple[float, Gap]], moment: float) -> str:
    """The longest gap between answers of each client, in seconds from the fault."""
    return "".join(
        f"client {client}: no answer from {gap.start - moment:+.2f} to {gap.end - moment:+.2f} s\n"
        for client, (_, gap) in sorted(gaps.items())
    )


def _details(happened: Sequence[Happened], kind: str, moment: float) -> tuple[str, ...]:
    return tuple(f"{seconds - moment:+.2f} s: {what}" for seconds, _, each, what in happened if each == kind)
