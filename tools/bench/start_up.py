"""Kind `start-up`: the time from the start of `hearth serve` to the first token of an answer, by phase of the life cycle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from tools.bench.experiment import Context, Experiment
from tools.bench.findings import Finding, at_most, summarise, without_target
from tools.bench.generation import LLAMA
from tools.bench.homes import (
    GenerationClients,
    Model,
    agents,
    decoder_directory,
    forget_plans,
    hub_scenario,
    stop_coordinator,
)
from tools.bench.plans import describe
from tools.bench.results import Summary, Table
from tools.testbed import Testbed
from tools.testbed.cluster import wait_until

MAX_SECONDS = 8.0  # target of a start whose chunks and profiles are cached
_READY_SECONDS = 600.0  # of a cold start: profiles of slow devices, and weights over slow links
_ANSWER_SECONDS = 120.0

# What is known at a start: nothing; the chunks on the devices and the links; and the profiles of the devices, too.
Known = Literal["nothing", "chunks and links", "chunks, links and profiles"]
STARTS: tuple[Known, ...] = get_args(Known)
COLD, UNPROFILED, WARM = STARTS


class StartRow(BaseModel):
    """One start. `phases`: seconds in each phase of the life cycle before it served, in order."""

    model_config = ConfigDict(frozen=True)

    known: Known
    seconds: float  # from the start of the process to the first token
    ready_seconds: float  # from there to a client that knows that a plan serves
    phases: dict[str, float]
    plan: str

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part; the phases without their sum are those of the process and of the client's connection."""
        before = self.ready_seconds - sum(self.phases.values())
        return {"process and client": before, **self.phases, "first token": self.seconds - self.ready_seconds}


class StartUp(Experiment):
    """Starts of the coordinator, with agents that have run for a while: cold, without profiles, and with all caches."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(StartRow)

    model: Model = LLAMA
    weights: WeightFormat = "int4"
    devices: int = Field(4, ge=1, le=4)
    mbit: float = Field(500.0, ge=1)  # real rate of every link
    context: int = Field(512, ge=2)
    prompt_tokens: int = Field(16, ge=1)
    agent_seconds: float = Field(60.0, ge=0)  # from the start of the agents to the first coordinator
    rounds: int = Field(3, ge=1)  # of warm starts, and of those without profiles

    def measure(self, context: Context) -> Iterator[StartRow]:
        model_dir = str(decoder_directory(self.model, context.folder))
        began = time.monotonic()
        with agents(hub_scenario(self.devices), context.folder, self.mbit) as testbed:
            context.report("the agents run for a while")
            time.sleep(max(began + self.agent_seconds - time.monotonic(), 0.0))
            starts: list[Known] = [COLD, *[each for _ in range(self.rounds) for each in (WARM, UNPROFILED)]]
            for number, known in enumerate(starts):
                context.report(f"start {number + 1} of {len(starts)}, known: {known}")
                yield self._start(testbed, model_dir, known)

    def _start(self, testbed: Testbed, model_dir: str, known: Known) -> StartRow:
        """Start a coordinator, ask it, and end it. The plan is forgotten, so that each start makes one."""
        forget_plans(testbed)
        profiles = {path: path.read_bytes() for path in _profiles(testbed)}
        if known == UNPROFILED:
            for path in profiles:
                path.unlink()
        with GenerationClients(testbed) as clients:
            clients.call("ping")  # the client's own imports are no part of the start
            began = time.monotonic()
            coordinator = testbed.start_coordinator(
                model_dir, "--weights", self.weights, "--context", str(self.context), "--min-devices", str(self.devices)
            )
            try:
                prompt = list(range(3, 3 + self.prompt_tokens))
                times = clients.call(
                    "first_answer", _READY_SECONDS + _ANSWER_SECONDS, prompt=prompt, timeout_seconds=_READY_SECONDS
                )
                seconds = time.monotonic() - began
                status = clients.ready_status(_READY_SECONDS)
                if known == COLD:  # the first plan was made from a probe; the next start is to know the profile
                    _wait_for_profile(testbed)
            finally:
                stop_coordinator(coordinator)
                for path, profile in profiles.items():
                    path.write_bytes(profile)
        phases: dict[str, float] = {}
        for entered, left in pairwise(status["history"]):
            if entered["phase"] == "serving":
                break
            lasted = entered["seconds_ago"] - left["seconds_ago"]
            phases[entered["phase"]] = phases.get(entered["phase"], 0.0) + lasted
        return StartRow(
            known=known,
            seconds=seconds,
            ready_seconds=seconds - times["answer_seconds"],
            phases=phases,
            plan=describe(TransformerPlan.model_validate(status["plan"])),
        )

    def summary(self, rows: Sequence[StartRow]) -> Summary:
        findings: list[Finding] = []
        tables = []
        for known in STARTS:
            group = [row for row in rows if row.known == known]
            if not group:
                continue
            title = f"seconds to the first token, {self.devices} devices, {self.mbit:.0f} Mbit/s, known: {known}"
            median = statistics.median(row.seconds for row in group)
            detail = "each: " + ", ".join(f"{row.seconds:.1f}" for row in group)
            findings.append(
                at_most(title, median, MAX_SECONDS, "{:.2f} s".format, detail)
                if known == WARM
                else without_target(title, median, "{:.2f} s".format, detail)
            )
            names = list(dict.fromkeys(name for row in group for name in row.parts))
            lines = [
                (f"{row.seconds:.2f}", *(f"{row.parts.get(name, 0.0):.2f}" for name in names), row.plan)
                for row in group
            ]
            tables.append(Table.of(f"Seconds by part, known: {known}", ("all", *names, "plan"), lines))
        title = f"From `hearth serve` to the first token, {self.weights}, agents up for {self.agent_seconds:.0f} s"
        return summarise(title, findings, *tables)


def _profiles(testbed: Testbed) -> list[Path]:
    """The files of measured profiles: one at least of each kind of device."""
    return list((testbed.folder / "coordinator" / "profiles").glob("blocks*"))


def _wait_for_profile(testbed: Testbed) -> None:
    """Wait until the first device is profiled, which all others of the testbed equal. Raises DeadlineExceeded."""
    wait_until("the profile of a device", lambda: bool(_profiles(testbed)), _READY_SECONDS)
