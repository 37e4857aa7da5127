"""Kinds `graph-throughput` and `graph-latency`: ONNX graphs planned and served by the real coordinator, agents and workers.

Throughput: inferences per second of one device and of pipelines at full load, and the predicted against the measured
bottleneck. Latency: seconds of one request at a fast and a slow link rate, for one device, `moirai` and `auto`, and whether
the simulator predicts the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from coordinator.models.graph_file import read_graph_file
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.predict import predict_segments, requests_in_flight
from coordinator.plan.methods import LOCAL
from hearth.errors import BadSetting
from hearth.plan.common import ValueFormatName
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_seconds
from hearth.wire.messages import WireStats
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.graph_home import GraphHome, Served
from tools.bench.homes import agents, hub_scenario, on_quietest_core
from tools.bench.results import COUNT, RATIO, Finding, Summary, Table, at_least, at_most, equal, summarise, within
from tools.bench.stats import paired_ratio
from tools.graph_models import build, export

PIPELINE = "pipeline-exact"
_TARGET_DEVICES = 3  # number of devices to which the target gain applies
_WAITING = 2  # requests beyond those in flight, so that the coordinator always has a next one
_TRACE_EVERY = 3  # one answer in this many is traced: enough for a median, and little more work
_WARM_UP = 2  # uncounted answers, in multiples of the requests in flight: fills every stage


class _Graphs(Experiment):
    """Settings of both kinds."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(Served)

    devices: int = Field(3, ge=2, le=4)  # not counting the hub
    cores: float = Field(0.45, gt=0, le=1)  # CPU share of each device, of one core
    mbit: float = Field(60.0, ge=0.1)  # real rate of every link
    rounds: int = Field(3, ge=1)  # each plan is deployed and measured once per round
    time_limit: float = Field(10.0, gt=0)  # seconds of each plan search

    @contextmanager
    def _home(
        self, context: Context, objective: Objective, network: str, branch_width: int | None = None
    ) -> Iterator[tuple[GraphHome, GraphSpec]]:
        """Devices that can serve a network of `tools.graph_models` with random weights, and its graph."""
        with agents(hub_scenario(self.devices, self.cores), context.folder, self.mbit) as testbed:
            context.report(f"making {network}")
            model = export(build(network, branch_width=branch_width), context.folder / f"{network}.onnx")
            with on_quietest_core(testbed.scenario), GraphHome(testbed, model, objective, context.report) as home:
                home.set_mbit(self.mbit)
                yield home, read_graph_file(model, {}).spec

    def _title(self) -> str:
        return f"{self.devices} devices of {self.cores:g} core, {self.mbit:g} Mbit/s, {self.rounds} rounds"


class GraphThroughput(_Graphs):
    """One device and pipelines at full load."""

    PAGE = "graphs"
    NAMED: ClassVar[Named] = {
        "graphs-throughput": {
            "title": "ResNet-50 as a pipeline of three devices",
            "wires": ["exact", "int8"],
            "seconds": 6,
        }
    }
    model: str = "resnet50"  # a network of tools.graph_models
    wires: tuple[ValueFormatName, ...] = Field(("exact", "fp16", "int8"), min_length=1)
    seconds: float = Field(8.0, ge=1)  # of full load in each round

    def measure(self, context: Context) -> Iterator[Served]:
        with self._home(context, "throughput", self.model) as (home, _):
            candidates = [home.make_plan("one device", LOCAL, self.time_limit)]
            for wire in self.wires:
                candidates.append(home.make_plan(f"{PIPELINE}, {wire}", PIPELINE, self.time_limit, wire))
            yield from home.measure(candidates, self._load, self.rounds, self.mbit)

    def _load(self, plan: GraphPlan) -> Mapping[str, Any]:
        at_once = requests_in_flight(plan.body.segments)
        return {
            "at_once": at_once + _WAITING, "warm_up": _WARM_UP * at_once, "seconds": self.seconds, "count": 2,
            "trace_every": _TRACE_EVERY,
        }  # fmt: skip

    def summary(self, rows: Sequence[Served]) -> Summary:
        one, *pipelines = rows
        target = TARGET_GAIN if self.devices == _TARGET_DEVICES else None
        findings = of_pipelines(one, pipelines, target) if pipelines else []
        table = served_table(f"{self.model}; seconds for each answer at full load", rows)
        return summarise(self._title(), findings, table)


class GraphLatency(_Graphs):
    """One request at a time through a network of two branches, at two link rates."""

    PAGE = "graphs"
    NAMED: ClassVar[Named] = {
        "graphs-latency": {
            "title": "A network of two branches at two link rates", "rounds": 2, "requests": 6, "time_limit": 5,
        }
    }  # fmt: skip
    slow_mbit: float = Field(4.0, ge=0.1)  # second, slower link rate
    branch_width: int = Field(256, ge=8, le=1024)  # channels of each branch; compute grows with the square
    requests: int = Field(10, ge=1)  # sequential requests in each round

    def measure(self, context: Context) -> Iterator[Served]:
        """For each rate: one device, moirai, auto and, where moirai predicts no gain, its plan for the faster link."""
        if self.slow_mbit >= self.mbit:
            raise BadSetting(setting="slow_mbit", reason=f"{self.slow_mbit:g} is not slower than mbit, {self.mbit:g}")
        one_by_one = {"at_once": 1, "warm_up": 1, "count": self.requests}
        faster: GraphPlan | None = None
        with self._home(context, "latency", "two_branch", self.branch_width) as (home, spec):
            for mbit in (self.mbit, self.slow_mbit):
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
                    candidates.append(home.candidate(label, "moirai", faster, seconds))
                yield from home.measure(candidates, lambda _: one_by_one, self.rounds, self.mbit)

    def summary(self, rows: Sequence[Served]) -> Summary:
        groups = [[row for row in rows if row.mbit == mbit] for mbit in dict.fromkeys(row.mbit for row in rows)]
        table = served_table(f"two_branch of width {self.branch_width}; seconds of one request alone", rows)
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


