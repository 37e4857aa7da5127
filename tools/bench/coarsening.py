"""Kind `coarsening`: gains and losses of Moirai's coarsening (GCOF) on ONNX files.

Every graph is timed on this machine by the agents' profiler. The assumed devices are slower by fixed factors and have fixed
links. The plan of the coarsened graph is simulated on the original one, so that both plans are priced alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.devices.graph_profiling import operator_seconds
from coordinator.models.onnx.cutting import cut
from coordinator.models.onnx.reader import OnnxModel, read_onnx
from coordinator.models.onnx.segments import segment_model
from coordinator.plan.graph.latency.coarsening import CoarseGraph, coarsen
from coordinator.plan.graph.latency.moirai import solve_moirai
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule
from hearth.plan.graph_spec import GraphSpec
from hearth.wire.messages import GraphProfile
from tools.bench.experiment import Context, Experiment
from tools.bench.graph_files import find_files
from tools.bench.moirai import baseline_makespans, gap_text
from tools.bench.results import Summary, Table

SLOWDOWNS = (8.0, 8.0, 12.0, 16.0)  # of the assumed devices against one core of this machine
_MBIT_PER_SECOND = 1000.0  # between any two devices: gigabit Ethernet
_LATENCY_SECONDS = 0.0002  # of each transfer: a fraction of a millisecond, as in a switched network
_ROUNDING = 1e-9  # relative: sums of floats in another order


class Planned(BaseModel):
    """Moirai's plan of one graph, and the baselines' makespans on it. Times in seconds."""

    model_config = ConfigDict(frozen=True)

    makespan: float
    bound: float
    proven: bool
    planning_seconds: float
    baselines: dict[str, float]

    @property
    def best_baseline(self) -> float:
        return min(self.baselines.values())


class CoarseningRow(BaseModel):
    """One network, planned as it is (`fine`) and coarsened (`coarse`)."""

    model_config = ConfigDict(frozen=True)

    network: str
    num_operators: int
    num_coarse: int
    num_kernels: int  # that onnxruntime runs on a CPU
    fine: Planned
    coarse: Planned
    refined_makespan: float  # of the coarse plan on the original graph

    @property
    def loss(self) -> float:
        """Additional time of the coarse plan, relative to the fine one; negative if coarsening found the better plan."""
        return self.refined_makespan / self.fine.makespan - 1

    @property
    def worse_than_baseline(self) -> bool:
        return any(plan.makespan > plan.best_baseline * (1 + _ROUNDING) for plan in (self.fine, self.coarse))


class Coarsening(Experiment):
    """Operators, planning time and loss with Moirai's coarsening."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(CoarseningRow)

    onnx: Path  # folder of ONNX files
    time_limit: float = Field(60.0, gt=0)  # seconds, of moirai for each graph
    congestion: bool = True  # transfers of one device share its link

    def measure(self, context: Context) -> Iterator[CoarseningRow]:
        for name, path in find_files("onnx", self.onnx, (".onnx",)).items():
            context.report(f"{name}: profiling")
            model = read_onnx(path)
            profiled = profile(model, context.folder / name)
            context.report(f"{name}: planning")
            yield self.compare(name, model.spec, operator_seconds(model.spec, profiled), len(profiled.kernels))

    def compare(self, network: str, spec: GraphSpec, seconds: Sequence[float], num_kernels: int) -> CoarseningRow:
        """Plan a graph with and without coarsening. `seconds`: of each operator on one core of this machine."""
        on_each = on_devices(seconds)
        fine = problem_on_devices(spec, on_each, self.congestion)
        began = time.monotonic()
        coarsened = coarsen(spec)
        coarse = problem_on_devices(coarsened.spec, coarsened.group_seconds(on_each), self.congestion)
        coarsening_seconds = time.monotonic() - began
        fine_plan, _ = self._plan(fine)
        coarse_plan, schedule = self._plan(coarse, coarsening_seconds)
        return CoarseningRow(
            network=network, num_operators=fine.num_operators, num_coarse=coarse.num_operators, num_kernels=num_kernels,
            fine=fine_plan, coarse=coarse_plan, refined_makespan=refined_schedule(fine, spec, coarsened, schedule).makespan,
        )  # fmt: skip

    def _plan(self, problem: PlacementProblem, coarsening_seconds: float = 0.0) -> tuple[Planned, Schedule]:
        found = solve_moirai(problem, self.time_limit, time.monotonic)
        planned = Planned(
            makespan=found.value, bound=found.bound, proven=found.proven,
            planning_seconds=coarsening_seconds + found.seconds, baselines=baseline_makespans(problem),
        )  # fmt: skip
        return planned, found.assignment

    def summary(self, rows: Sequence[CoarseningRow]) -> Summary:
        table = Table.of("Moirai's plans of each graph, as it is (fine) and coarsened", _COLUMNS, map(_cells, rows))
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


_COLUMNS = (
    "network", "operators", "onnxruntime runs", "coarsened", "best device (ms)", "best baseline (ms)", "fine (ms)", "gap",
    "planned in (s)", "coarsened (ms)", "loss", "planned in (s)", "against baselines",
)  # fmt: skip


def _cells(row: CoarseningRow) -> tuple[object, ...]:
    fine, coarse = row.fine, row.coarse
    return (
        row.network, row.num_operators, row.num_kernels, f"{row.num_coarse} (-{1 - row.num_coarse / row.num_operators:.0%})",
        _ms(fine.baselines["local"]), _ms(fine.best_baseline), _ms(fine.makespan),
        gap_text(fine.makespan, fine.bound, fine.proven), f"{fine.planning_seconds:.1f}",
        _ms(row.refined_makespan) + (" (proven)" if coarse.proven else ""), f"{row.loss:+.2%}",
        f"{coarse.planning_seconds:.1f}", "worse" if row.worse_than_baseline else "not worse",
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def profile(model: OnnxModel, folder: Path) -> GraphProfile:
    """Time a graph with generated weights on one core, as an agent does; its files go into `folder`."""
    from agent.worker.graph.profiler import GRAPH_FILE, profile_graph  # needs onnxruntime, which planning does not

    (whole,) = cut(model.spec, [0] * model.spec.num_operators)
    folder.mkdir()
    (folder / GRAPH_FILE).write_bytes(segment_model(model, whole).proto)
    return profile_graph(folder, "this machine", 1, "cpu")


def on_devices(seconds: Sequence[float]) -> list[list[float]]:
    """Seconds on each assumed device [n][K], from seconds on one core of this machine [n]."""
    return [[each * factor for factor in SLOWDOWNS] for each in seconds]


def problem_on_devices(spec: GraphSpec, seconds: Sequence[Sequence[float]], congestion: bool) -> PlacementProblem:
    """The placement problem on devices with room for everything; `seconds` [n][K]."""
    count = len(SLOWDOWNS)
    room = max(spec.parameter_bytes(range(spec.num_operators)), 1)
    rates, latencies = [[_MBIT_PER_SECOND * 1e6 / 8] * count] * count, [[_LATENCY_SECONDS] * count] * count
    return placement_problem(spec, seconds, [room] * count, rates, latencies, congestion)


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
