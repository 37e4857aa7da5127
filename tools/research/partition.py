"""Experiments `partition` and `partition-points`, of the paper of Parthasarathy and Krishnamachari.

`partition`: bottlenecks of the throughput planners in random clusters, as in the paper's Figures 7 to 10. Every run draws its
own communication graph, seeded by the seed, the setting and the run's number, and gives it to all planners. So a single run can
be repeated.

`partition-points`: where graphs can be cut into a pipeline (III-A): the points of Hearth (`candidate_chain`) next to those of
the paper's rule. Nothing is timed.

A partition holds its float32 weights and the outputs of its layers. Outputs must count, given the paper's figures: there
MobileNetV2, with 14 MB of weights, does not fit into 64 MB, and InceptionResNetV2, with 223 MB, not into five times 64 MB. A
transfer is the boundary tensor divided by lambda = 1.44 * 2.1; a node's rate depends on its distance to the router, and a link
is as fast as its slower end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coordinator.models.graph_file import read_graph_file
from coordinator.plan.graph.throughput.planners import best_stages
from coordinator.plan.graph.throughput.points import candidate_chain
from coordinator.plan.graph.throughput.problem import PipelineProblem, Stage, Stages, pipeline_problem, stages_from
from coordinator.plan.graph.throughput.published import NUM_CLASSES, Partitioning, equal_partitions, published_stages
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.graph_spec import GraphSpec
from hearth.platform.units import format_bytes
from tools.bench.experiment import Context, Experiment
from tools.bench.results import Record, Summary, Table
from tools.research.moirai import find_files

PIPELINE, EXACT, RANDOM, JOINT, ONE_START = "pipeline", "pipeline-exact", "random", "joint", "joint, one start"
SAME_CUTS = "joint, same partitions"  # with the partitions of `pipeline`
THEOREM, BOUND = "Theorem 1", "proven bound"
_PLANNERS = (PIPELINE, EXACT, JOINT, SAME_CUTS, ONE_START, RANDOM)

_FEWER_CLASSES = (2, 5, 8, 11, 14, 17)  # of Figure 7, besides NUM_CLASSES, which `pipeline` has elsewhere
RATIO_NODES, RATIO_MEMORY_MIB = 50, 64  # of Figure 10
_JOINT_NODES = 50  # number of nodes at which the paper compares with joint
_PAPER_RATIO = 1.092  # the paper's mean bottleneck of `pipeline` over Theorem 1's bound
_WITHIN = 1.09  # the same, rounded

Nodes = Annotated[int, Field(ge=1, le=256)]  # the planners' time grows with the nodes; the paper has up to 50
Count = Annotated[int, Field(ge=1)]


class PartitionRow(Record):
    """All runs of one setting. `seconds`: bottleneck or bound, by column and run; `planning_seconds`: by planner and run."""

    figures: Literal["7 to 9", "10"]
    model: str
    num_nodes: int
    memory_mib: int
    outcome: Literal["measured", "fits on one node", "does not fit"] = "does not fit"
    num_stages: int = 0  # of the published planner
    seconds: Mapping[str, tuple[float, ...]] = {}
    planning_seconds: Mapping[str, tuple[float, ...]] = {}

    @property
    def setting(self) -> tuple[object, ...]:
        return self.figures, self.model, self.num_nodes, self.memory_mib

    @property
    def num_runs(self) -> int:
        return len(self.seconds.get(PIPELINE, ()))

    @property
    def num_proven(self) -> int:
        return sum(bound >= exact for exact, bound in zip(self.seconds[EXACT], self.seconds[BOUND], strict=True))

    def mean(self, column: str) -> float:
        return fmean(self.seconds[column])

    def ratios(self, over: str, under: str) -> list[float]:
        """Ratio of two columns, by run."""
        return [a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True)]


class Partition(Experiment[PartitionRow]):
    """Partitioning and placement in random clusters. Nothing runs on devices, as in the paper; only planning takes time."""

    graphs: Path  # folder of graphs, JSON or ONNX
    models: tuple[str, ...] = ("MobileNetV2", "EfficientNetB1", "ResNet50", "InceptionResNetV2")  # of Figures 7 to 9
    runs: int = Field(50, ge=0)  # of each setting of Figures 7 to 9; 0 leaves them out
    ratio_runs: int = Field(1000, ge=0)  # of each graph in the folder, for Figure 10; 0 leaves it out
    nodes: tuple[Nodes, ...] = (5, 10, 15, 20, 50)
    memory_mib: tuple[Count, ...] = (64, 128, 256, 512)  # of each node
    seed: int = 1
    time_limit: float = Field(10.0, gt=0)  # seconds, of pipeline-exact in each run

    def measure(self, context: Context) -> Iterator[PartitionRow]:
        known = {row.setting: row for row in context.known}
        for row, spec in self._settings():
            yield known.get(row.setting) or self._measure(row, spec, context.report)

    def _settings(self) -> Iterator[tuple[PartitionRow, GraphSpec]]:
        """Rows without results, and their graphs."""
        compared = read_graphs(self.graphs, self.models) if self.runs else []
        bounded = read_graphs(self.graphs) if self.ratio_runs else []
        for spec, memory, count in product(compared, self.memory_mib, self.nodes):
            yield PartitionRow(figures="7 to 9", model=spec.name, num_nodes=count, memory_mib=memory), spec
        for spec in bounded:
            yield PartitionRow(figures="10", model=spec.name, num_nodes=RATIO_NODES, memory_mib=RATIO_MEMORY_MIB), spec

    def _measure(self, row: PartitionRow, spec: GraphSpec, report: Callable[[str], None]) -> PartitionRow:
        problem = problem_of(spec, row.memory_mib << 20, row.num_nodes)
        try:
            partitioning, _ = equal_partitions(problem)
        except ModelDoesNotFit:
            return row
        if not partitioning.transfers:
            return row.model_copy(update={"outcome": "fits on one node", "num_stages": 1})
        compared = row.figures == "7 to 9"
        classes, num_runs = (_FEWER_CLASSES, self.runs) if compared else ((), self.ratio_runs)
        runs = []
        for number in range(num_runs):
            report(f"{row.model}, {row.num_nodes} nodes of {row.memory_mib} MiB, run {number + 1} of {num_runs}")
            rng = Random(f"{self.seed} {row.model} {row.num_nodes} {row.memory_mib} {number}")
            drawn = draw_links(problem, rng)
            runs.append(_run(drawn, partitioning, classes, self.time_limit, rng))
        return row.model_copy(update={
            "outcome": "measured",
            "num_stages": len(partitioning.last),
            "seconds": _by_column([seconds for seconds, _ in runs]),
            "planning_seconds": _by_column([planning for _, planning in runs]),
        })  # fmt: skip

    def summary(self, rows: Sequence[PartitionRow]) -> Summary:
        compared, bounded = ([row for row in rows if row.figures == figures] for figures in ("7 to 9", "10"))
        tables = (
            _table("Mean bottleneck of pipeline, and of the others relative to it (Figures 8 and 9)", _COMPARISON, compared),
            _table("Mean bottleneck of pipeline by number of transfer classes (Figure 7)", _BY_CLASSES, compared),
            _table("Over the bound, mean over runs (Figure 10)", _OVER_BOUND, bounded),
        )  # fmt: skip
        said = tuple(conclusions(_measured(compared), _measured(bounded)))
        return Summary(conclusions=said, tables=tuple(table for table in tables if table.rows or table.notes))


def _measured(rows: Sequence[PartitionRow]) -> list[PartitionRow]:
    return [row for row in rows if row.num_runs]


# ---- one run ----------------------------------------------------------------------------------------------------------


def _run(
    problem: PipelineProblem, partitioning: Partitioning, classes: Sequence[int], time_limit: float, rng: Random
) -> tuple[dict[str, float], dict[str, float]]:
    """Bottlenecks and bounds by column, and planning times by planner, in seconds."""
    stages = {_with_classes(number): published_stages(problem, rng, number) for number in classes}
    began = time.perf_counter()
    stages[PIPELINE] = published_stages(problem, rng, NUM_CLASSES)
    published = time.perf_counter()
    exact = best_stages(problem, rng, lambda: time.perf_counter() > published + time_limit, [stages[PIPELINE]])
    planning = {PIPELINE: published - began, EXACT: time.perf_counter() - published}
    stages[EXACT] = exact.assignment
    stages[RANDOM] = random_stages(problem, rng)
    joint = [joint_stages(problem, device) for device in range(problem.num_devices)]
    stages[JOINT], stages[ONE_START] = min(joint, key=problem.bottleneck_seconds), rng.choice(joint)
    stages[SAME_CUTS] = nearest_stages(problem, partitioning)
    seconds = {column: problem.bottleneck_seconds(each) for column, each in stages.items()}
    return {**seconds, THEOREM: theorem_bound(problem, partitioning), BOUND: exact.bound}, planning


def _by_column(runs: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    return {column: tuple(run[column] for run in runs) for column in runs[0]}


def _with_classes(num_classes: int) -> str:
    return f"pipeline, {num_classes} classes"


def theorem_bound(problem: PipelineProblem, partitioning: Partitioning) -> float:
    """Theorem 1: the largest transfer over the fastest link; 0 for one partition.

    A lower bound for placements of these partitions, but not for other partitions.
    """
    return max(partitioning.transfers) / float(problem.link_rates.max()) if partitioning.transfers else 0.0


# ---- tables and conclusions -------------------------------------------------------------------------------------------

Columns = Mapping[str, Callable[[PartitionRow], object]]


def _seconds_cell(column: str) -> Callable[[PartitionRow], object]:
    return lambda row: f"{row.mean(column):.4g} s"


def _relative_cell(column: str) -> Callable[[PartitionRow], object]:
    return lambda row: f"{row.mean(column) / row.mean(PIPELINE):.3f}"


def _ratio_cell(over: str, under: str) -> Callable[[PartitionRow], object]:
    return lambda row: f"{fmean(row.ratios(over, under)):.3f}"


_PROVEN: Columns = {"proven": lambda row: f"{row.num_proven} of {row.num_runs}"}
_BOUNDED = tuple(product((PIPELINE, EXACT), (THEOREM, BOUND)))
_BY_CLASSES: Columns = {
    **{str(number): _seconds_cell(_with_classes(number)) for number in _FEWER_CLASSES},
    str(NUM_CLASSES): _seconds_cell(PIPELINE),
}
_OVER_BOUND: Columns = {
    **{f"{over} / {under}": _ratio_cell(over, under) for over, under in _BOUNDED},
    **{f"{over} / {PIPELINE}": _ratio_cell(over, PIPELINE) for over in (JOINT, ONE_START, RANDOM)},
    **_PROVEN,
}
_COMPARISON: Columns = {
    PIPELINE: _seconds_cell(PIPELINE),
    **{column: _relative_cell(column) for column in _PLANNERS[1:]},
    **_PROVEN,
}


def _table(title: str, columns: Columns, rows: Sequence[PartitionRow]) -> Table:
    """A table of the measured rows; notes name the settings that have no results."""
    setting: Columns = {
        "model": lambda row: row.model,
        "memory": lambda row: f"{row.memory_mib} MiB",
        "nodes": lambda row: row.num_nodes,
        "stages": lambda row: row.num_stages,
    }
    omitted: dict[str, list[str]] = {}
    for row in rows:
        if not row.num_runs:
            omitted.setdefault(row.outcome, []).append(f"{row.model} ({row.num_nodes} x {row.memory_mib} MiB)")
    notes = [f"{outcome}: {', '.join(settings)}" for outcome, settings in omitted.items()]
    return Table.of_columns(title, {**setting, **columns}, _measured(rows), notes)


def conclusions(compared: Sequence[PartitionRow], bounded: Sequence[PartitionRow]) -> Iterator[str]:
    """The measured figures, with the paper's where it has them."""
    rows, large = [*compared, *bounded], [row for row in compared if row.num_nodes == _JOINT_NODES]
    over_bound = {pair: [fmean(row.ratios(*pair)) for row in bounded] for pair in _BOUNDED}
    papers = {JOINT: " (paper: 35 %)", SAME_CUTS: "", ONE_START: ""}
    figures: dict[str, tuple[str, list[float]]] = {
        "random / pipeline (paper: about 10)": (".1f", [row.mean(RANDOM) / row.mean(PIPELINE) for row in compared]),
        **{f"pipeline below {column}, {_JOINT_NODES} nodes{paper}":
               (".0%", [1 - row.mean(PIPELINE) / row.mean(column) for row in large]) for column, paper in papers.items()},
        **{f"{planner} / {bound}": (".4f", ratios) for (planner, bound), ratios in over_bound.items()},
        f"graphs on which pipeline / {THEOREM} is at most {_WITHIN} (paper: about 75 %; {_PAPER_RATIO} on average)":
            (".0%", [ratio <= _WITHIN for ratio in over_bound[PIPELINE, THEOREM]]),
    }  # fmt: skip
    for planner in (PIPELINE, EXACT):
        times = [1e3 * seconds for row in rows for seconds in row.planning_seconds[planner]]
        figures[f"planning with {planner}, in ms"] = ".3g", times
    for figure, (form, values) in figures.items():
        if values:
            yield f"{figure}: {fmean(values):{form}} ({min(values):{form}} to {max(values):{form}}, {len(values)} values)"
    ratios = [ratio for row in rows for ratio in row.ratios(EXACT, PIPELINE)]
    worse, better = sum(ratio > 1 for ratio in ratios), sum(ratio < 1 for ratio in ratios)
    proven = sum(row.num_proven for row in rows)
    yield f"pipeline-exact in {len(ratios)} runs: {worse} worse than pipeline, {better} better, {proven} proven optimal"


