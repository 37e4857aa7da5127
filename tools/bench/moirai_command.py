"""`python -m tools.bench moirai`: latency planners on published placement problems. Needs no root."""

from __future__ import annotations

import json as _json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer
from pydantic import BaseModel, ConfigDict
from rich.status import Status

from coordinator.cli.output import err, out
from coordinator.devices.cluster_file import read_instance
from coordinator.plan.graph.latency.baselines import BASELINES
from coordinator.plan.graph.latency.baselines import solve as solve_baseline
from coordinator.plan.graph.latency.moirai import solve
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import Schedule
from coordinator.plan.solution import SearchOptions, Solution
from hearth.errors import BadSetting, ModelDoesNotFit, NoPlacement
from tools.bench import interrupts
from tools.bench.results import check_files

PAPER_FACTORS = {"m-sct": 1.90, "getf": 1.35}  # largest factors reported in the paper, on its own models and clusters
_File = Optional[Path]  # noqa: UP045 (typer reads the annotation on Python 3.10)


class MoiraiRow(BaseModel):
    """One strategy on one problem, in the file's time unit. Without a makespan, it found no placement that fits."""

    model_config = ConfigDict(frozen=True)

    instance: str
    congestion: bool
    num_operators: int
    strategy: str
    makespan: float | None = None
    bound: float | None = None
    gap: float | None = None
    proven_optimal: bool = False
    planning_seconds: float | None = None


def moirai(
    graphs: Annotated[
        Path, typer.Option(help="Folder of placement problems, or its parent with a folder moirai/.", metavar="DIR")
    ],
    instance: Annotated[list[str], typer.Option(help="Only this problem; may be repeated.", metavar="NAME")] = [],  # noqa: B006
    time_limit: Annotated[
        float, typer.Option(help="Time limit of moirai for each problem, in seconds.", min=0.001)
    ] = 120.0,
    workers: Annotated[int, typer.Option(help="Search threads.", min=1)] = 1,
    congestion: Annotated[bool, typer.Option(help="Transfers of one device share its link.")] = True,
    json: Annotated[_File, typer.Option(help="Save all rows to this file.", metavar="FILE")] = None,
    markdown: Annotated[_File, typer.Option(help="Save the table to this file.", metavar="FILE")] = None,
) -> None:
    """Compare latency-optimal placement with the paper's baselines, on one simulator."""
    check_files(json, markdown)
    rows: list[MoiraiRow] = []
    with Status("", console=err) as status:
        for path in find_instances(graphs, instance):
            problem = read_instance(path, congestion)
            for strategy in (*BASELINES, "moirai"):
                interrupts.check()
                status.update(f"{problem.name}: {strategy}")
                rows.append(measure(problem, strategy, time_limit, workers))
            if json is not None:
                json.write_text(_json.dumps([row.model_dump() for row in rows], indent=1))
            if markdown is not None:
                markdown.write_text(as_markdown(rows))
    out.print(as_markdown(rows), soft_wrap=True, markup=False)


def find_instances(graphs: Path, names: Sequence[str]) -> list[Path]:
    """The folder's problems, sorted by name. Raises BadSetting if there are none, or a name is unknown."""
    folder = graphs / "moirai" if (graphs / "moirai").is_dir() else graphs
    found = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not found:
        raise BadSetting(setting="--graphs", reason=f"{folder} holds no JSON files")
    if unknown := [name for name in names if name not in found]:
        raise BadSetting(setting="--instance", reason=f"'{unknown[0]}' is none of {', '.join(found)}")
    return [found[name] for name in names or found]


def measure(problem: PlacementProblem, strategy: str, time_limit: float, workers: int) -> MoiraiRow:
    row = MoiraiRow(
        instance=problem.name,
        congestion=problem.congestion,
        num_operators=problem.num_operators,
        strategy=strategy,
    )
    try:
        placement = _place(problem, strategy, time_limit, workers)
    except (NoPlacement, ModelDoesNotFit):
        return row
    return row.model_copy(update=_figures(problem, placement, strategy))


def _place(problem: PlacementProblem, strategy: str, time_limit: float, workers: int) -> Solution[Schedule]:
    if strategy == "moirai":
        return solve(problem, time_limit, time.monotonic, workers)
    return solve_baseline(strategy, problem, SearchOptions(time_limit, 0, time.monotonic))


def _figures(problem: PlacementProblem, placement: Solution[Schedule], strategy: str) -> dict[str, object]:
    bounded = strategy == "moirai"
    return {
        "makespan": placement.value,
        "bound": placement.bound if bounded else None,
        "gap": placement.gap if bounded else None,
        "proven_optimal": placement.proven,
        "planning_seconds": placement.seconds,
    }


def as_markdown(rows: Sequence[MoiraiRow]) -> str:
    names = list(dict.fromkeys(row.strategy for row in rows))
    by_instance: dict[str, dict[str, MoiraiRow]] = {}
    for row in rows:
        by_instance.setdefault(row.instance, {})[row.strategy] = row
    head = ["instance", "operators", "congestion", *names, "bound", "gap", "seconds"]
    head += [f"{name} / moirai (paper: up to {factor:.2f})" for name, factor in PAPER_FACTORS.items()]
    lines = [_line(head), _line(["---"] * len(head))]
    for instance, by_name in by_instance.items():
        best = by_name["moirai"]
        cells = [instance, str(best.num_operators), "yes" if best.congestion else "no"]
        cells += [_number(by_name[name].makespan) for name in names]
        cells.append(_number(best.bound))
        cells.append("proven" if best.proven_optimal else "-" if best.gap is None else f"{best.gap:.1%}")
        cells.append("-" if best.planning_seconds is None else f"{best.planning_seconds:.1f}")
        cells += [_factor(by_name[name].makespan, best.makespan) for name in PAPER_FACTORS]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n\n-: nothing found that fits in memory.\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _factor(other: float | None, best: float | None) -> str:
    return f"{other / best:.2f}" if other and best else "-"
