"""Experiments of Moirai's paper: `moirai` and `coarsening`.

`moirai`: the latency planner and the paper's baselines on published placement problems, on one simulator.

`coarsening`: gains and losses of Moirai's coarsening (GCOF) on ONNX files. Every graph is timed on this machine by the agents'
profiler. The assumed devices are slower by fixed factors and have fixed links. The plan of the coarsened graph is simulated on
the original one, so that both plans are priced alike.

Two of its baselines are list schedulers with a linear program. GETF, Generalised Earliest Time First (Su, Ren, Vardi, Wierman:
arXiv 2004.14639), for devices of different speed: devices form groups of similar speed. A linear program without transfer times
assigns each operator to a group; then the ready operator that can start first is placed on a device of its group, repeatedly.

m-SCT of Baechi (SoCC 2020): earliest start first, but a device waits for the favourite child of its last operator. Favourite
children come from the linear relaxation of the program for Small Communication Times (Hanen and Munier): each operator has at
most one successor, and at most one predecessor, without a transfer in between.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import highspy
import numpy as np
from pydantic import Field

from coordinator.devices.cluster_file import read_instance
from coordinator.devices.graph_profiling import graph_workload, operator_seconds
from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.plan.graph.latency.baselines import BASELINES, Baseline, list_schedules
from coordinator.plan.graph.latency.coarsening import CoarseGraph, coarsen
from coordinator.plan.graph.latency.list_scheduling import (
    PartialSchedule,
    mean_seconds,
    mean_transfer_seconds,
    upward_ranks,
)
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule
from coordinator.plan.graph.latency.search import solve_moirai
from coordinator.plan.linear import LinearProgram, Vector
from coordinator.plan.solution import SearchOptions
from hearth.errors import BadSetting, ModelDoesNotFit, NoPlacement
from hearth.plan.graph_spec import GraphSpec
from hearth.wire.messages import GraphProfile
from tools.bench.experiment import Context, Experiment
from tools.bench.results import Record, Summary, Table

# ---- GETF and m-SCT ----------------------------------------------------------------------------------------------------

# Edges with a relaxed transfer variable below this count as without transfer; the default of Baechi's published code.
_FAVOURITE_THRESHOLD = 0.5


def best_list_schedule(problem: PlacementProblem, seconds: float) -> Schedule:
    """The best schedule of Hearth's list schedulers, contended HEFT included. Raises as `list_schedules`."""
    return min(list_schedules(problem, seconds, "best-list"), key=lambda each: each.makespan)


def getf(problem: PlacementProblem) -> Schedule:
    """Schedule with GETF. Ties go to the higher upward rank; an operator leaves its group if that has no memory left.

    Raises NoPlacement.
    """
    group_of = _assigned_groups(problem)
    partial = PartialSchedule(problem, "getf")
    ranks = upward_ranks(problem)
    while partial.ready:
        start, _, operator, device = min(
            (partial.earliest_start(i, k), -ranks[i], i, k)
            for i in partial.ready
            for k in partial.candidates(i, group_of[i])
        )
        partial.place(operator, device, start)
    return partial.to_schedule()


def _assigned_groups(problem: PlacementProblem) -> list[list[int]]:
    """By operator, the devices of its group (section 3 of the paper).

    The linear program puts at least half of the operator on groups from some speed upwards; among these groups, take the
    one with the greatest total speed.
    """
    speeds = _speeds(problem)
    groups = _groups(speeds)
    fractions = _fractions(problem)
    fastest_from = [max(groups[g:], key=lambda group: sum(speeds[k] for k in group)) for g in range(len(groups))]
    of_group = np.array([fractions[:, group].sum(axis=1) for group in groups])
    has_half = of_group[::-1].cumsum(axis=0)[::-1] >= 0.5  # [groups, n]: on each group and the faster ones
    return [fastest_from[max(count - 1, 0)] for count in has_half.sum(axis=0)]


def _speeds(problem: PlacementProblem) -> list[float]:
    """One speed per device, as in the paper: the fastest device's time for the whole graph, divided by this device's."""
    totals = [sum(column) for column in zip(*problem.seconds, strict=True)]
    return [min(totals) / total if total > 0 else 1.0 for total in totals]


def _groups(speeds: list[float]) -> list[list[int]]:
    """Groups from slow to fast, each within a factor of log m / log log m.

    Devices with less than 1/m of the fastest device's speed are left out.
    """
    m = len(speeds)
    factor = max(2.0, math.log2(m) / math.log2(math.log2(m))) if m > 2 else 2.0
    fast_enough = [device for device in range(m) if speeds[device] * m >= 1]
    slowest = min(speeds[device] for device in fast_enough)
    by_group: dict[int, list[int]] = {}
    for device in fast_enough:
        by_group.setdefault(int(math.log(speeds[device] / slowest, factor) + 1e-9), []).append(device)
    return [by_group[index] for index in sorted(by_group)]