# ---- where graphs can be cut ------------------------------------------------------------------------------------------


class PointsRow(Record):
    """One graph. The points exclude the source and include the sink."""

    graph: str
    num_operators: int
    num_points: int
    equals_rule: bool | None  # whether the points are those of the paper's rule; None: it is for one source
    largest_block: int  # operators between two points
    largest_block_bytes: int  # the most weights of a block

    @classmethod
    def of(cls, spec: GraphSpec) -> PointsRow:
        """The row of a graph."""
        found = candidate_chain(spec)
        has_one_source = sum(not before for before in spec.predecessors) == 1
        return cls(
            graph=spec.name,
            num_operators=spec.num_operators,
            num_points=len(found.points) - 1,
            equals_rule=found.points == published_points(spec) if has_one_source else None,
            largest_block=max(map(len, found.blocks)),
            largest_block_bytes=max(map(spec.parameter_bytes, found.blocks)),
        )

    @property
    def is_usable(self) -> bool:
        """Whether no block has more than half of the operators."""
        return 2 * self.largest_block <= self.num_operators


class PartitionPoints(Experiment[PointsRow]):
    """The points of every graph of a folder."""

    graphs: Path  # folder of graphs, JSON or ONNX

    def measure(self, context: Context) -> Iterator[PointsRow]:
        yield from map(PointsRow.of, read_graphs(self.graphs))

    def summary(self, rows: Sequence[PointsRow]) -> Summary:
        usable = sum(row.is_usable for row in rows)
        said = f"{usable} of {len(rows)} graphs have usable points: no block has more than half of the operators"
        return Summary(
            conclusions=(f"{said} (paper: 64 of 66)",), tables=(Table.of_columns("Partition points", COLUMNS, rows),)
        )


