"""Kind `doppler-real`: a task graph of Doppler's evaluation, served by real agents on emulated devices in many plans.

Besides the planners' plans, variations of the best one are measured, so that predicted and measured seconds can be
correlated. All answers are compared with the uncut network in numpy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.plan.graph.build import build_plan
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.methods import LOCAL
from coordinator.plan.solution import OperatorAssignment, Solution
from hearth.plan.plan import GraphPlan
from tools.bench.doppler.correlation import rank_correlation
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.findings import Finding, at_least, summarise, within
from tools.bench.graph_clients import save_example
from tools.bench.graph_findings import gain, of_answers, served_table
from tools.bench.graph_home import Candidate, GraphHome, Served
from tools.bench.homes import agents, hub_scenario, on_quietest_core
from tools.bench.results import Summary
from tools.bench.tensor.graphs import HOME, ChainSizes, FfnnSizes, GraphName, GraphSizes, LlamaSizes, tensor_graph
from tools.bench.tensor.onnx import write_onnx
from tools.bench.tensor.sharding import ShardedGraph
from tools.bench.tensor.values import expected_result, request, result_blocks

VARIED = "varied"
_TARGET_GAINS = {"chain-mm": 3.0, "llama-layer": 2.4}  # over the best device, of four equal ones on gigabit links
_TARGET_MBIT = 900.0
_TARGET_ERROR = 0.15  # of predicted against measured seconds
_TARGET_CORRELATION = 0.90
_NEAR = 1.5  # a plan is near the best one if it takes at most this many times as long
_FAR = 5.0  # slower plans are not measured
_ATTEMPTS_PER_VARIATION = 50
_SEED = 1  # of the variations
_SIZES = {"quarter": 0.25, "half": 0.5, "home": 1.0, "double": 2.0}


class DopplerReal(Experiment):
    """One graph on one home of four devices."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(Served)
    PAGE = "doppler"
    NAMED: ClassVar[Named] = {"doppler-real": {"title": "A task graph of Doppler's evaluation on four devices"}}

    graph: GraphName = "chain-mm"
    sizes: Literal["quarter", "half", "home", "double"] = "home"  # double: computing grows more than transfers do
    speeds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)  # of the devices, relative to `cores`
    cores: float = Field(0.45, gt=0, le=1)  # CPU share of a device of speed 1, of one core
    mbit: float = Field(940.0, ge=0.1)  # real rate of every link
    strategies: tuple[str, ...] = Field(("critical-path", "moirai", "doppler"), min_length=1)
    time_limit: float = Field(30.0, gt=0)  # seconds of each plan search
    rounds: int = Field(3, ge=1)  # each planner's plan is deployed and measured once per round; variations once in all
    requests: int = Field(5, ge=1)  # sequential requests in each round
    near: int = Field(24, ge=0)  # variations predicted to take at most 1.5 times as long as the best plan
    far: int = Field(8, ge=0)  # slower variations

    def measure(self, context: Context) -> Iterator[Served]:
        sizes = _sized(self.sizes)
        graph = tensor_graph(self.graph, sizes)
        model = write_onnx(graph, context.folder / f"{self.graph}.onnx")
        expected = result_blocks(graph, expected_result(graph, sizes, seed=0))
        example = save_example(context.folder / "example.npz", request(graph, seed=0), expected)
        load = {"at_once": 1, "warm_up": 1, "count": self.requests, "example": str(example)}
        scenario = hub_scenario(len(self.speeds), self.cores)
        *devices, hub = scenario.devices
        unequal = [
            device.model_copy(update={"cpu_share": self.cores * speed})
            for device, speed in zip(devices, self.speeds, strict=True)
        ]
        scenario = scenario.model_copy(update={"devices": (*unequal, hub)})
        with (
            agents(scenario, context.folder, self.mbit) as testbed,
            on_quietest_core(testbed.scenario),
            GraphHome(testbed, model, "latency", context.report) as home,
        ):
            home.set_mbit(self.mbit)
            planned = [home.make_plan("one device", LOCAL, self.time_limit)]
            planned += [home.make_plan(each, each, self.time_limit) for each in self.strategies]
            file = read_graph_file(model, {})
            varied = self._variations(home, graph, file, home.cluster(file), planned)
            yield from home.measure(planned, lambda _: load, self.rounds, self.mbit)
            yield from home.measure(varied, lambda _: load, 1, self.mbit)

    def _variations(
        self,
        home: GraphHome,
        graph: ShardedGraph,
        file: GraphFile,
        cluster: GraphCluster,
        planned: Sequence[Candidate],
    ) -> list[Candidate]:
        """Variations of the plan that is predicted to be the fastest."""
        best = min(planned, key=lambda each: each.served.predicted_seconds).plan
        ranks, spec = cluster.rank_devices(best), file.spec
        device_of = {operator: ranks[rank] for operator, rank in best.body.ranks_of_operators().items()}
        vertices = {vertex.name: number for number, vertex in enumerate(graph.vertices)}
        names = [operator.name for operator in spec.operators]
        vertex_of = [vertices[name if name in vertices else name.rpartition("/")[0]] for name in names]
        base = [0] * len(vertices)
        for operator, vertex in enumerate(vertex_of):
            base[vertex] = device_of[operator]
        asked = GraphRequest(spec, cluster, model_hash=file.fingerprint)

        def plan(devices: Sequence[int]) -> GraphPlan:
            placed = OperatorAssignment(tuple(devices[vertex] for vertex in vertex_of))
            return build_plan(asked, Solution(placed, 0.0), VARIED)

        def seconds(devices: Sequence[int]) -> float:
            return plan(devices).predicted.latency_seconds

        found = varied_assignments(base, len(cluster.devices), seconds, self.near, self.far)
        return [
            home.candidate(f"variation {number}", "auto", made, made.predicted.latency_seconds)
            for number, made in enumerate(map(plan, found), 1)
        ]

    def summary(self, rows: Sequence[Served]) -> Summary:
        title = f"{self.graph} on devices of {self.cores:g} core x {self.speeds}, {self.mbit:g} Mbit/s"
        on_target = self.sizes == "home" and len(set(self.speeds)) == 1 and self.mbit >= _TARGET_MBIT
        findings = findings_of(rows, _TARGET_GAINS.get(self.graph, 1.0) if on_target else 1.0)
        return summarise(title, findings, served_table(f"{self.graph}; seconds of one request alone", rows))


