"""Kinds `graph-throughput` and `graph-latency`: ONNX graphs planned and served by the real coordinator, agents and workers.

Throughput: inferences per second of one device and of pipelines at full load, and the predicted against the measured
bottleneck. Latency: seconds of one request at a fast and a slow link rate, for one device, `moirai` and `auto`, and whether
the simulator predicts the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field

from coordinator.models.graph_file import read_graph_file
from coordinator.plan.graph.cluster import ClusterDevice, GraphCluster
from coordinator.plan.graph.predict import predict_segments, requests_in_flight
from coordinator.plan.methods import LOCAL
from hearth.plan.common import ValueFormatName
from hearth.plan.graph import Objective
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_seconds
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.graph_home import GraphHome, Served
from tools.bench.homes import agents, hub_scenario, on_quietest_core
from tools.bench.results import Summary, Table
from tools.bench.stats import paired_ratio
from tools.graph_models import build, export

PIPELINE = "pipeline-exact"
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

    NAMED: ClassVar[Named] = {
        "graphs-throughput": {
            "title": "ResNet-50 as a pipeline of three devices", "wires": ["exact", "int8"], "seconds": 6,
        }
    }  # fmt: skip
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
        return summarise_served(f"{_RESNET}; seconds for each answer at full load; {self._title()}", rows)


class GraphLatency(_Graphs):
    """One request at a time through a network of two branches, at two link rates."""

    NAMED: ClassVar[Named] = {
        "graphs-latency": {
            "title": "A network of two branches at two link rates", "rounds": 2, "requests": 6, "time_limit": 5,
        }
    }  # fmt: skip
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
        title = f"two_branch of width {_BRANCH_WIDTH}; seconds of one request alone; {self._title()}"
        return summarise_served(title, rows)


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


def summarise_served(title: str, rows: Sequence[Served]) -> Summary:
    """The table. The run fails if an output is not that of one device."""
    wrong = [row.label for row in rows if row.difference > _TOLERANCE[row.wire]]
    failure = f"outputs differ too much from those of one device: {', '.join(wrong)}" if wrong else ""
    return Summary(tables=(served_table(title, rows),), failure=failure)


def predicts_gain(one: Served, placed: Served) -> bool:
    """Whether the placement is predicted to be faster on several devices than on one."""
    return len(placed.devices) > 1 and one.predicted_seconds > NO_GAIN * placed.predicted_seconds


def served_table(title: str, served: Sequence[Served]) -> Table:
    """The measurements, one row for each plan. The first plan at each link rate is that of one device."""
    ones = {each.mbit: each for each in reversed(served)}
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
        "answers": lambda each: sum(part.answers for part in each.rounds),
        "largest difference": lambda each: f"{each.difference:.1e}",
    }
    return Table.of_columns(title, columns, served)
