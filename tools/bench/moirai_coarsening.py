"""`python -m tools.bench coarsening`: gains and losses of Moirai's coarsening (GCOF) on ONNX files. Needs no root.

Every graph is timed on this machine by the agents' profiler. The assumed devices are slower by fixed factors and have fixed
links. The plan of the coarsened graph is simulated on the original one, so that both plans are priced alike.
"""

from __future__ import annotations

import json as _json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

import typer
from pydantic import BaseModel, ConfigDict
from rich.status import Status

from coordinator.cli.output import err, out
from coordinator.devices.graph_profiling import operator_seconds
from coordinator.models.onnx.cutting import cut
from coordinator.models.onnx.reader import OnnxModel, read_onnx
from coordinator.models.onnx.segments import segment_model
from coordinator.plan.graph.latency.baselines import BASELINES
from coordinator.plan.graph.latency.coarsening import CoarseGraph, coarsen
from coordinator.plan.graph.latency.moirai import solve
from coordinator.plan.graph.latency.problem import PlacementProblem, placement_problem
from coordinator.plan.graph.latency.schedule import Item, Schedule, Send, best_schedule
from hearth.errors import BadMessage, BadSetting, DeadlineExceeded, InternalError, NoPlacement
from hearth.plan.graph_spec import GraphSpec
from hearth.wire import messages
from tools.bench import interrupts
from tools.bench.results import check_files

SLOWDOWNS = (8.0, 8.0, 12.0, 16.0)  # of the assumed devices against one core of this machine
MBIT_PER_SECOND = 1000.0  # between any two devices
LATENCY_SECONDS = 0.0002  # of each transfer
_PROFILE_SECONDS = 300.0  # timeout of profiling one graph
_ROUNDING = 1e-9  # relative: sums of floats in another order
_File = Optional[Path]  # noqa: UP045 (typer reads the annotation on Python 3.10)


class CoarseningRow(BaseModel):
    """One network, planned without (`fine`) and with coarsening. Makespans are of the original graph.

    Exceptions: `coarse_own_makespan` and `best_coarse_baseline` are of the coarsened graph. `loss`: additional time of the
    coarsened plan relative to the fine one; negative if coarsening found the better plan.
    """

    model_config = ConfigDict(frozen=True)

    network: str
    num_operators: int
    num_coarse: int
    num_kernels: int  # that onnxruntime runs on a CPU
    run_seconds: float  # of the whole graph on one core of this machine
    bound: float
    fine_makespan: float
    fine_proven: bool
    fine_planning_seconds: float
    coarse_makespan: float
    coarse_own_makespan: float
    coarse_proven: bool  # optimal among the plans of the coarsened graph
    coarse_planning_seconds: float
    local_makespan: float
    best_baseline: float
    best_coarse_baseline: float

    @property
    def loss(self) -> float:
        return self.coarse_makespan / self.fine_makespan - 1

    @property
    def worse_than_baseline(self) -> bool:
        """Whether moirai is worse than the best baseline on the original or on the coarsened graph."""
        ways = (self.fine_makespan, self.best_baseline), (self.coarse_own_makespan, self.best_coarse_baseline)
        return any(ours > theirs * (1 + _ROUNDING) for ours, theirs in ways)


def coarsening(
    onnx: Annotated[Path, typer.Option(help="Folder of ONNX files, or one file.", metavar="DIR")],
    time_limit: Annotated[
        float, typer.Option(help="Time limit of moirai for each graph, in seconds.", min=0.001)
    ] = 60.0,
    congestion: Annotated[bool, typer.Option(help="Transfers of one device share its link.")] = True,
    json: Annotated[_File, typer.Option(help="Save all rows to this file.", metavar="FILE")] = None,
    markdown: Annotated[_File, typer.Option(help="Save the table to this file.", metavar="FILE")] = None,
) -> None:
    """Measure Moirai's coarsening on ONNX files: operators, planning time, and loss of the coarser plan."""
    check_files(json, markdown)
    rows: list[CoarseningRow] = []
    with Status("", console=err) as status:
        for path in find_files(onnx):
            interrupts.check()
            status.update(f"{path.stem}: profiling")
            model = read_onnx(path)
            profiled = profile(model)
            status.update(f"{path.stem}: planning")
            rows.append(measure(path.stem, model.spec, profiled, congestion, time_limit))
            if json is not None:
                json.write_text(_json.dumps([row.model_dump() for row in rows], indent=1))
            if markdown is not None:
                markdown.write_text(as_markdown(rows))
    out.print(as_markdown(rows), soft_wrap=True, markup=False)
    if any(row.worse_than_baseline for row in rows):
        err.print("[red]error:[/] moirai is worse than a baseline; the rows are marked", soft_wrap=True)
        raise typer.Exit(1)