TARGET_GAIN = 2.2  # inferences per second of three devices over one
TARGET_ERROR = 0.15  # relative error of the predicted bottleneck
NO_GAIN = 1.01  # below this gain the planner uses fewer devices
# Largest accepted difference for each wire format, relative to the largest output value. `exact` allows for other kernels
# and summation orders, not for a wrong tensor; the others for the rounding of their values.
_TOLERANCE = {"exact": 1e-4, "fp16": 0.02, "bf16": 0.1, "int8": 0.3}


def of_pipelines(one: Served, pipelines: Sequence[Served], target_gain: float | None) -> list[Finding]:
    """Findings of pipelines against one device. `target_gain`: target for the best pipeline; None: no target."""
    findings = []
    if target_gain is not None:
        best = max(pipelines, key=lambda each: paired_ratio(one.seconds, each.seconds).median)
        findings.append(gain(f"{best.label}: inferences a second, over one device's", best, one, target_gain))
    worst = max((one, *pipelines), key=lambda each: abs(each.error))
    figure = f"bottleneck, predicted against measured, where they differ most: {worst.label}"
    return [*findings, within(figure, worst.error, TARGET_ERROR), *of_answers((one, *pipelines))]


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
            findings.append(equal(figure, len(auto.devices), 1, COUNT))
            findings += [gain(f"{one.label}: latency under that of {each.label}", one, each) for each in forced]
    findings += of_answers([each for group in groups for each in group])
    figure = "rates at which several devices win, and at which one does, according to the simulator"
    missing = {"several devices", "one device"} - winners
    measured = f"none for {', '.join(sorted(missing))}" if missing else "both"
    return [*findings, Finding(figure=figure, measured=measured, target="both", holds=not missing)]


def predicts_gain(one: Served, placed: Served) -> bool:
    """Whether the placement is predicted to be faster on several devices than on one."""
    return len(placed.devices) > 1 and one.predicted_seconds > NO_GAIN * placed.predicted_seconds


def of_answers(served: Sequence[Served]) -> list[Finding]:
    """Findings on the correctness of the answers."""
    findings = []
    for wire in dict.fromkeys(each.wire for each in served):
        own = [each for plan in served if plan.wire == wire for each in plan.rounds]
        worst, answers = max(each.difference for each in own), sum(each.answers for each in own)
        figure = f"largest difference of an output from one device's, of its largest value ({wire} on the wire)"
        findings.append(at_most(figure, worst, _TOLERANCE[wire], "{:.1e}".format, f"{answers} answers"))
    errors = [error for plan in served for each in plan.rounds for error in each.errors]
    findings.append(equal("requests that failed", len(errors), 0, COUNT, "; ".join(sorted(set(errors)))))
    return findings


def gain(figure: str, faster: Served, slower: Served, target: float = 1.0) -> Finding:
    """How many times as fast a plan is."""
    expected = slower.predicted_seconds / faster.predicted_seconds
    measured = paired_ratio(slower.seconds, faster.seconds)
    detail = f"{measured.interval}; predicted {expected:.2f}"
    return at_least(figure, measured.median, target, RATIO, detail)


def served_table(title: str, served: Sequence[Served]) -> Table:
    """The measurements, one row for each plan. The first plan at each link rate is that of one device."""
    ones = {each.mbit: each for each in reversed(served)}

    def over_one(each: Served) -> str:
        one = ones[each.mbit]
        if len(one.seconds) != len(each.seconds):  # not in the same rounds
            return f"{one.median_seconds / each.median_seconds:.2f}"
        return str(paired_ratio(one.seconds, each.seconds))

    def sent(each: Served) -> str:
        wire = WireStats.sum(part.wire for part in each.rounds)
        return f"{wire.sent_bytes / wire.raw_bytes:.0%}" if wire.raw_bytes else "-"

    columns: Mapping[str, Callable[[Served], object]] = {
        "plan": lambda each: each.label,
        "strategy": lambda each: each.strategy,
        "devices": lambda each: ", ".join(each.devices),
        "segments": lambda each: each.segments,
        "stages, predicted": lambda each: _stages(each.stage_seconds),
        "segments, measured": lambda each: _stages(each.busy_seconds),
        "predicted": lambda each: format_seconds(each.predicted_seconds),
        "measured": lambda each: format_seconds(each.median_seconds),
        "min..max": lambda each: f"{format_seconds(min(each.seconds))}..{format_seconds(max(each.seconds))}",
        "predicted off by": lambda each: f"{each.error:+.1%}",
        "answers a second": lambda each: f"{1 / each.median_seconds:.2f}",
        "times one device's": over_one,
        "sent, of raw": sent,
    }
    return Table.of_columns(title, columns, served)


def _stages(seconds: Iterable[float]) -> str:
    return " + ".join(map(format_seconds, seconds)) or "-"
