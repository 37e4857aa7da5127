"""Kinds `graph-throughput` and `graph-latency`: ONNX graphs planned and served by the real coordinator, agents and workers.

Throughput: inferences per second of one device and of pipelines at full load, and the predicted against the measured
bottleneck. Latency: seconds of one request at a fast and a slow link rate, for one device, `moirai` and `auto`, and whether
the simulator predicts the fastest.

`GraphHome` deploys plans of one graph in turn, and measures them. Each plan is made once and deployed again in every round. The
order of the plans rotates from round to round, so that load from other virtual machines on the host affects all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from coordinator.models.graph_file import read_graph_file
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.predict import predict_segments, requests_in_flight
from coordinator.plan.methods import LOCAL
from hearth.plan.common import ValueFormatName
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan, plan_from_json
from hearth.platform.units import format_seconds
from tools.bench.experiment import Context, Experiment
from tools.bench.homes import agent_names, agents, hub_scenario, on_quietest_core, stop_coordinator
from tools.bench.processes import ClientProcess
from tools.bench.results import COUNT, PERCENT, RATIO, Finding, Record, Summary, Table, at_least, at_most, summarise
from tools.bench.stats import paired_ratio, rotated
from tools.graph_models import build, export
from tools.testbed import Testbed

PIPELINE = "pipeline-exact"
TARGET_GAIN = 2.2  # inferences per second of three devices over one
TARGET_ERROR = 0.15  # relative error of the predicted bottleneck
NO_GAIN = 1.01  # below this gain the planner uses fewer devices
# Largest accepted difference for each wire format, relative to the largest output value. `exact` allows for other kernels
# and summation orders, not for a wrong tensor; the others for the rounding of their values.
_TOLERANCE = {"exact": 1e-4, "fp16": 0.02, "bf16": 0.1, "int8": 0.3}
_DEVICES, _CORES = 3, 0.45  # not counting the hub; CPU share of each, of one core
_MBIT, _SLOW_MBIT = 60.0, 4.0  # real rates of every link
_RESNET = "resnet50"  # a network of `tools.graph_models`
_BRANCH_WIDTH = 256  # channels of each branch of the other one; compute grows with the square
_WAITING = 2  # requests beyond those in flight, so that the coordinator always has a next one
_WARM_UP = 2  # uncounted answers, in multiples of the requests in flight: fills every stage


_READY_SECONDS = 240.0  # for the coordinator to serve: profiling, planning and loading on slow devices
_AHEAD_SECONDS = 1.0  # limit of a search for a plan that is made ahead, for the loss of a device; none is needed here
_LOAD_SECONDS = 600.0  # timeout of a measurement, with requests on slow devices


class Round(Record):
    """Measurements of a plan that was deployed once."""

    seconds: float  # per answer of a full pipeline (throughput), or of one request (latency)
    answers: int
    difference: float = 0.0  # largest difference from the output of one device, relative to its largest value


class Served(Record):
    """A plan and its measurements."""

    label: str
    strategy: str
    wire: str
    mbit: float | None = Field(gt=0)  # of every link; None: the scenario's
    devices: tuple[str, ...]
    segments: int
    predicted_seconds: float
    stage_seconds: tuple[float, ...] = ()  # by rank, predicted; includes the CPU time of communication
    rounds: list[Round] = Field(default_factory=list)

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


# ---- the experiments --------------------------------------------------------------------------------------------------


class _Graphs(Experiment[Served]):
    """Settings of both kinds."""

    rounds: int = Field(3, ge=1)  # each plan is deployed and measured once per round
    time_limit: float = Field(10.0, gt=0)  # seconds of each plan search

    @contextmanager
    def _home(
        self, context: Context, objective: Objective, network: str, branch_width: int | None = None
    ) -> Iterator[tuple[GraphHome, GraphSpec]]:
        """Devices that can serve a network of `tools.graph_models` with random weights, and its graph."""
        with agents(hub_scenario(_DEVICES, _MBIT, _CORES), context.folder) as testbed:
            context.report(f"making {network}")
            model = export(build(network, branch_width=branch_width), context.folder / f"{network}.onnx")
            with on_quietest_core(testbed.scenario), GraphHome(testbed, model, objective, context.report) as home:
                yield home, read_graph_file(model, {}).spec

    def _title(self) -> str:
        return f"{_DEVICES} devices of {_CORES:g} core, {_MBIT:g} Mbit/s, {self.rounds} rounds"


class GraphThroughput(_Graphs):
    """One device and pipelines at full load."""

    wires: tuple[ValueFormatName, ...] = Field(min_length=1)
    seconds: float = Field(ge=1)  # of full load in each round

    def measure(self, context: Context) -> Iterator[Served]:
        with self._home(context, "throughput", _RESNET) as (home, _):
            candidates = [home.make_plan("one device", LOCAL, self.time_limit)]
            for wire in self.wires:
                candidates.append(home.make_plan(f"{PIPELINE}, {wire}", PIPELINE, self.time_limit, wire))
            yield from home.measure(candidates, self._load, self.rounds)

    def _load(self, plan: GraphPlan) -> Mapping[str, Any]:
        at_once = requests_in_flight(plan.body.segments)
        return {"at_once": at_once + _WAITING, "warm_up": _WARM_UP * at_once, "seconds": self.seconds, "count": 2}

    def summary(self, rows: Sequence[Served]) -> Summary:
        one, *pipelines = rows
        table = served_table(f"{_RESNET}; seconds for each answer at full load", rows)
        return summarise(self._title(), of_pipelines(one, pipelines) if pipelines else [], table)


class GraphLatency(_Graphs):
    """One request at a time through a network of two branches, at two link rates."""

    requests: int = Field(ge=1)  # sequential ones in each round

    def measure(self, context: Context) -> Iterator[Served]:
        """For each rate: one device, moirai, auto and, where moirai predicts no gain, its plan for the faster link."""
        one_by_one = {"at_once": 1, "warm_up": 1, "count": self.requests}
        faster: GraphPlan | None = None
        with self._home(context, "latency", "two_branch", _BRANCH_WIDTH) as (home, spec):
            for mbit in (_MBIT, _SLOW_MBIT):
                home.set_mbit(mbit)
                at = f"at {mbit:g} Mbit/s"
                candidates = [
                    home.make_plan(f"{label} {at}", strategy, self.time_limit)
                    for label, strategy in (("one device", LOCAL), ("moirai", "moirai"), ("auto", "auto"))
                ]
                one, moirai, _ = (candidate.served for candidate in candidates)
                if predicts_gain(one, moirai):
                    faster = candidates[1].plan
                elif faster is not None:
                    seconds = repriced_seconds(spec, faster, mbit)
                    label = f"moirai's plan of the faster link, {at}"
                    candidates.append(home.candidate(label, faster, seconds))
                yield from home.measure(candidates, lambda _: one_by_one, self.rounds)

    def summary(self, rows: Sequence[Served]) -> Summary:
        groups = [[row for row in rows if row.mbit == mbit] for mbit in dict.fromkeys(row.mbit for row in rows)]
        table = served_table(f"two_branch of width {_BRANCH_WIDTH}; seconds of one request alone", rows)
        return summarise(self._title(), of_placements([group for group in groups if len(group) >= 3]), table)


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


def of_pipelines(one: Served, pipelines: Sequence[Served]) -> list[Finding]:
    """Findings of pipelines against one device."""
    best = max(pipelines, key=lambda each: paired_ratio(one.seconds, each.seconds).median)
    worst = max((one, *pipelines), key=lambda each: abs(each.error))
    figure = f"bottleneck, predicted against measured, where they differ most: {worst.label}"
    return [
        gain(f"{best.label}: inferences a second, over one device's", best, one, TARGET_GAIN),
        at_most(figure, abs(worst.error), TARGET_ERROR, PERCENT, f"{worst.error:+.1%}"),
        *of_answers((one, *pipelines)),
    ]


def of_placements(groups: Sequence[Sequence[Served]]) -> list[Finding]:
    """Findings by link rate; each group: one device, moirai, auto and, if there is one, a forced plan.

    Where several devices are predicted to win, they must be faster. Where one device is, `auto` must take one, and the
    forced plan, which is on several devices, must be slower.
    """
    findings: list[Finding] = []
    winners: set[str] = set()
    for one, moirai, auto, *forced in groups:
        if predicts_gain(one, moirai):
            winners.add("several devices")
            findings += [gain(f"{each.label}: latency under one device's", each, one) for each in (moirai, auto)]
        else:
            winners.add("one device")
            figure = f"{auto.label}: devices where no plan on several is predicted to be faster"
            findings.append(at_most(figure, len(auto.devices), 1, COUNT))
            findings += [gain(f"{one.label}: latency under that of {each.label}", one, each) for each in forced]
    findings += of_answers([each for group in groups for each in group])
    figure = "rates at which several devices win, and at which one does, according to the simulator"
    missing = {"several devices", "one device"} - winners
    measured = f"none for {', '.join(sorted(missing))}" if missing else "both"
    return [*findings, Finding(figure=figure, measured=measured, target="both", holds=not missing)]


def of_answers(served: Sequence[Served]) -> list[Finding]:
    """Findings on the correctness of the answers."""
    findings = []
    for wire in dict.fromkeys(each.wire for each in served):
        own = [each for plan in served if plan.wire == wire for each in plan.rounds]
        worst, answers = max(each.difference for each in own), sum(each.answers for each in own)
        figure = f"largest difference of an output from one device's, of its largest value ({wire} on the wire)"
        findings.append(at_most(figure, worst, _TOLERANCE[wire], "{:.1e}".format, f"{answers} answers"))
    return findings


def predicts_gain(one: Served, placed: Served) -> bool:
    """Whether the placement is predicted to be faster on several devices than on one."""
    return len(placed.devices) > 1 and one.predicted_seconds > NO_GAIN * placed.predicted_seconds


def gain(figure: str, faster: Served, slower: Served, target: float = 1.0) -> Finding:
    """How many times as fast a plan is."""
    expected = slower.predicted_seconds / faster.predicted_seconds
    measured = paired_ratio(slower.seconds, faster.seconds)
    detail = f"{measured.interval}; predicted {expected:.2f}"
    return at_least(figure, measured.median, target, RATIO, detail)


def served_table(title: str, rows: Sequence[Served]) -> Table:
    """The measurements, one row for each plan. The first plan at each link rate is that of one device."""
    ones = {each.mbit: each for each in reversed(rows)}
    columns: Mapping[str, Callable[[Served], object]] = {
        "plan": lambda each: each.label,
        "strategy": lambda each: each.strategy,
        "devices": lambda each: ", ".join(each.devices),
        "segments": lambda each: each.segments,
        "stages, predicted": lambda each: " + ".join(map(format_seconds, each.stage_seconds)),
        "predicted": lambda each: format_seconds(each.predicted_seconds),
        "measured": lambda each: format_seconds(each.median_seconds),
        "predicted off by": lambda each: f"{each.error:+.1%}",
        "answers a second": lambda each: f"{1 / each.median_seconds:.2f}",
        "times one device's": lambda each: paired_ratio(ones[each.mbit].seconds, each.seconds),
    }
    return Table.of_columns(title, columns, rows)