COLUMNS: Mapping[str, Callable[[PointsRow], object]] = {
    "graph": lambda row: row.graph,
    "operators": lambda row: row.num_operators,
    "points": lambda row: row.num_points,
    "as the rule": lambda row: {True: "yes", False: "no", None: "-"}[row.equals_rule],
    "largest block": lambda row: row.largest_block,
    "its weights": lambda row: format_bytes(row.largest_block_bytes),
    "usable": lambda row: "yes" if row.is_usable else "no",
}


def read_graphs(folder: Path, models: Sequence[str] = ()) -> list[GraphSpec]:
    """Read the graphs of a folder (JSON or ONNX) with these names, or all. Raises BadSetting, BadModelFile."""
    files = find_files("graphs", folder, (".json", ".onnx"))
    if unknown := [name for name in models if name not in files]:
        raise BadSetting(setting="models", reason=f"'{unknown[0]}' is none of {', '.join(files)}")
    return [read_graph_file(files[name], {}).spec for name in models or files]


def published_points(spec: GraphSpec) -> tuple[int, ...]:
    """Partition points by the paper's rule, for a graph with one source. Several sinks get a virtual one.

    u is the next point if no other operator has the same longest path length from the source (LP) and every path from the
    previous point goes through u (AP). Raises ValueError for several sources.
    """
    sources = [index for index, before in enumerate(spec.predecessors) if not before]
    if len(sources) != 1:
        raise ValueError(f"the rule is for one source; {spec.name} has {len(sources)}")
    virtual = spec.num_operators
    successors = [after or (virtual,) for after in spec.successors] + [()]
    longest = [0] * (virtual + 1)
    for operator, after in enumerate(successors):
        for each in after:
            longest[each] = max(longest[each], longest[operator] + 1)
    alone = {each for each in range(virtual) if longest.count(longest[each]) == 1}
    points = sources
    for operator in sorted(range(virtual), key=lambda each: (longest[each], each)):
        if operator in alone and operator not in points and _all_pass(successors, longest, points[-1], operator):
            points = [*points, operator]
    return tuple(points)


