"""`python -m tools.bench`: runs experiments in the scenarios of the testbed, and makes the pages of `docs/results`."""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markdown import Markdown
from rich.status import Status
from rich.table import Table

from coordinator.cli.output import err, handles_errors, out
from hearth.errors import BadSetting
from hearth.validation import first_error
from tools import interrupts
from tools.bench.experiment import Context, make_experiment, names, page_of, read_settings
from tools.bench.results import RESULTS, Result, Summary, check_writable, commit, load_result, machine, measured_ago
from tools.testbed.scenario import SCENARIOS, load_scenario

_FILE_WIDTH = 160  # columns of tables, if the output is not a terminal
screen = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)

app = typer.Typer(
    name="python -m tools.bench",
    help="Measure Hearth in experiments. Emulated devices need root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("list")
@handles_errors
def list_experiments() -> None:
    """List the experiments."""
    for name in names():
        settings = read_settings(name)
        source = f" ({settings['source']})" if settings.get("source") else ""
        out.print(f"{name:20} {settings['title']}{source}", soft_wrap=True, markup=False)


@app.command("scenarios")
@handles_errors
def list_scenarios() -> None:
    """List the built-in scenarios of the testbed. Where a name is wanted, a TOML file of the same format does, too."""
    table = Table("scenario", "devices", "description", show_edge=False)
    for path in sorted(SCENARIOS.glob("*.toml")):
        scenario = load_scenario(path)
        table.add_row(scenario.name, str(len(scenario.devices)), scenario.description)
    out.print(table)


@app.command()
@handles_errors
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment's name.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting, e.g. rounds=5; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option("--out", help="The result file. Default: docs/results/NAME.json.", metavar="FILE.json"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the rows in the result file.")] = False,
) -> None:
    """Run one experiment and save its rows as they are measured. Exits with 1 if a figure does not hold."""  # fmt: skip
    settings = read_settings(name, changes or ())
    experiment = make_experiment(settings)
    path = path or RESULTS / f"{name}.json"
    command = " ".join(["python -m tools.bench run", name, *(f"--set '{change}'" for change in changes or ())])
    result = Result(experiment=name, title=experiment.title, command=command, commit=commit(),
                    date=date.today().isoformat(), machine=machine(), settings=settings)  # fmt: skip
    known: list[Any] = []
    if resume and path.exists():
        saved = load_result(path)
        if saved.settings == settings or experiment.ROWS_NAME_SETTINGS:
            known = experiment.read_rows(saved.raw)
            result.commit = ", ".join(dict.fromkeys([*saved.commit.split(", "), result.commit]))  # of all rows
    check_writable("--out", path)
    rows: list[Any] = []
    summary = Summary()
    with (
        tempfile.TemporaryDirectory(prefix="hearth-bench-", ignore_cleanup_errors=True) as folder,
        Status("", console=err) as status,
    ):

        def show(step: str) -> None:
            interrupts.check()
            status.update(step)

        for row in experiment.measure(Context(Path(folder), show, known)):
            rows.append(row)
            summary = experiment.summary(rows)
            result.raw = tuple(row.model_dump(mode="json") for row in rows)
            result.save(path)
    for table in summary.tables:
        screen.print(Markdown(table.markdown()), "")
    for line in summary.conclusions:
        out.print(line, soft_wrap=True, markup=False)
    if summary.failure:
        err.print(f"[red]error:[/] {summary.failure}", soft_wrap=True)
        raise typer.Exit(1)


@app.command()
@handles_errors
def report() -> None:
    """Make the pages that `experiments.toml` names from the result files, and tell how many commits ago each was measured.

    Exits with 1 if a result has no raw rows, is of an older version, or of a commit that the repository does not have.
    """
    pages: defaultdict[str, list[str]] = defaultdict(list)
    faults = 0
    for path in sorted(RESULTS.glob("*.json")):
        result = load_result(path)
        age = measured_ago(result.commit)
        out.print(f"{path.stem:24} {result.date}  {age.text}", soft_wrap=True, markup=False)
        summary, fault = _summarise(result)
        for each in filter(None, (age.fault, fault)):
            err.print(f"[red]error:[/] {path.name}: {each}", soft_wrap=True)
            faults += 1
        pages[page_of(result.experiment)].append(result.markdown(summary))
    for page, sections in pages.items():
        (RESULTS / f"{page}.md").write_text("\n".join([f"# Results: {page}\n", *sections]))
    if faults:
        raise typer.Exit(1)


def _summarise(result: Result) -> tuple[Summary, str]:
    """The tables of a result's raw rows, and why there are none; empty if there are."""
    if not result.raw:
        return Summary(), "it has no raw rows and has to be measured again"
    try:
        experiment = make_experiment(result.settings)
        return experiment.summary(experiment.read_rows(result.raw)), ""
    except (BadSetting, ValidationError) as error:
        reason = first_error(error, "row") if isinstance(error, ValidationError) else error
        return Summary(), f"it is of an older version and has to be measured again: {reason}"


if __name__ == "__main__":
    interrupts.run(app)
