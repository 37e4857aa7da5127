"""Graphs on the testbed, cut and placed by the real planners and served by the real coordinator, agents and workers.

Pipelines: inferences per second of one device and of several, at full load, and whether the bottleneck is what was
predicted. Placements: the latency of one request at a fast and at a slow link rate, by one device, by `moirai`, and by what
`auto` takes; and whether the simulator is right about which is better.

Each plan is made once, and deployed anew in every round: rounds alternate between the plans, in rotated order, so that what
the machine's other guests do meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import TracebackType
from typing import Any

from coordinator.graphs.pricing import in_flight
from hearth.errors import HearthError, InternalError
from hearth.graph.plan import GraphPlan, Objective
from hearth.messages import WireStats
from tools.bench.drive import Group
from tools.bench.graphs_findings import ONE_DEVICE, Served, interval_seconds
from tools.bench.stats import rotated
from tools.testbed import Testbed

_READY_SECONDS = 240.0
_STOP_SECONDS = 20.0
_LOAD_MARGIN_SECONDS = 300.0
_WAITING = 2  # requests beyond those in flight, so that the coordinator always has a next one
_WARM_UP = 2  # times what is in flight: then every stage has been at work for a while


class _Clients(Group):
    """The app, on the hub."""

    def __init__(self, testbed: Testbed) -> None:
        super().__init__(testbed, "graphs_clients")
        self._hub = testbed.scenario.coordinator_device
        self.start(self._hub, str(testbed.key), testbed.address(self._hub), limited=False)

    def call(self, what: str, patience: float, **arguments: Any) -> dict[str, Any]:
        """`patience` in seconds."""
        return self.ask({self._hub: {"do": what, **arguments}}, patience)[self._hub]


@dataclass
class _Entry:
    """What is served in every round: first as `strategy` plans it, then by the same plan."""

    label: str
    strategy: str
    wire: str = "exact"
    plan: GraphPlan | None = None
    seconds: list[float] = field(default_factory=list)
    answers: int = 0
    difference: float = 0.0
    errors: list[str] = field(default_factory=list)
    wire_stats: WireStats = field(default_factory=WireStats)  # of the last round

    def served(self, objective: Objective, mbit: float) -> Served:
        assert self.plan is not None
        predicted = self.plan.predicted
        throughput = objective == "throughput"
        return Served(
            label=self.label,
            strategy=self.plan.planner,
            wire=self.wire,
            mbit=mbit,
            devices=tuple(device.name for device in self.plan.devices),
            segments=len(self.plan.segments),
            predicted_seconds=predicted.bottleneck_seconds if throughput else predicted.latency_seconds,
            stage_seconds=tuple(device.compute_seconds for device in self.plan.devices),
            seconds=tuple(self.seconds),
            answers=self.answers,
            difference=self.difference,
            errors=tuple(self.errors),
            raw_bytes=self.wire_stats.raw_bytes,
            sent_bytes=self.wire_stats.sent_bytes,
        )


class GraphsBench:
    """On a testbed that is up, with agents on all devices but the hub."""

    def __init__(self, testbed: Testbed, rounds: int, report: Callable[[str], None]) -> None:
        self._testbed, self._rounds, self._report = testbed, rounds, report
        self._num_devices = len(testbed.scenario.devices) - 1
        self._clients = _Clients(testbed)
        self._dims: list[str] = []

    def __enter__(self) -> GraphsBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clients.__exit__(kind, error, trace)

    def throughput(
        self,
        model: Path,
        strategies: Sequence[str],
        wires: Sequence[str],
        mbit: float,
        seconds: float,
        dims: Sequence[str] = (),
    ) -> tuple[Served, list[Served]]:
        """One device, and the pipelines. `seconds`: how long each is measured in a round, at full load.

        `dims` as `hearth serve --dim` takes them.
        """
        self._dims = [option for dim in dims for option in ("--dim", dim)]
        self._testbed.set_mbit(mbit)
        self._forget(model)
        one = _Entry("one device", ONE_DEVICE)
        pipelines = [_Entry(f"{strategy}, {wire}", strategy, wire) for strategy in strategies for wire in wires]

        def measure(entry: _Entry, plan: GraphPlan) -> Mapping[str, Any]:
            at_once = in_flight(plan.segments)
            answered = self._clients.call(
                "load", at_once=at_once + _WAITING, warm_up=_WARM_UP * at_once, seconds=seconds,
                patience=seconds + _LOAD_MARGIN_SECONDS,
            )  # fmt: skip
            entry.seconds.append(interval_seconds(answered["done"]))
            entry.answers += len(answered["done"])
            return answered

        self._in_rounds(model, "throughput", [one, *pipelines], measure)
        return one.served("throughput", mbit), [each.served("throughput", mbit) for each in pipelines]

    def latency(
        self, model: Path, mbits: Sequence[float], requests: int
    ) -> list[tuple[Served, Served, Served, Served | None]]:
        """At each link rate: one device, moirai, auto; and a plan on several devices where moirai takes one.

        That plan is moirai's of a faster link, so rates should fall.
        """
        found = []
        self._dims = []
        spread: GraphPlan | None = None
        self._forget(model)
        for mbit in mbits:
            self._testbed.set_mbit(mbit)
            self._forget_links()
            entries = [
                _Entry(f"{name} at {mbit:g} Mbit/s", strategy)
                for name, strategy in (("one device", ONE_DEVICE), ("moirai", "moirai"), ("auto", "auto"))
            ]
            for entry in entries:  # moirai's plan says whether one on several devices must be looked for elsewhere
                self._plan(model, "latency", entry)
            one, moirai, auto = entries
            assert moirai.plan is not None
            forced = None
            if moirai.plan.num_ranks > 1:
                spread = moirai.plan
            elif spread is not None:
                forced = _Entry(f"moirai's plan of the faster link at {mbit:g} Mbit/s", "moirai", plan=spread)
            self._in_rounds(model, "latency", [*entries, *([forced] if forced else [])], self._latencies(requests))
            found.append(
                (
                    one.served("latency", mbit),
                    moirai.served("latency", mbit),
                    auto.served("latency", mbit),
                    forced.served("latency", mbit) if forced else None,
                )
            )
        return found

    def _latencies(self, requests: int) -> Callable[[_Entry, GraphPlan], Mapping[str, Any]]:
        def measure(entry: _Entry, plan: GraphPlan) -> Mapping[str, Any]:
            answered = self._clients.call("one_by_one", count=requests, patience=_LOAD_MARGIN_SECONDS)
            entry.seconds.append(statistics.median(answered["latencies"]))
            entry.answers += requests
            return answered

        return measure

    def _in_rounds(
        self,
        model: Path,
        objective: Objective,
        entries: Sequence[_Entry],
        measure: Callable[[_Entry, GraphPlan], Mapping[str, Any]],
    ) -> None:
        for number in range(self._rounds):
            for entry in rotated(entries, number):
                self._report(f"round {number + 1} of {self._rounds}: {entry.label}: planning and loading")
                coordinator, plan = self._serve(model, objective, entry)
                try:
                    self._report(f"round {number + 1} of {self._rounds}: {entry.label}: measuring")
                    answered = measure(entry, plan)
                    entry.wire_stats = WireStats.model_validate(self._status()["wire"])
                finally:
                    self._stop(coordinator)
                entry.plan = entry.plan or plan
                entry.difference = max(entry.difference, answered["difference"])
                entry.errors += answered["errors"]

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _plan(self, model: Path, objective: Objective, entry: _Entry) -> None:
        """By `hearth serve`, as everything: its profile of devices and links is kept for the rounds."""
        self._report(f"{entry.label}: planning")
        coordinator, entry.plan = self._serve(model, objective, entry)
        self._stop(coordinator)

    def _serve(self, model: Path, objective: Objective, entry: _Entry) -> tuple[Popen[bytes], GraphPlan]:
        """Raises InternalError with what the coordinator said last."""
        options = [
            str(model), "--objective", objective, "--wire", entry.wire, "--min-devices", str(self._num_devices),
            "--strategy", entry.strategy, *self._dims,
        ]  # fmt: skip
        if entry.plan is not None:
            path = self._testbed.folder / "plan.json"
            path.write_text(entry.plan.model_dump_json())
            options += ["--plan", str(path)]
        coordinator = self._testbed.start_coordinator(*options)
        try:
            return coordinator, GraphPlan.model_validate(self._status()["graph_plan"])
        except HearthError as error:
            self._stop(coordinator)
            said = self._testbed.log("coordinator.log").strip()[-500:]
            raise InternalError(where="the coordinator", reason=f"{error}; it said: {said}") from None

    def _status(self) -> dict[str, Any]:
        """Once it serves. Raises what the client raises."""
        return self._clients.call("wait_ready", within_seconds=_READY_SECONDS, patience=_READY_SECONDS + 30.0)

    @staticmethod
    def _stop(coordinator: Popen[bytes]) -> None:
        """It gives its leases back and unloads."""
        coordinator.terminate()
        try:
            coordinator.wait(_STOP_SECONDS)
        except TimeoutExpired:
            coordinator.kill()
            coordinator.wait(_STOP_SECONDS)

    def _forget(self, model: Path) -> None:
        self._report(f"reading {model.name}")
        self._clients.call("forget", patience=30.0)
        self._forget_links()

    def _forget_links(self) -> None:
        """They have another rate now than those that the coordinator has kept."""
        for path in (self._testbed.folder / "coordinator" / "profiles").glob("link-*.json"):
            path.unlink()
