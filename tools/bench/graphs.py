"""Benchmark of ONNX graphs on the testbed, planned and served by the real coordinator, agents and workers.

Throughput: inferences per second of one device and of pipelines at full load, and the predicted against the measured
bottleneck. Latency: seconds of one request at a fast and a slow link rate, for one device, `moirai` and `auto`, and whether
the simulator predicts the fastest.

Each plan is made once and deployed again in every round. The order of the plans rotates from round to round, so that load
from other virtual machines on the host affects all of them.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import TracebackType
from typing import Any

import psutil

from coordinator.models.graph_file import open_graph
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.predict import predict_segments, requests_in_flight
from hearth.errors import HearthError
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan, plan_from_json
from hearth.wire.messages import WireStats
from tools.bench.graphs_findings import NO_GAIN, ONE_DEVICE, Served, interval_seconds
from tools.bench.processes import ClientProcess
from tools.bench.stats import rotated
from tools.testbed import Testbed

_READY_SECONDS = 240.0  # for the coordinator to serve
_STOP_SECONDS = 20.0  # for the coordinator to end after SIGTERM
_LOAD_MARGIN_SECONDS = 300.0  # added to the timeout of a measurement under load
_WAITING = 2  # requests beyond those in flight, so that the coordinator always has a next one
_WARM_UP = 2  # uncounted answers, in multiples of the requests in flight: fills every stage


@dataclass
class _Entry:
    """One plan to measure, made by `strategy` once and deployed in every round; and its measurements."""

    label: str
    strategy: str
    wire: str = "exact"
    plan: GraphPlan | None = None
    predicted_seconds: float | None = None  # overrides the plan's own prediction
    like: _Entry | None = None  # an entry with the same plan, whose measurements are used
    seconds: list[float] = field(default_factory=list)
    answers: int = 0
    difference: float = 0.0
    errors: list[str] = field(default_factory=list)
    compute: list[dict[str, float]] = field(default_factory=list)  # by round, then device: busy seconds of one answer
    wire_stats: WireStats = field(default_factory=WireStats)  # of the last round

    def served(self, objective: Objective, mbit: float) -> Served:
        assert self.plan is not None
        if self.like is not None:
            return self.like.served(objective, mbit).model_copy(update={"label": self.label})
        predicted = self.plan.predicted
        seconds = predicted.bottleneck_seconds if objective == "throughput" else predicted.latency_seconds
        return Served(
            label=self.label,
            strategy=self.plan.planner,
            wire=self.wire,
            mbit=mbit,
            devices=tuple(device.name for device in self.plan.devices),
            segments=len(self.plan.body.segments),
            predicted_seconds=seconds if self.predicted_seconds is None else self.predicted_seconds,
            stage_seconds=tuple(device.compute_seconds for device in self.plan.devices),
            busy_seconds=tuple(
                statistics.median(each[device.name] for each in self.compute)
                for device in self.plan.devices
                if self.compute
            ),
            seconds=tuple(self.seconds),
            answers=self.answers,
            difference=self.difference,
            errors=tuple(self.errors),
            raw_bytes=self.wire_stats.raw_bytes,
            sent_bytes=self.wire_stats.sent_bytes,
        )


def repriced_seconds(spec: GraphSpec, plan: GraphPlan, mbit: float) -> float:
    """Simulated seconds of one request by a plan if every link has the rate `mbit`, with the plan's compute times."""
    ranks = range(plan.num_ranks)
    seconds = [[0.0] * plan.num_ranks for _ in range(spec.num_operators)]
    for segment in plan.body.segments:
        seconds[segment.operators[0]][segment.rank] += segment.seconds
    rate = mbit * 1e6 / 8
    cluster = GraphCluster(
        devices=tuple(ClusterDevice(each.device_id, each.name, each.budget_bytes) for each in plan.devices),
        seconds=tuple(map(tuple, seconds)),
        bytes_per_second=tuple(tuple(math.inf if a == b else rate for b in ranks) for a in ranks),
        latency_seconds=tuple((0.0,) * plan.num_ranks for _ in ranks),
        measured=True,
    )
    return predict_segments(spec, plan.body.segments, cluster, ranks, values=plan.wire.values).latency_seconds


