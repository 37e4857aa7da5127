"""Experiment `coarsening`: gains and losses of Moirai's coarsening (GCOF) on ONNX files.

Every graph is timed on this machine by the agents' profiler. The assumed devices are slower by fixed factors and have fixed
links. The plan of the coarsened graph is simulated on the original one, so that both plans are priced alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from coordinator.devices.graph_profiling import graph_workload, operator_seconds
from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.plan.graph.latency.coarsening import CoarseGraph, coarsen
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule
from hearth.plan.graph_spec import GraphSpec
from hearth.wire.messages import GraphProfile
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.results import Record, Summary, Table
from tools.research.moirai import MOIRAI, MoiraiRow, find_files, plan_with_all

SLOWDOWNS = (8.0, 8.0, 12.0, 16.0)  # of the assumed devices against one core of this machine
_MBIT_PER_SECOND = 1000.0  # between any two devices: gigabit Ethernet
_LATENCY_SECONDS = 0.0002  # of each transfer: a fraction of a millisecond, as in a switched network
_ROUNDING = 1e-9  # relative: sums of floats in another order


class CoarseningRow(Record):
    """One network, planned as it is (`fine`) and coarsened (`coarse`). Times in seconds."""

    fine: MoiraiRow
    coarse: MoiraiRow  # its planning time includes that of coarsening
    num_kernels: int  # that onnxruntime runs on a CPU
    refined_makespan: float  # of the coarse plan on the original graph

    @property
    def loss(self) -> float:
        """Additional time of the coarse plan, relative to the fine one; negative if coarsening found the better plan."""
        return self.refined_makespan / self.fine.makespans[MOIRAI] - 1

    @property
    def worse_than_baseline(self) -> bool:
        """Whether moirai's plan of one of the graphs is."""
        return any(each.makespans[MOIRAI] > each.best_baseline * (1 + _ROUNDING) for each in (self.fine, self.coarse))