def _fractions(problem: PlacementProblem) -> Vector:
    """[n, K]: the fraction of each operator on each device in the best fractional schedule, ignoring transfers and memory."""
    n, num_devices = problem.num_operators, problem.num_devices
    share, end, makespan = 0, n * num_devices, n * num_devices + n
    program = LinearProgram(makespan + 1)
    for i, seconds in enumerate(problem.seconds):
        work = {share + i * num_devices + k: seconds[k] for k in range(num_devices)}
        program.add_equal(dict.fromkeys(work, 1.0), 1.0)
        negative_work = {variable: -coefficient for variable, coefficient in work.items()}
        program.add_at_least({end + i: 1.0, **negative_work}, 0.0)
        for before in problem.predecessors[i]:
            program.add_at_least({end + i: 1.0, end + before: -1.0, **negative_work}, 0.0)
        program.add_at_least({makespan: 1.0, end + i: -1.0}, 0.0)
    for k in range(num_devices):
        load = {share + i * num_devices + k: -problem.seconds[i][k] for i in range(n)}
        program.add_at_least({makespan: 1.0, **load}, 0.0)
    cost = np.zeros(makespan + 1)
    cost[makespan] = 1.0
    return program.minimise(cost, np.full(makespan + 1, highspy.kHighsInf))[: n * num_devices].reshape(n, num_devices)


# ---- m-SCT -------------------------------------------------------------------------------------------------------------


def m_sct(problem: PlacementProblem) -> Schedule:
    """Schedule with Baechi's m-SCT (SoCC 2020).

    Baechi assumes identical devices, so the linear program uses times averaged over the devices. Raises NoPlacement.
    """
    favourite = favourite_children(problem)
    partial = PartialSchedule(problem, "m-sct")
    worst = [max(map(max, flow.seconds)) + max(map(max, problem.latency)) for flow in problem.flows]
    last: list[int | None] = [None] * problem.num_devices  # operator that the device ran last
    now = 0.0
    while partial.ready:
        later: list[float] = []
        urgent_at = {
            i: max((partial.ends[problem.flows[f].source] + worst[f] for f in problem.incoming[i]), default=0.0)
            for i in partial.ready
        }
        chosen: tuple[int, int] | None = None
        for device in range(problem.num_devices):
            if partial.free_at(device) > now:
                later.append(partial.free_at(device))
                continue
            starts = {
                i: partial.inputs_ready_at(i, device) for i in sorted(partial.ready) if device in partial.candidates(i)
            }
            child = favourite.get(last[device])
            waits = child in starts and all(
                starts[child] <= partial.inputs_ready_at(child, other) for other in partial.candidates(child)
            )
            # A device that waits for its favourite child only runs operators that could run on any device by now.
            when = {i: urgent_at[i] for i in starts} if waits else dict(starts)
            if waits and child is not None:
                when[child] = min(when[child], starts[child])
            later += [time for time in when.values() if time > now]
            due = [i for i, time in when.items() if time <= now]
            if due:
                chosen = min(due, key=lambda i: (when[i], i)), device
                break
        if chosen is None:
            now = min(later)
            continue
        operator, device = chosen
        partial.place(operator, device, max(now, partial.inputs_ready_at(operator, device)))
        last[device] = operator
    return partial.to_schedule()


def favourite_children(problem: PlacementProblem) -> dict[int | None, int]:
    """By operator, the successor that should follow it on the same device."""
    edges = [(f, flow.source, target) for f, flow in enumerate(problem.flows) for target in flow.targets]
    seconds, transfer_seconds = mean_seconds(problem), mean_transfer_seconds(problem)
    n, m = problem.num_operators, len(edges)
    program = LinearProgram(m + n + 1)  # x of each edge (1: the transfer is paid), start of each operator, makespan
    for index, (flow, i, j) in enumerate(edges):
        program.add_at_least({m + j: 1.0, m + i: -1.0, index: -transfer_seconds[flow]}, seconds[i])
    for i in range(n):
        program.add_at_least({m + n: 1.0, m + i: -1.0}, seconds[i])
        for side in (1, 2):
            incident = [index for index, edge in enumerate(edges) if edge[side] == i]
            if len(incident) > 1:
                program.add_at_least(dict.fromkeys(incident, 1.0), len(incident) - 1.0)
    upper = np.full(m + n + 1, highspy.kHighsInf)
    upper[:m] = 1.0
    cost = np.zeros(m + n + 1)
    cost[-1] = 1.0
    values = program.minimise(cost, upper)
    favourites: dict[int | None, int] = {}
    taken: set[int] = set()
    for index in np.argsort(values[:m], kind="stable").tolist():
        _, i, j = edges[index]
        if values[index] < _FAVOURITE_THRESHOLD and i not in favourites and j not in taken:
            favourites[i] = j
            taken.add(j)
    return favourites


# ---- the experiment ----------------------------------------------------------------------------------------------------

MOIRAI = "moirai"
LISTS: Mapping[str, Baseline] = {**BASELINES, "m-sct": m_sct, "getf": getf}
PAPER_FACTORS = {"m-sct": 1.90, "getf": 1.35}  # largest factors reported in the paper, on its own models and clusters


