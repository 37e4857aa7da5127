"""`python -m tools.bench`: runs the experiments of `experiments/` and makes the pages of `docs/results/` from their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.status import Status

from coordinator.cli.output import err, handles_errors, out
from hearth.errors import BadSetting
from hearth.validation import first_error
from tools import interrupts
from tools.bench.experiment import Context, make_experiment, names, read_settings
from tools.bench.measure import temporary_folder
from tools.bench.results import RESULTS, Result, Summary, check_writable, commit, load_result, machine, today
from tools.bench.tensor.graphs import GRAPHS
from tools.bench.tensor.homes import HOMES

_FILE_WIDTH = 160  # columns of tables, if the output is not a terminal
screen = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)

app = typer.Typer(
    name="python -m tools.bench",
    help="Measure Hearth in experiments: files of settings in tools/bench/experiments. Emulated devices need root.",
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


@app.command()
@handles_errors
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment's name, or a file of settings.")],
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
    path = path or RESULTS / f"{Path(name).stem}.json"
    command = " ".join(["python -m tools.bench run", name, *(f"--set '{change}'" for change in changes or ())])
    result = Result(experiment=Path(name).stem, title=experiment.title, command=command, commit=commit(), date=today(),
                    machine=machine(), settings=settings)  # fmt: skip
    known: list[Any] = []
    if resume and path.exists():
        saved = load_result(path)
        if saved.settings == settings or experiment.ROWS_NAME_SETTINGS:
            known = [experiment.ROW.validate_python(row) for row in saved.raw]
            result.commit = ", ".join(dict.fromkeys([*saved.commit.split(", "), result.commit]))  # of all rows
    check_writable("--out", path)
    rows: list[Any] = []
    summary = Summary()
    with temporary_folder() as folder, Status("", console=err) as status:

        def show(step: str) -> None:
            interrupts.check()
            status.update(step)

        for row in experiment.measure(Context(folder, show, known)):
            rows.append(row)
            summary = experiment.summary(rows)
            result.raw = tuple(row.model_dump(mode="json") for row in rows)
            _save(result, summary, path)
    _print(summary)
    if summary.failure:
        err.print(f"[red]error:[/] {summary.failure}", soft_wrap=True)
        raise typer.Exit(1)


@app.command()
@handles_errors
def doppler(
    graphs: Annotated[
        str, typer.Option(help=f"`paper`: all four; or some of {', '.join(GRAPHS)}.", metavar="paper|NAME,...")
    ] = "paper",
    devices: Annotated[int, typer.Option(help="4, or 8 in two halves.")] = 4,
    home: Annotated[str, typer.Option(help=f"One of {', '.join(HOMES)}.")] = "gigabit",
    episodes: Annotated[int | None, typer.Option(help="Of stage II of each training.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Processor time of a search.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Of ChainMM.")] = None,
    transfer: Annotated[bool, typer.Option("--transfer", help="Also policies of other graphs.")] = False,
    ablation: Annotated[bool, typer.Option("--ablation", help="Also message passing per step.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Also each stage alone.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change another setting.", metavar="KEY=VALUE")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--out", help="Default: docs/results/doppler.json.", metavar="FILE.json")
    ] = None,
) -> None:
    """Print the tables of Doppler's paper beside ours: all rows of the result file, and those that it lacks.

    The same as `run doppler --resume` with the settings that the options stand for.
    """
    chosen = GRAPHS if graphs == "paper" else tuple(graphs.split(","))
    settings = {
        "graphs": list(chosen), "homes": [home], "devices": devices, "episodes": episodes, "seconds": seconds,
        "seeds": seeds, "transfer": transfer or None, "ablation": ablation or None, "stages": stages or None,
    }  # fmt: skip
    given = [f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None]
    run("doppler", [*given, *(changes or ())], path, resume=True)


@app.command()
@handles_errors
def report(
    chosen: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all results.")] = None,
) -> None:
    """Make a page from every result file. Exits with 1 if some are of an older version, and leaves these."""
    outdated = False
    for path in [RESULTS / f"{name}.json" for name in chosen or ()] or sorted(RESULTS.glob("*.json")):
        result = load_result(path)
        if result.raw:
            try:
                experiment = make_experiment(result.settings)
                rows = [experiment.ROW.validate_python(row) for row in result.raw]
            except (BadSetting, ValidationError) as error:
                reason = first_error(error, "row") if isinstance(error, ValidationError) else error
                err.print(
                    f"[red]error:[/] {path} is of an older version and has to be measured again: {reason}",
                    soft_wrap=True,
                )
                outdated = True
                continue
            # The raw rows stay as they were measured: fields that are newer than they are would get defaults.
            _save(result, experiment.summary(rows), path)
        path.with_suffix(".md").write_text(result.markdown())
    if outdated:
        raise typer.Exit(1)


def _save(result: Result, summary: Summary, path: Path) -> None:
    result.conclusions, result.tables = summary.conclusions, summary.tables
    result.save(path)


def _print(summary: Summary) -> None:
    for table in summary.tables:
        screen.print(table.rich(), "")
    for line in summary.conclusions:
        out.print(line, soft_wrap=True, markup=False)


def main() -> None:
    """Run the command; an error of a program or file is one line, and cleanup is not interrupted."""
    interrupts.install()
    try:
        app()
    except (OSError, subprocess.SubprocessError) as error:
        err.print(f"[red]error:[/] {error}", soft_wrap=True)
        raise SystemExit(1) from None
    finally:
        interrupts.ignore()


if __name__ == "__main__":
    main()
