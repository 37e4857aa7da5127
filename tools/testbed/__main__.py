"""`python -m tools.testbed scenarios`: lists the scenarios of the testbed."""

from __future__ import annotations

import typer
from rich.table import Table

from coordinator.cli.output import handles_errors, out
from tools.testbed.scenario import SCENARIOS, load_scenario

app = typer.Typer(
    name="python -m tools.testbed",
    help="Emulated homes of small computers, with namespaces, shaped links, CPU shares and memory limits. Tests and "
    "`python -m tools.bench` run in them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def testbed() -> None:
    """Keep `scenarios` a command of its own."""


@app.command()
@handles_errors
def scenarios() -> None:
    """List the built-in scenarios. Where a name is wanted, a TOML file of the same format does, too."""
    table = Table("scenario", "devices", "description", show_edge=False)
    for path in sorted(SCENARIOS.glob("*.toml")):
        scenario = load_scenario(path)
        table.add_row(scenario.name, str(len(scenario.devices)), scenario.description)
    out.print(table)


if __name__ == "__main__":
    app()
