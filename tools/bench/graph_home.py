"""Plans of one ONNX graph, deployed in turn by the real coordinator on a testbed, and measured.

Each plan is made once and deployed again in every round. The order of the plans rotates from round to round, so that load
from other virtual machines on the host affects all of them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from hearth.errors import HearthError
from hearth.plan.graph import Objective
from hearth.plan.plan import GraphPlan, plan_from_json
from hearth.wire.messages import WireStats
from tools.bench.processes import ClientProcess
from tools.bench.stats import rotated
from tools.testbed import Testbed

_READY_SECONDS = 240.0  # for the coordinator to serve: profiling, planning and loading on slow devices
_STOP_SECONDS = 20.0  # for the coordinator to end after SIGTERM: longer than it drains requests


class Served(BaseModel):
    """Measurements of one plan. `seconds`: per answer of a full pipeline (throughput), or of one request (latency)."""

    model_config = ConfigDict(frozen=True)

    label: str
    strategy: str
    wire: str
    mbit: float = Field(gt=0)
    devices: tuple[str, ...]
    segments: int
    predicted_seconds: float
    stage_seconds: tuple[float, ...] = ()  # by rank, predicted; includes the CPU time of communication
    busy_seconds: tuple[float, ...] = ()  # by rank, of the segments at full load
    seconds: tuple[float, ...] = ()  # by round
    answers: int = 0
    difference: float = 0.0  # largest difference from the output of one device, relative to its largest value
    errors: tuple[str, ...] = ()
    raw_bytes: int = 0  # of all tensors between devices in a round
    sent_bytes: int = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_seconds / self.median_seconds - 1


@dataclass
class Candidate:
    """One plan to measure, made by `strategy` once and deployed in every round; and its measurements."""

    label: str
    strategy: str
    wire: str = "exact"
    plan: GraphPlan | None = None
    predicted_seconds: float | None = None  # overrides the plan's own prediction
    same_as: Candidate | None = None  # a candidate with the same plan, whose measurements are used
    seconds: list[float] = field(default_factory=list)
    answers: int = 0
    difference: float = 0.0
    errors: list[str] = field(default_factory=list)
    compute: list[dict[str, float]] = field(default_factory=list)  # by round, then device: busy seconds of one answer
    wire_stats: WireStats = field(default_factory=WireStats)  # of the last round

    def served(self, objective: Objective, mbit: float) -> Served:
        assert self.plan is not None
        if self.same_as is not None:
            return self.same_as.served(objective, mbit).model_copy(update={"label": self.label})
        predicted, devices = self.plan.predicted, self.plan.devices
        seconds = predicted.bottleneck_seconds if objective == "throughput" else predicted.latency_seconds
        busy = [statistics.median(each[device.name] for each in self.compute) for device in devices if self.compute]
        return Served(
            label=self.label,
            strategy=self.plan.planner,
            wire=self.wire,
            mbit=mbit,
            devices=tuple(device.name for device in devices),
            segments=len(self.plan.body.segments),
            predicted_seconds=seconds if self.predicted_seconds is None else self.predicted_seconds,
            stage_seconds=tuple(device.compute_seconds for device in devices),
            busy_seconds=tuple(busy),
            seconds=tuple(self.seconds),
            answers=self.answers,
            difference=self.difference,
            errors=tuple(self.errors),
            raw_bytes=self.wire_stats.raw_bytes,
            sent_bytes=self.wire_stats.sent_bytes,
        )


# Measures a deployed plan with the client app and notes its figures in the candidate; returns the app's answer.
Measure = Callable[[ClientProcess, Candidate, GraphPlan], Mapping[str, Any]]


class GraphHome:
    """A graph on a started testbed with agents on all devices except the hub. A context manager."""

    def __init__(
        self, testbed: Testbed, model: Path, objective: Objective, options: Sequence[str], report: Callable[[str], None]
    ) -> None:
        """`options`: for `hearth plan` and `hearth serve`."""
        self._testbed, self._model, self._report = testbed, model, report
        self._options = [str(model), "--objective", objective, *options]
        self._clients = ClientProcess(testbed, "graph_clients")
        scenario = testbed.scenario
        self._devices = [each.name for each in scenario.devices if each.name != scenario.coordinator_device]

    def __enter__(self) -> GraphHome:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.__exit__()

    def set_mbit(self, mbit: float) -> None:
        """Change the rate of all links. Forgets the links that the coordinator has measured, and the reference answer."""
        self._report(f"reading {self._model.name}")
        self._testbed.set_mbit(mbit)
        self._clients.call("forget")
        for path in (self._testbed.folder / "coordinator" / "profiles").glob("link-*.json"):
            path.unlink()

    def make_plan(self, candidate: Candidate, time_limit: float) -> GraphPlan:
        """Plan with `hearth plan`, which caches its profiles. Raises InternalError with its error text."""
        self._report(f"{candidate.label}: planning")
        path = self._testbed.folder / "plan.json"
        self._testbed.hearth(
            "plan", *self._options, "--strategy", candidate.strategy, "--wire", candidate.wire, "--time-limit",
            f"{time_limit:g}", "--devices", ",".join(map(self._testbed.address, self._devices)), "--save", str(path),
        )  # fmt: skip
        plan = candidate.plan = plan_from_json(path.read_bytes(), GraphPlan)
        path.unlink()
        return plan

    def measure(
        self, candidates: Sequence[Candidate], measure: Measure, rounds: int, mbit: float, loading_mbit: float
    ) -> None:
        """Deploy and measure all candidates in rounds; deploy at `loading_mbit`: loading on a slow link takes minutes."""
        for number in range(rounds):
            for candidate in rotated(candidates, number):
                where = f"round {number + 1} of {rounds}: {candidate.label}"
                self._report(f"{where}: planning and loading")
                self._testbed.set_mbit(loading_mbit)
                coordinator, plan = self._serve(candidate)
                try:
                    self._testbed.set_mbit(mbit)
                    self._report(f"{where}: measuring")
                    self._pin_to_quietest_core(coordinator.pid)
                    answered = measure(self._clients, candidate, plan)
                    candidate.wire_stats = WireStats.model_validate(self._clients.ready_status(_READY_SECONDS)["wire"])
                finally:
                    _stop(coordinator)
                candidate.difference = max(candidate.difference, answered["difference"])
                candidate.errors += answered["errors"]

    def _serve(self, candidate: Candidate) -> tuple[Popen[bytes], GraphPlan]:
        """Start the coordinator with the candidate's plan. Raises InternalError with the end of its log."""
        assert candidate.plan is not None
        path = self._testbed.folder / "plan.json"
        path.write_text(candidate.plan.model_dump_json())
        coordinator = self._testbed.start_coordinator(
            *self._options, "--wire", candidate.wire, "--strategy", candidate.strategy, "--plan", str(path),
            "--min-devices", str(len(self._devices)),
        )  # fmt: skip
        try:
            return coordinator, GraphPlan.model_validate(self._clients.ready_status(_READY_SECONDS)["plan"])
        except HearthError:
            _stop(coordinator)
            raise

    def _pin_to_quietest_core(self, coordinator: int) -> None:
        """Pin coordinator and app to the core that the devices use least; a home has a separate machine for them."""
        wanted: dict[int, float] = dict.fromkeys(os.sched_getaffinity(0), 0.0)
        for device in self._testbed.scenario.devices:
            if device.core is not None:
                wanted[device.core] += device.cpu_share
        quietest = min(wanted, key=lambda core: wanted[core])
        for pid in (coordinator, self._clients.pid):
            for thread in psutil.Process(pid).threads():
                with suppress(ProcessLookupError):  # it has already ended
                    os.sched_setaffinity(thread.id, {quietest})


def _stop(coordinator: Popen[bytes]) -> None:
    """Stop the coordinator, which unloads the workers and releases its leases."""
    coordinator.terminate()
    try:
        coordinator.wait(_STOP_SECONDS)
    except TimeoutExpired:
        coordinator.kill()
        coordinator.wait(_STOP_SECONDS)