def find_files(path: Path) -> list[Path]:
    """The ONNX files of a folder, or the file itself. Raises BadSetting if there are none."""
    if path.is_file():
        return [path]
    if found := sorted(path.glob("*.onnx")):
        return found
    raise BadSetting(setting="--onnx", reason=f"{path} holds no ONNX files")


class Profile(NamedTuple):
    """Times of a graph on one core of this machine, by operator and of a whole run, and its number of kernels."""

    operator_seconds: Sequence[float]
    run_seconds: float
    num_kernels: int


def profile(model: OnnxModel) -> Profile:
    """Time a graph with generated weights, as an agent does.

    Raises the profiler's error, DeadlineExceeded, and InternalError if the profiler ends without an answer.
    """
    (whole,) = cut(model.spec, [0] * model.spec.num_operators)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "graph.onnx").write_bytes(segment_model(model, whole).proto)
        request = messages.StartProfile(
            profile=messages.Profile(subject=messages.OperatorsOf(), timeout_seconds=_PROFILE_SECONDS),
            folder=name, device="this machine", num_threads=1, compute_device="cpu",
        )  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, "-m", "agent.worker.graph.profiler"],
                input=messages.encode(request),
                capture_output=True,
                timeout=_PROFILE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(action=f"profiling {model.spec.name}", seconds=_PROFILE_SECONDS) from None
    try:
        answer = messages.decode(done.stdout)
    except BadMessage:
        reason = f"it ended with {done.returncode}: {done.stderr[-500:].decode(errors='replace')}"
        raise InternalError(where="the profiler", reason=reason) from None
    if isinstance(answer, messages.Failed):
        raise answer.error()
    assert isinstance(answer, messages.Profiled)
    assert isinstance(answer.result, messages.GraphProfile)
    measured = answer.result
    return Profile(operator_seconds(model.spec, measured), measured.run_seconds, len(measured.kernels))


def measure(network: str, spec: GraphSpec, profiled: Profile, congestion: bool, time_limit: float) -> CoarseningRow:
    """Plan a graph with and without coarsening."""
    on_each = on_devices(profiled.operator_seconds)
    fine = problem_on_devices(spec, on_each, congestion)
    placed = solve(fine, time_limit, time.monotonic)
    began = time.monotonic()
    coarsened = coarsen(spec)
    coarse = problem_on_devices(coarsened.spec, coarsened.group_seconds(on_each), congestion)
    coarsening_seconds = time.monotonic() - began
    coarse_placed = solve(coarse, time_limit, time.monotonic)
    refined = Refinement.of(spec, coarsened).schedule(fine, coarse_placed.assignment)
    baselines, coarse_baselines = _baselines(fine), _baselines(coarse)
    return CoarseningRow(
        network=network,
        num_operators=fine.num_operators,
        num_coarse=coarse.num_operators,
        num_kernels=profiled.num_kernels,
        run_seconds=profiled.run_seconds,
        bound=placed.bound,
        fine_makespan=placed.value,
        fine_proven=placed.proven,
        fine_planning_seconds=placed.seconds,
        coarse_makespan=refined.makespan,
        coarse_own_makespan=coarse_placed.value,
        coarse_proven=coarse_placed.proven,
        coarse_planning_seconds=coarsening_seconds + coarse_placed.seconds,
        local_makespan=baselines["local"],
        best_baseline=min(baselines.values()),
        best_coarse_baseline=min(coarse_baselines.values()),
    )


