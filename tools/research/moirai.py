"""Experiment `moirai`: the latency planner and its paper's baselines on published placement problems, on one simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.latency.baselines import BASELINES, Baseline
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.graph.latency.search import solve_moirai
from coordinator.plan.solution import SearchOptions
from hearth.errors import BadSetting, ModelDoesNotFit, NoPlacement
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.results import Record, Summary, Table
from tools.research.lists import getf, m_sct

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


class Moirai(Experiment):
    """Latency-optimal placement and the paper's baselines."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(MoiraiRow)
    # `graphs`: a folder of the placement problems that Moirai's authors published (sample-data of
    # github.com/moirai-placement/moirai), as JSON; not in this repository. Name yours with --set graphs=DIR.
    PAGE = "moirai"
    NAMED: ClassVar[Named] = {
        "moirai": {
            "title": "Placement for latency (Moirai), with congestion control", "source": "Moirai, arXiv 2312.04025",
            "graphs": "graphs", "time_limit": 120,
        },
        "moirai-no-congestion": {
            "title": "Placement for latency (Moirai), without congestion control", "source": "Moirai, arXiv 2312.04025",
            "graphs": "graphs", "time_limit": 120, "congestion": False,
        },
    }  # fmt: skip

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
        reason = (
            f"the folder {folder} holds no {' or '.join(suffixes)} files; the experiment's module says how to get them, "
            f"and --set {setting}=DIR names another folder"
        )
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