def _all_pass(successors: Sequence[Sequence[int]], longest: Sequence[int], start: int, goal: int) -> bool:
    """The paper's AP: depth first from `start`, no operator deeper than `goal` is reached before `goal`."""
    todo, seen = [start], {start, goal}
    while todo:
        for each in successors[todo.pop()]:
            if each not in seen:
                if longest[each] > longest[goal]:
                    return False
                seen.add(each)
                todo.append(each)
    return True


# ---- set-up of the paper (section IV): models, memory, random clusters; random and joint choice ------------------------

# Equation 12: the rate is log2(1 + A / distance^2) Mbit/s. A, in square metres, gives 5.5 Mbit/s at 80 m.
_A = 283_230.0
_RANGE_METRES, _NEAREST_METRES = 150.0, 1.0  # largest and smallest coordinate of a node, from the router
_ZFP, _LZ4 = 1.44, 2.1  # average compression ratios, equation 4


def problem_of(spec: GraphSpec, memory_bytes: int, num_nodes: int) -> PipelineProblem:
    """The problem without compute times, with equal memory on all nodes, and links still to be drawn."""
    chain = candidate_chain(spec)
    nodes = np.ones((num_nodes, num_nodes)).tolist()
    no_seconds = np.zeros((spec.num_operators, num_nodes)).tolist()
    problem = pipeline_problem(spec, no_seconds, [memory_bytes] * num_nodes, nodes, chain)
    outputs = [sum(each.num_bytes for operator in block for each in spec.produced[operator]) for block in chain.blocks]
    ends = np.cumsum([0, *outputs])
    return replace(
        problem,
        boundary_bytes=tuple(size / (_ZFP * _LZ4) for size in problem.boundary_bytes),
        stage_bytes=problem.stage_bytes + np.triu(ends[None, 1:] - ends[:-1, None]),
    )