def on_devices(seconds: Sequence[float]) -> list[list[float]]:
    """Seconds on each assumed device [n][K], from seconds on one core of this machine [n]."""
    return [[each * factor for factor in SLOWDOWNS] for each in seconds]


def problem_on_devices(spec: GraphSpec, seconds: Sequence[Sequence[float]], congestion: bool) -> PlacementProblem:
    """The placement problem on devices with room for everything; `seconds` [n][K]."""
    ranks = range(len(SLOWDOWNS))
    room = max(spec.parameter_bytes(range(spec.num_operators)), 1)
    return placement_problem(
        spec,
        seconds,
        [room for _ in ranks],
        [[MBIT_PER_SECOND * 1e6 / 8 for _ in ranks] for _ in ranks],
        [[LATENCY_SECONDS for _ in ranks] for _ in ranks],
        congestion,
    )


class Refinement(NamedTuple):
    """Maps a coarsened graph back: its groups, and for each coarsened flow the original flow."""

    coarsened: CoarseGraph
    flows: tuple[int, ...]

    @classmethod
    def of(cls, spec: GraphSpec, coarsened: CoarseGraph) -> Refinement:
        number = {name: index for index, name in enumerate(_flow_names(spec))}
        return cls(coarsened, tuple(number[name] for name in _flow_names(coarsened.spec)))

    def schedule(self, fine: PlacementProblem, known: Schedule) -> Schedule:
        """The coarsened graph's schedule applied to the original graph."""
        items: list[Item] = []
        for item in known.order:
            if isinstance(item, Send):
                items.append(Send(self.flows[item.flow], item.device))
            else:
                items += self.coarsened.groups[item]
        return best_schedule(fine, self.coarsened.expand_assignment(known.assignment), items)


def _flow_names(spec: GraphSpec) -> list[str]:
    """Names of the tensors that `placement_problem` turns into flows, in its order."""
    return [tensor.name for tensor in spec.tensors if tensor.source is not None and tensor.consumers]


def _baselines(problem: PlacementProblem) -> dict[str, float]:
    found = {}
    for name, strategy in BASELINES.items():
        try:
            found[name] = strategy(problem).makespan
        except NoPlacement:
            continue
    return found


# ---- the table --------------------------------------------------------------------------------------------------------


def as_markdown(rows: Sequence[CoarseningRow]) -> str:
    head = (
        "network", "operators", "onnxruntime runs", "coarsened", "best device (ms)", "best baseline (ms)", "fine (ms)", "gap",
        "planned in (s)", "coarsened (ms)", "loss", "planned in (s)", "against baselines",
    )  # fmt: skip
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        gap = "proven" if row.fine_proven else f"{row.fine_makespan / row.bound - 1:.1%}" if row.bound > 0 else "-"
        lines.append(
            _line(
                (
                    row.network,
                    str(row.num_operators),
                    str(row.num_kernels),
                    f"{row.num_coarse} (-{1 - row.num_coarse / row.num_operators:.0%})",
                    _ms(row.local_makespan),
                    _ms(row.best_baseline),
                    _ms(row.fine_makespan),
                    gap,
                    f"{row.fine_planning_seconds:.1f}",
                    _ms(row.coarse_makespan) + (" (proven)" if row.coarse_proven else ""),
                    f"{row.loss:+.2%}",
                    f"{row.coarse_planning_seconds:.1f}",
                    "worse" if row.worse_than_baseline else "not worse",
                )
            )
        )
    ended = [row for row in rows if row.fine_proven and row.coarse_proven]  # neither search reached the time limit
    if ended:
        share = sum(row.coarse_planning_seconds / row.fine_planning_seconds for row in ended) / len(ended)
        lines += [
            "",
            f"Planning took {share:.0%} of the time with coarsening, on average of those proven (paper: 72%).",
        ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