def _alike(one: GraphPlan | None, other: GraphPlan | None) -> bool:
    """Whether the same operators run on the same devices."""
    if one is None or other is None:
        return False

    def placed(plan: GraphPlan) -> list[tuple[str, tuple[int, ...]]]:
        return [(plan.devices[segment.rank].device_id, segment.operators) for segment in plan.body.segments]

    return placed(one) == placed(other)


class GraphsBench:
    """Runs on a started testbed with agents on all devices except the hub."""

    def __init__(self, testbed: Testbed, rounds: int, time_limit_seconds: float, report: Callable[[str], None]) -> None:
        """`time_limit_seconds`: passed to `hearth plan --time-limit`."""
        self._testbed, self._rounds, self._report = testbed, rounds, report
        self._time_limit = f"{time_limit_seconds:g}"
        self._num_devices = len(testbed.scenario.devices) - 1
        self._clients = ClientProcess(testbed, "graphs_clients")
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
        """Measure one device and the pipelines, each for `seconds` at full load in every round.

        `dims`: passed to `hearth serve --dim`.
        """
        self._dims = [option for dim in dims for option in ("--dim", dim)]
        self._testbed.set_mbit(mbit)
        self._forget(model)
        one = _Entry("one device", ONE_DEVICE)
        pipelines = [_Entry(f"{strategy}, {wire}", strategy, wire) for strategy in strategies for wire in wires]

        def measure(entry: _Entry, plan: GraphPlan) -> Mapping[str, Any]:
            at_once = requests_in_flight(plan.body.segments)
            answered = self._clients.call(
                "load", seconds + _LOAD_MARGIN_SECONDS, at_once=at_once + _WAITING, warm_up=_WARM_UP * at_once,
                seconds=seconds,
            )  # fmt: skip
            entry.seconds.append(interval_seconds(answered["done"]))
            entry.answers += len(answered["done"])
            entry.compute.append(answered["compute"])
            return answered

        for entry in (one, *pipelines):
            entry.plan = self._planned(model, "throughput", entry)
        self._in_rounds(model, "throughput", [one, *pipelines], measure, mbit, mbit)
        return one.served("throughput", mbit), [each.served("throughput", mbit) for each in pipelines]

    def latency(
        self, model: Path, mbits: Sequence[float], requests: int
    ) -> Iterator[tuple[Served, Served, Served, Served | None]]:
        """Yield for each link rate: one device, moirai, auto, and a forced plan where moirai predicts no gain.

        The forced plan is moirai's for a faster link, so give rates in falling order. Weights are loaded at the first rate.
        Equal plans are measured once.
        """
        self._dims = []
        spread: GraphPlan | None = None
        for mbit in mbits:
            self._testbed.set_mbit(mbit)
            self._forget(model)
            entries = [
                _Entry(f"{name} at {mbit:g} Mbit/s", strategy)
                for name, strategy in (("one device", ONE_DEVICE), ("moirai", "moirai"), ("auto", "auto"))
            ]
            for entry in entries:
                entry.plan = self._planned(model, "latency", entry)
            one, moirai, auto = entries
            assert one.plan is not None
            assert moirai.plan is not None
            forced = None
            if one.plan.predicted.latency_seconds > NO_GAIN * moirai.plan.predicted.latency_seconds:
                spread = moirai.plan
            elif spread is not None:
                forced = _Entry(f"moirai's plan of the faster link, at {mbit:g} Mbit/s", "moirai", plan=spread)
                forced.predicted_seconds = repriced_seconds(open_graph(model, {}).spec, spread, mbit)
            distinct: list[_Entry] = []
            for entry in [*entries, *([forced] if forced else [])]:
                entry.like = next((each for each in distinct if _alike(each.plan, entry.plan)), None)
                if entry.like is None:
                    distinct.append(entry)
            self._in_rounds(model, "latency", distinct, self._latencies(requests), mbit, mbits[0])
            yield (
                one.served("latency", mbit),
                moirai.served("latency", mbit),
                auto.served("latency", mbit),
                forced.served("latency", mbit) if forced else None,
            )

    def _latencies(self, requests: int) -> Callable[[_Entry, GraphPlan], Mapping[str, Any]]:
        def measure(entry: _Entry, plan: GraphPlan) -> Mapping[str, Any]:
            answered = self._clients.call("one_by_one", _LOAD_MARGIN_SECONDS, count=requests)
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
        mbit: float,
        loading_mbit: float,
    ) -> None:
        """Deploy and measure all entries in rounds; deploy at `loading_mbit`, because loading on a slow link takes minutes."""
        for number in range(self._rounds):
            for entry in rotated(entries, number):
                self._report(f"round {number + 1} of {self._rounds}: {entry.label}: planning and loading")
                self._testbed.set_mbit(loading_mbit)
                coordinator, plan = self._serve(model, objective, entry)
                try:
                    self._testbed.set_mbit(mbit)
                    self._report(f"round {number + 1} of {self._rounds}: {entry.label}: measuring")
                    self._keep_to_itself(coordinator.pid)
                    answered = measure(entry, plan)
                    entry.wire_stats = WireStats.model_validate(self._clients.ready_status(_READY_SECONDS)["wire"])
                finally:
                    self._stop(coordinator)
                entry.difference = max(entry.difference, answered["difference"])
                entry.errors += answered["errors"]

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _planned(self, model: Path, objective: Objective, entry: _Entry) -> GraphPlan:
        """Plan with `hearth plan`, which caches its profiles. Raises InternalError with its error text."""
        self._report(f"{entry.label}: planning")
        scenario, path = self._testbed.scenario, self._testbed.folder / "plan.json"
        others = [each.name for each in scenario.devices if each.name != scenario.coordinator_device]
        self._testbed.hearth(
            "plan", str(model), "--objective", objective, "--strategy", entry.strategy, "--wire", entry.wire, *self._dims,
            "--time-limit", self._time_limit, "--devices", ",".join(map(self._testbed.address, others)), "--save", str(path),
        )  # fmt: skip
        plan = plan_from_json(path.read_bytes(), GraphPlan)
        path.unlink()
        return plan

    def _serve(self, model: Path, objective: Objective, entry: _Entry) -> tuple[Popen[bytes], GraphPlan]:
        """Start the coordinator with the entry's plan. Raises InternalError with the end of its log."""
        options = [
            str(model), "--objective", objective, "--wire", entry.wire, "--min-devices", str(self._num_devices),
            "--strategy", entry.strategy, *self._dims,
        ]  # fmt: skip
        assert entry.plan is not None
        path = self._testbed.folder / "plan.json"
        path.write_text(entry.plan.model_dump_json())
        options += ["--plan", str(path)]
        coordinator = self._testbed.start_coordinator(*options)
        try:
            return coordinator, GraphPlan.model_validate(self._clients.ready_status(_READY_SECONDS)["plan"])
        except HearthError:
            self._stop(coordinator)
            raise

    def _keep_to_itself(self, coordinator: int) -> None:
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

    @staticmethod
    def _stop(coordinator: Popen[bytes]) -> None:
        """Stop the coordinator, which unloads the workers and releases its leases."""
        coordinator.terminate()
        try:
            coordinator.wait(_STOP_SECONDS)
        except TimeoutExpired:
            coordinator.kill()
            coordinator.wait(_STOP_SECONDS)

    def _forget(self, model: Path) -> None:
        self._report(f"reading {model.name}")
        self._clients.call("forget")
        self._forget_links()

    def _forget_links(self) -> None:
        """Drop the coordinator's cached links, because the link rate has changed."""
        for path in (self._testbed.folder / "coordinator" / "profiles").glob("link-*.json"):
            path.unlink()
