"""Plans of one ONNX graph, deployed in turn by the real coordinator on a testbed, and measured.

Each plan is made once and deployed again in every round. The order of the plans rotates from round to round, so that load
from other virtual machines on the host affects all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hearth.plan.graph import Objective
from hearth.plan.plan import GraphPlan, plan_from_json
from tools.bench.homes import agent_names, stop_coordinator
from tools.bench.processes import ClientProcess
from tools.bench.results import Record
from tools.bench.stats import rotated
from tools.testbed import Testbed

_READY_SECONDS = 240.0  # for the coordinator to serve: profiling, planning and loading on slow devices
_AHEAD_SECONDS = 1.0  # limit of a search for a plan that is made ahead, for the loss of a device; none is needed here
_LOAD_SECONDS = 600.0  # timeout of a measurement, with requests on slow devices


class Round(Record):
    """Measurements of a plan that was deployed once."""

    seconds: float  # per answer of a full pipeline (throughput), or of one request (latency)
    answers: int
    difference: float = 0.0  # largest difference from the output of one device, relative to its largest value


class Served(BaseModel):
    """A plan and its measurements."""

    model_config = ConfigDict(frozen=True)

    label: str
    strategy: str
    wire: str
    mbit: float | None = Field(gt=0)  # of every link; None: the scenario's
    devices: tuple[str, ...]
    segments: int
    predicted_seconds: float
    stage_seconds: tuple[float, ...] = ()  # by rank, predicted; includes the CPU time of communication
    rounds: list[Round] = []

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(each.seconds for each in self.rounds)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_seconds / self.median_seconds - 1

    @property
    def difference(self) -> float:
        """The largest difference of an output from one device's, relative to its largest value."""
        return max(each.difference for each in self.rounds)


@dataclass(frozen=True)
class Candidate:
    """A plan to measure, made once and deployed in every round."""

    plan: GraphPlan
    served: Served

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for plans that run the same operators on the same devices, with the same wire format."""
        placed = ((self.plan.devices[each.rank].device_id, each.operators) for each in self.plan.body.segments)
        return self.served.wire, *placed


class GraphHome(ClientProcess):
    """A graph on a started testbed with agents on all devices except the hub, and the client app that requests it."""

    def __init__(self, testbed: Testbed, model: Path, objective: Objective, report: Callable[[str], None]) -> None:
        super().__init__(testbed, "load_clients")
        self._objective, self._report = objective, report
        self._options = [str(model), "--objective", objective]
        self._devices = agent_names(testbed)
        self._mbit: float | None = None

    def set_mbit(self, mbit: float) -> None:
        """Change the rate of all links. Forgets the links that the coordinator has measured."""
        self._mbit = mbit
        self._testbed.set_mbit(mbit)
        for path in (self._testbed.folder / "coordinator" / "profiles").glob("link-*.json"):
            path.unlink()

    def make_plan(self, label: str, strategy: str, time_limit: float, wire: str = "exact") -> Candidate:
        """Plan with `hearth plan`, which caches its profiles. Raises InternalError with its error text."""
        self._report(f"{label}: planning")
        text = self._testbed.plan(
            *self._options, "--strategy", strategy, "--wire", wire, "--time-limit", f"{time_limit:g}",
            "--devices", ",".join(map(self._testbed.address, self._devices)),
        )  # fmt: skip
        plan = plan_from_json(text, GraphPlan)
        predicted, throughput = plan.predicted, self._objective == "throughput"
        seconds = predicted.bottleneck_seconds if throughput else predicted.latency_seconds
        return self.candidate(label, plan, seconds)

    def candidate(self, label: str, plan: GraphPlan, predicted_seconds: float) -> Candidate:
        served = Served(
            label=label, strategy=plan.planner, wire=plan.wire.values, mbit=self._mbit,
            devices=tuple(device.name for device in plan.devices), segments=len(plan.body.segments),
            predicted_seconds=predicted_seconds, stage_seconds=tuple(device.compute_seconds for device in plan.devices),
        )  # fmt: skip
        return Candidate(plan, served)

    def measure(
        self, candidates: Sequence[Candidate], load: Callable[[GraphPlan], Mapping[str, Any]], rounds: int
    ) -> Iterator[Served]:
        """Deploy and measure all candidates in rounds, equal plans once; then yield their rows.

        `load`: arguments of `LoadClients.measure`. Deploys at the scenario's rates: loading on a slow link takes minutes.
        """
        distinct: dict[tuple[object, ...], Candidate] = {}
        for candidate in candidates:
            distinct.setdefault(candidate.key, candidate)
        for number in range(rounds):
            for candidate in rotated(list(distinct.values()), number):
                step = f"round {number + 1} of {rounds}: {candidate.served.label}"
                self._report(f"{step}: planning and loading")
                self._testbed.set_mbit(None)
                with self._serving(candidate):
                    self._testbed.set_mbit(self._mbit)
                    self._report(f"{step}: measuring")
                    measured = self.call("measure", _LOAD_SECONDS, **load(candidate.plan))
                candidate.served.rounds.append(Round.model_validate(measured))
        for candidate in candidates:
            yield distinct[candidate.key].served.model_copy(update={"label": candidate.served.label})

    @contextmanager
    def _serving(self, candidate: Candidate) -> Iterator[None]:
        """A coordinator that serves this plan only, and plans no more. Raises InternalError with the end of its log."""
        path = self._testbed.folder / "plan.json"
        path.write_text(candidate.plan.model_dump_json())
        coordinator = self._testbed.start_coordinator(
            *self._options, "--wire", candidate.served.wire, "--strategy", candidate.served.strategy,
            "--plan", str(path), "--min-devices", str(len(self._devices)),
            "--no-learn", "--time-limit", f"{_AHEAD_SECONDS:g}",
        )  # fmt: skip
        try:
            self.ready_status(_READY_SECONDS)
            self.call("wait_prepared", _LOAD_SECONDS, timeout_seconds=_READY_SECONDS)
            yield
        finally:
            stop_coordinator(coordinator)