class MoiraiRow(Record):
    """One placement problem, in its file's time unit. A strategy that found no placement that fits has no makespan."""

    instance: str
    num_operators: int
    makespans: Mapping[str, float] = {}
    bound: float = 0.0  # of moirai; 0: unknown
    proven: bool = False
    planning_seconds: float = 0.0  # of moirai

    @property
    def gap(self) -> str:
        """How far moirai's makespan is above its proven lower bound."""
        if self.proven or not self.bound:
            return "proven" if self.proven else "-"
        return f"{self.makespans[MOIRAI] / self.bound - 1:.1%}"

    @property
    def best_baseline(self) -> float:
        """Makespan of the best baseline. Raises ValueError if none found a placement."""
        return min(self.makespans[name] for name in LISTS if name in self.makespans)

    def factor(self, strategy: str) -> float | None:
        """The strategy's makespan over that of moirai."""
        ours, theirs = self.makespans.get(MOIRAI), self.makespans.get(strategy)
        return theirs / ours if ours and theirs else None


class Moirai(Experiment[MoiraiRow]):
    """Latency-optimal placement and the paper's baselines."""

    graphs: Path  # folder of placement problems in the Moirai authors' JSON format
    time_limit: float = Field(120.0, gt=0)  # seconds, of moirai for each problem
    congestion: bool = True  # transfers of one device share its link

    def measure(self, context: Context) -> Iterator[MoiraiRow]:
        for name, path in find_files("graphs", self.graphs, (".json",)).items():
            context.report(f"{name}: planning")
            problem = read_instance(path, self.congestion)
            try:
                yield plan_with_all(problem, self.time_limit)[0]
            except (NoPlacement, ModelDoesNotFit):
                yield MoiraiRow(instance=problem.name, num_operators=problem.num_operators)

    def summary(self, rows: Sequence[MoiraiRow]) -> Summary:
        title = f"Makespans {'with' if self.congestion else 'without'} congestion control, in the unit of each file"
        proven = [row.instance for row in rows if row.proven]
        beaten = [row.instance for row in rows if any((row.factor(name) or 1) < 1 for name in LISTS)]
        return Summary(
            conclusions=(
                f"proven optimal: {', '.join(proven) or 'none'}",
                f"a baseline is better than moirai on: {', '.join(beaten) or 'none'}",
            ),
            tables=(Table.of_columns(title, _COLUMNS, rows, ["A dash: no placement found that fits in memory"]),),
        )


def find_files(setting: str, folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """The folder's files with these suffixes by name, sorted. Raises BadSetting if there are none."""
    found = {path.stem: path for path in sorted(folder.glob("*")) if path.suffix in suffixes}
    if not found:
        kinds = " or ".join(suffixes)
        reason = f"the folder {folder} holds no {kinds} files; --set {setting}=DIR names another one"
        raise BadSetting(setting=setting, reason=reason)
    return found


def plan_with_all(problem: PlacementProblem, time_limit: float) -> tuple[MoiraiRow, Schedule]:
    """Plan with the baselines and moirai; also returns moirai's schedule. Raises NoPlacement, ModelDoesNotFit."""
    found = solve_moirai(problem, SearchOptions(time_limit, 0, time.monotonic))
    makespans = {MOIRAI: found.value}
    for name, strategy in LISTS.items():
        try:
            makespans[name] = strategy(problem).makespan
        except (NoPlacement, ModelDoesNotFit):
            continue
    row = MoiraiRow(
        instance=problem.name, num_operators=problem.num_operators, makespans=makespans, bound=found.bound,
        proven=found.proven, planning_seconds=found.seconds,
    )  # fmt: skip
    return row, found.assignment


def _makespan(strategy: str) -> Callable[[MoiraiRow], object]:
    return lambda row: f"{row.makespans[strategy]:.5g}" if strategy in row.makespans else "-"


def _factor(strategy: str) -> Callable[[MoiraiRow], object]:
    return lambda row: "-" if (factor := row.factor(strategy)) is None else f"{factor:.2f}"


_COLUMNS: Mapping[str, Callable[[MoiraiRow], object]] = {
    "instance": lambda row: row.instance,
    "operators": lambda row: row.num_operators,
    **{strategy: _makespan(strategy) for strategy in (*LISTS, MOIRAI)},
    "bound": lambda row: f"{row.bound:.5g}" if row.bound else "-",
    "gap": lambda row: row.gap,
    "planned in (s)": lambda row: f"{row.planning_seconds:.1f}",
    **{f"{name} / moirai (paper: up to {limit:.2f})": _factor(name) for name, limit in PAPER_FACTORS.items()},
}


# ---- coarsening -------------------------------------------------------------------------------------------------------

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


class Coarsening(Experiment[CoarseningRow]):
    """Operators, planning time and loss with Moirai's coarsening."""

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
        table = Table.of_columns(
            "Moirai's plans of each graph, as it is (fine) and coarsened", _COARSENING_COLUMNS, rows
        )
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


_COARSENING_COLUMNS: Mapping[str, Callable[[CoarseningRow], object]] = {
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