def draw_links(problem: PipelineProblem, rng: Random) -> PipelineProblem:
    """The same problem in a random communication graph."""
    return replace(problem, rate=rates(positions(problem.num_devices, rng)))


def positions(num_nodes: int, rng: Random) -> NDArray[np.float64]:
    """[n, 2] metres from the router, each coordinate uniform in (-150, -1) and (1, 150)."""
    sides = [[rng.choice((-1, 1)) for _ in "xy"] for _ in range(num_nodes)]
    span = _RANGE_METRES - _NEAREST_METRES
    return np.array([[side * (_NEAREST_METRES + span * rng.random()) for side in node] for node in sides])


def rates(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, n] bytes per second; infinite on the diagonal."""
    ways = (places**2).sum(axis=1)
    found: NDArray[np.float64] = np.log2(1 + _A / np.maximum(ways[:, None], ways[None])) * 1e6 / 8
    np.fill_diagonal(found, math.inf)
    return found


# ---- the paper's baselines, for devices of equal memory that hold the graph -----------------------------------------------


def random_stages(problem: PipelineProblem, rng: Random) -> Stages:
    """Random devices in turn, each with a random partition that it can hold and that leaves the rest feasible."""
    devices = list(range(problem.num_devices))
    rng.shuffle(devices)
    return _stages_along(problem, reversed(devices), rng.choice)


def joint_stages(problem: PipelineProblem, start: int) -> Stages:
    """The greedy choice from one device on: the fewest bytes across each cut, then the fastest link to an unused device."""
    boundary_bytes = (*problem.boundary_bytes, 0.0)
    return _stages_along(
        problem, _nearest_walk(problem, start), lambda ends: min(ends, key=lambda each: (boundary_bytes[each], -each))
    )


def nearest_stages(problem: PipelineProblem, partitioning: Partitioning) -> Stages:
    """The joint baseline with these partitions: the greedy walk over devices with the lowest bottleneck, of all starts."""
    walks = (_nearest_walk(problem, start) for start in range(problem.num_devices))
    found = (stages_from(partitioning.last, list(islice(walk, len(partitioning.last)))) for walk in walks)
    return min(found, key=problem.bottleneck_seconds)


def _nearest_walk(problem: PipelineProblem, start: int) -> Iterator[int]:
    """All devices: after each, the unused one with the fastest link from it."""
    device, unused = start, set(range(problem.num_devices)) - {start}
    yield device
    while unused:
        rates = problem.rate[device]
        device = max(unused, key=lambda each: (rates[each], -each))
        unused.remove(device)
        yield device


def _stages_along(problem: PipelineProblem, devices: Iterable[int], choose: Callable[[list[int]], int]) -> Stages:
    """Stages on these devices, one after the other.

    `choose` takes the last block of each, among those after which the remaining devices can still hold the rest.
    """
    last_block = [problem.last_block(first, problem.memory_bytes[0]) for first in range(problem.num_blocks)]
    needed = [0] * (problem.num_blocks + 1)  # by block: the least number of devices for it and all after it
    for first in reversed(range(problem.num_blocks)):
        needed[first] = 1 + needed[last_block[first] + 1]  # a longer stage leaves less for the others
    stages: list[Stage] = []
    first = 0
    for num_used, device in enumerate(devices, 1):
        left = problem.num_devices - num_used
        last = choose([each for each in range(first, last_block[first] + 1) if needed[each + 1] <= left])
        stages.append(Stage(first, last, device))
        first = last + 1
        if first == problem.num_blocks:
            break
    return tuple(stages)
