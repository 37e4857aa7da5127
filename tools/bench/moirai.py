"""Kind `moirai`: the latency planner and its paper's baselines on published placement problems, on one simulator."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.latency.baselines import BASELINES
from coordinator.plan.graph.latency.moirai import solve_moirai
from coordinator.plan.graph.latency.problem import PlacementProblem
from hearth.errors import ModelDoesNotFit, NoPlacement
from tools.bench.experiment import Context, Experiment
from tools.bench.graph_files import choose, find_files
from tools.bench.results import Summary, Table

MOIRAI = "moirai"
PAPER_FACTORS = {"m-sct": 1.90, "getf": 1.35}  # largest factors reported in the paper, on its own models and clusters


class MoiraiRow(BaseModel):
    """One placement problem, in its file's time unit. A strategy that found no placement that fits has no makespan."""

    model_config = ConfigDict(frozen=True)

    instance: str
    num_operators: int
    makespans: dict[str, float]
    bound: float = 0.0  # of moirai; 0: unknown
    proven: bool = False
    planning_seconds: float = 0.0  # of moirai

    def factor(self, strategy: str) -> float | None:
        """The strategy's makespan over that of moirai."""
        ours, theirs = self.makespans.get(MOIRAI), self.makespans.get(strategy)
        return theirs / ours if ours and theirs else None


class Moirai(Experiment):
    """Latency-optimal placement beside the paper's baselines."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(MoiraiRow)

    graphs: Path  # folder of placement problems in the Moirai authors' JSON format
    instances: tuple[str, ...] = ()  # names of files in it; empty: all
    time_limit: float = Field(120.0, gt=0)  # seconds, of moirai for each problem
    workers: int = Field(1, ge=1)  # search threads
    congestion: bool = True  # transfers of one device share its link

    def measure(self, context: Context) -> Iterator[MoiraiRow]:
        for path in choose("instances", find_files("graphs", self.graphs, (".json",)), self.instances):
            context.report(f"{path.stem}: planning")
            yield self._measure(read_instance(path, self.congestion))

    def _measure(self, problem: PlacementProblem) -> MoiraiRow:
        row = MoiraiRow(
            instance=problem.name, num_operators=problem.num_operators, makespans=baseline_makespans(problem)
        )
        try:
            found = solve_moirai(problem, self.time_limit, time.monotonic, self.workers)
        except (NoPlacement, ModelDoesNotFit):
            return row
        return row.model_copy(update={
            "makespans": {**row.makespans, MOIRAI: found.value}, "bound": found.bound, "proven": found.proven,
            "planning_seconds": found.seconds,
        })  # fmt: skip

    def summary(self, rows: Sequence[MoiraiRow]) -> Summary:
        strategies = (*BASELINES, MOIRAI)
        columns = ["instance", "operators", *strategies, "bound", "gap", "planned in (s)"]
        columns += [f"{name} / moirai (paper: up to {factor:.2f})" for name, factor in PAPER_FACTORS.items()]
        cells = [
            (
                row.instance, row.num_operators, *(_number(row.makespans.get(name)) for name in strategies),
                _number(row.bound or None), gap_text(row.makespans.get(MOIRAI), row.bound, row.proven),
                f"{row.planning_seconds:.1f}", *(_number(row.factor(name), ".2f") for name in PAPER_FACTORS),
            )
            for row in rows
        ]  # fmt: skip
        title = f"Makespans {'with' if self.congestion else 'without'} congestion control, in the unit of each file"
        table = Table.of(title, columns, cells, ["A dash: the strategy found no placement that fits in memory"])
        proven = [row.instance for row in rows if row.proven]
        beaten = [row.instance for row in rows if any((row.factor(name) or 1) < 1 for name in BASELINES)]
        said = (
            f"proven optimal: {', '.join(proven) or 'none'}",
            f"a baseline is better than moirai on: {', '.join(beaten) or 'none'}",
        )
        return Summary(conclusions=said, tables=(table,))


def baseline_makespans(problem: PlacementProblem) -> dict[str, float]:
    """The makespan of each baseline that finds a placement that fits."""
    found = {}
    for name, strategy in BASELINES.items():
        try:
            found[name] = strategy(problem).makespan
        except (NoPlacement, ModelDoesNotFit):
            continue
    return found


def gap_text(makespan: float | None, bound: float, proven: bool) -> str:
    """How far a makespan is above its proven lower bound."""
    if proven:
        return "proven"
    return f"{makespan / bound - 1:.1%}" if makespan is not None and bound > 0 else "-"


def _number(value: float | None, form: str = ".5g") -> str:
    return "-" if value is None else format(value, form)
