"""`python -m tools.bench partition`: throughput planners in the paper's set-up. Needs no root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

import typer
from rich.status import Status

from coordinator.cli.output import err, out
from hearth.errors import BadSetting
from hearth.plan.graph_spec import GraphSpec
from tools.bench import interrupts, plots
from tools.bench import partition as bench
from tools.bench.partition_report import markdown as as_markdown
from tools.bench.partition_report import points_markdown, save_plot
from tools.bench.partition_setup import ACCOUNTINGS, read_graphs
from tools.bench.results import check_writable

_MAX_NODES = 256  # of a random cluster
_File = Optional[Path]  # noqa: UP045 (typer reads the annotation on Python 3.10)


class _Wanted(NamedTuple):
    spec: GraphSpec
    setting: bench.Setting
    num_runs: int
    plans: bench.Plans


def partition(
    graphs: Annotated[Path, typer.Option(help="Folder of graphs, JSON or ONNX.", metavar="DIR")],
    model: Annotated[list[str], typer.Option(help="Only this graph; may be repeated.", metavar="NAME")] = [],  # noqa: B006
    points: Annotated[
        bool, typer.Option("--points", help="Only list the candidate partition points of each graph.")
    ] = False,
    runs: Annotated[int, typer.Option(help="Runs of each setting of Figures 7 to 9; 0 leaves them out.", min=0)] = 50,
    ratio_runs: Annotated[int, typer.Option(help="Runs of each graph of Figure 10; 0 leaves it out.", min=0)] = 1000,
    nodes: Annotated[str, typer.Option(metavar="LIST")] = ",".join(map(str, bench.NODES)),
    kappa: Annotated[str, typer.Option(help="Memory of a node in MiB.", metavar="LIST")] = ",".join(
        map(str, bench.MEMORY_MIB)
    ),
    classes: Annotated[
        str,
        typer.Option(help="Numbers of transfer classes; the largest is compared with other planners.", metavar="LIST"),
    ] = ",".join(map(str, bench.CLASSES)),
    accounting: Annotated[
        str, typer.Option(help=f"How memory and transfers are counted: {', '.join(ACCOUNTINGS)}.", metavar="NAME")
    ] = "paper",
    seed: Annotated[int, typer.Option(help="Seed of the random clusters.")] = 1,
    time_limit: Annotated[
        float, typer.Option(help="Time limit of pipeline-exact in each run, in seconds.", min=0.001)
    ] = 10.0,
    json: Annotated[
        _File, typer.Option(help="Save every run to this file; runs already in it are skipped.", metavar="FILE")
    ] = None,
    markdown: Annotated[_File, typer.Option(help="Save the tables to this file.", metavar="FILE")] = None,
    plot: Annotated[_File, typer.Option(help="Save a plot to this file.", metavar="FILE.png")] = None,
) -> None:
    """Reproduce Figures 7 to 10 of the throughput paper: partitioning and placement in random clusters."""
    if accounting not in ACCOUNTINGS:
        raise BadSetting(setting="--accounting", reason=f"'{accounting}' is none of {', '.join(ACCOUNTINGS)}")
    counts = _numbers("--nodes", nodes, 1, _MAX_NODES)
    memories = _numbers("--kappa", kappa, 1, 1 << 20)
    num_classes = _numbers("--classes", classes, 1, 1000)
    for option, path in (("--markdown", markdown), ("--plot", plot)):
        check_writable(option, path)
    if plot is not None:
        plots.check_plots()
    specs = read_graphs(graphs, model)
    if points:
        _say(points_markdown([bench.points_of(spec) for spec in specs]), markdown)
        return
    rows = bench.load_rows(json)
    check_writable("--json", json)
    chosen = [spec for spec in specs if spec.name in bench.MODELS]
    if absent := [name for name in bench.MODELS if name not in {spec.name for spec in specs}]:
        err.print(f"not among the graphs, so not in Figures 7 to 9: {', '.join(absent)}")

    def setting(spec: GraphSpec, count: int, memory: int) -> bench.Setting:
        return bench.Setting(accounting, spec.name, count, memory, seed)

    plans = bench.Plans(num_classes, time_limit)
    figures = [
        _Wanted(spec, setting(spec, count, memory), runs, plans)
        for spec in chosen for memory in memories for count in counts if runs
    ]  # fmt: skip
    most = bench.Plans(num_classes[-1:], time_limit)
    ratios = [
        _Wanted(spec, setting(spec, bench.RATIO_NODES, bench.RATIO_MEMORY_MIB), ratio_runs, most)
        for spec in specs
        if ratio_runs
    ]
    with Status("", console=err) as status:
        for index, wanted in enumerate([*figures, *ratios]):
            where = f"{index + 1} of {len(figures) + len(ratios)}: {wanted.setting.model}"
            found = rows.get(wanted.setting)
            if found is not None and (found.num_runs >= wanted.num_runs or found.outcome != "measured"):
                continue
            for row in bench.measure(
                wanted.spec, ACCOUNTINGS[accounting], wanted.setting, found, wanted.num_runs, wanted.plans
            ):
                rows[wanted.setting] = row
                interrupts.check()
                status.update(
                    f"{where}, {row.num_nodes} nodes of {row.memory_mib} MiB, run {row.num_runs} of {wanted.num_runs}"
                )
                if json is not None:
                    bench.save_rows(json, list(rows.values()))
    of_figures, of_ratios = ([rows[wanted.setting] for wanted in part] for part in (figures, ratios))
    _say(as_markdown(of_figures, of_ratios, num_classes), markdown)
    if plot is not None:
        save_plot(plot, of_figures, of_ratios)


def _say(text: str, path: Path | None) -> None:
    if path is not None:
        path.write_text(text)
    out.print(text, soft_wrap=True, markup=False)


def _numbers(setting: str, text: str, low: int, high: int) -> Sequence[int]:
    """Parse a list of integers; sorted, without duplicates. Raises BadSetting."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise BadSetting(setting=setting, reason=f"'{text}' is not a list of whole numbers") from None
    if found[0] < low or found[-1] > high:
        raise BadSetting(setting=setting, reason=f"'{text}'; from {low} to {high} are possible")
    return found