class Coarsening(Experiment):
    """Operators, planning time and loss with Moirai's coarsening."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(CoarseningRow)
    # `onnx`: a folder of ONNX files. `python -m tools.graph_models resnet50 --out models/resnet50.onnx` makes one; so for bert,
    # efficientnet_b0, mobilenet_v2, two_branch and vit. Name another folder with --set onnx=DIR.
    PAGE = "moirai"
    NAMED: ClassVar[Named] = {
        "coarsening": {
            "title": "Coarsening of graphs before placement (Moirai)", "source": "Moirai, arXiv 2312.04025, Algorithm 1",
            "onnx": "models", "time_limit": 30,
        }
    }  # fmt: skip

    onnx: Path  # folder of ONNX files
    time_limit: float = Field(60.0, gt=0)  # seconds, of moirai for each graph

    def measure(self, context: Context) -> Iterator[CoarseningRow]:
        for name, path in find_files("onnx", self.onnx, (".onnx",)).items():
            context.report(f"{name}: profiling")
            graph = read_graph_file(path, {})
            profiled = profile(graph, context.folder / name)
            context.report(f"{name}: planning")
            yield self.compare(graph.spec, operator_seconds(graph.spec, profiled), len(profiled.kernels))

    def compare(self, spec: GraphSpec, seconds: Sequence[float], num_kernels: int) -> CoarseningRow:
        """Plan a graph with and without coarsening. `seconds`: of each operator on one core of this machine."""
        on_each = on_devices(seconds)
        fine = problem_on_devices(spec, on_each)
        began = time.monotonic()
        coarsened = coarsen(spec)
        coarse = problem_on_devices(coarsened.spec, coarsened.group_seconds(on_each))
        coarsening_seconds = time.monotonic() - began
        row, schedule = plan_with_all(coarse, self.time_limit)
        return CoarseningRow(
            fine=plan_with_all(fine, self.time_limit)[0],
            coarse=row.model_copy(update={"planning_seconds": coarsening_seconds + row.planning_seconds}),
            num_kernels=num_kernels,
            refined_makespan=refined_schedule(fine, spec, coarsened, schedule).makespan,
        )

    def summary(self, rows: Sequence[CoarseningRow]) -> Summary:
        table = Table.of_columns("Moirai's plans of each graph, as it is (fine) and coarsened", _COLUMNS, rows)
        proven = [row for row in rows if row.fine.proven and row.coarse.proven]  # neither search reached the time limit
        said = []
        if proven:
            share = statistics.fmean(row.coarse.planning_seconds / row.fine.planning_seconds for row in proven)
            said = [
                f"planning takes {share:.0%} of the time with coarsening, on average of those proven (paper: 72%)",
                f"coarsening loses at most {max(row.loss for row in proven):.3%} where both plans are proven",
            ]
        worse = any(row.worse_than_baseline for row in rows)
        failure = "moirai is worse than a baseline; the rows are marked" if worse else ""
        return Summary(conclusions=tuple(said), tables=(table,), failure=failure)


_COLUMNS: Mapping[str, Callable[[CoarseningRow], object]] = {
    "network": lambda row: row.fine.instance,
    "operators": lambda row: row.fine.num_operators,
    "onnxruntime runs": lambda row: row.num_kernels,
    "coarsened": lambda row: (
        f"{row.coarse.num_operators} (-{1 - row.coarse.num_operators / row.fine.num_operators:.0%})"
    ),
    "best device (ms)": lambda row: _ms(row.fine.makespans["local"]),
    "best baseline (ms)": lambda row: _ms(row.fine.best_baseline),
    "fine (ms)": lambda row: _ms(row.fine.makespans[MOIRAI]),
    "gap": lambda row: row.fine.gap,
    "fine planned in (s)": lambda row: f"{row.fine.planning_seconds:.1f}",
    "coarsened (ms)": lambda row: _ms(row.refined_makespan) + (" (proven)" if row.coarse.proven else ""),
    "loss": lambda row: f"{row.loss:+.2%}",
    "coarsened planned in (s)": lambda row: f"{row.coarse.planning_seconds:.1f}",
    "against baselines": lambda row: "worse" if row.worse_than_baseline else "not worse",
}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def profile(graph: GraphFile, folder: Path) -> GraphProfile:
    """Time a graph with generated weights on one core, as an agent does; its files go into `folder`."""
    from agent.worker.graph.profiler import GRAPH_FILE, profile_graph  # needs onnxruntime, which planning does not

    folder.mkdir()
    (folder / GRAPH_FILE).write_bytes(b"".join(graph_workload(graph).frames()))
    return profile_graph(folder, "this machine", 1, "cpu")


def on_devices(seconds: Sequence[float]) -> list[list[float]]:
    """Seconds on each assumed device [n][K], from seconds on one core of this machine [n]."""
    return [[each * factor for factor in SLOWDOWNS] for each in seconds]


def problem_on_devices(spec: GraphSpec, seconds: Sequence[Sequence[float]]) -> PlacementProblem:
    """The placement problem on devices with room for everything, whose transfers share a link; `seconds` [n][K]."""
    count = len(SLOWDOWNS)
    room = max(spec.parameter_bytes(range(spec.num_operators)), 1)
    rates, latencies = [[_MBIT_PER_SECOND * 1e6 / 8] * count] * count, [[_LATENCY_SECONDS] * count] * count
    return placement_problem(spec, seconds, [room] * count, rates, latencies)


def refined_schedule(fine: PlacementProblem, spec: GraphSpec, coarsened: CoarseGraph, known: Schedule) -> Schedule:
    """The schedule of the coarsened graph, applied to the original graph."""
    flows = {name: index for index, name in enumerate(_flow_names(spec))}
    names = _flow_names(coarsened.spec)
    items: list[Item] = []
    for item in known.order:
        if isinstance(item, Send):
            items.append(Send(flows[names[item.flow]], item.device))
        else:
            items += coarsened.groups[item]
    return best_schedule(fine, coarsened.expand_assignment(known.assignment), items)


def _flow_names(spec: GraphSpec) -> list[str]:
    """Names of the tensors that `placement_problem` turns into flows, in its order."""
    return [tensor.name for tensor in spec.tensors if tensor.source is not None and tensor.consumers]