def findings_of(rows: Sequence[Served], target_gain: float) -> list[Finding]:
    """Gains over the best device, predictions, correlation, answers. The first row is that of the best device. Pure."""
    one, *others = rows
    planned = [each for each in others if each.strategy != VARIED]
    findings = [
        gain(f"{each.label}: seconds of the best device, over its own", each, one, _target(each, target_gain))
        for each in planned
    ]
    for each in (one, *planned):
        findings.append(within(f"{each.label}: predicted against measured", each.error, _TARGET_ERROR))
    if len(others) > 2:
        predicted = [each.predicted_seconds for each in others]
        measured = [each.median_seconds for each in others]
        num_near = sum(each <= _NEAR * min(measured) for each in measured)
        detail = f"{len(others)} plans, {num_near} of them within {_NEAR:g} times the fastest"
        for name, correlation in (("Pearson", statistics.correlation), ("Spearman", rank_correlation)):
            figure = f"{name}, predicted and measured"
            value = correlation(predicted, measured)
            findings.append(at_least(figure, value, _TARGET_CORRELATION, "{:.3f}".format, detail))
    return [*findings, *of_answers(rows)]


def _target(served: Served, target_gain: float) -> float:
    return target_gain if served.label == "doppler" else 1.0


def varied_assignments(
    base: Sequence[int], num_devices: int, seconds: Callable[[Sequence[int]], float], near: int, far: int
) -> list[tuple[int, ...]]:
    """Assignments with some of their vertices on other devices: `near` and `far` ones, as far as a search finds them."""
    random = np.random.default_rng(_SEED)
    limit, found = seconds(base), {True: dict[tuple[int, ...], None](), False: dict[tuple[int, ...], None]()}
    wanted = {True: near, False: far}
    for attempt in range(_ATTEMPTS_PER_VARIATION * (near + far)):
        if all(len(found[each]) >= wanted[each] for each in found):
            break
        moved = list(base)
        for vertex in random.choice(len(base), 1 + attempt % max(len(base) // 2, 1), replace=False):
            moved[vertex] = int(random.integers(num_devices))
        ratio = seconds(moved) / limit
        kind = ratio <= _NEAR
        if ratio <= _FAR and len(found[kind]) < wanted[kind] and moved != list(base):
            found[kind][tuple(moved)] = None
    return [*found[True], *found[False]]


def _sized(sizes: str) -> GraphSizes:
    factor = _SIZES[sizes]
    chain, ffnn, llama = HOME
    return GraphSizes(
        ChainSizes(round(chain.rows * factor)),
        FfnnSizes(round(ffnn.batch * factor), ffnn.features, round(ffnn.hidden * factor)),
        LlamaSizes(
            round(llama.rows * factor),
            round(llama.hidden * factor),
            llama.heads,
            round(llama.feed_forward * factor),
            round(llama.vocabulary * factor),
        ),
    )
