"""Entry point of the `hearth` command: registers every subcommand."""

from __future__ import annotations

import logging

import typer

import hearth
from coordinator.cli.commands.demo import demo
from coordinator.cli.commands.devices import devices
from coordinator.cli.commands.doctor import doctor
from coordinator.cli.commands.embed import embed
from coordinator.cli.commands.events import events
from coordinator.cli.commands.gateway import gateway
from coordinator.cli.commands.generate import chat, generate
from coordinator.cli.commands.infer import bench_model, infer
from coordinator.cli.commands.key import key_app
from coordinator.cli.commands.plan import plan
from coordinator.cli.commands.ps import ps, stop
from coordinator.cli.commands.serve import serve
from coordinator.cli.commands.status import status
from coordinator.cli.options import expanded
from coordinator.cli.output import handles_errors

app = typer.Typer(
    name="hearth",
    help="Run one neural network on several small computers of your home.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(hearth.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log to stderr."),
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s %(levelname)s %(message)s")


for command in (
    devices, plan, serve, stop, ps, embed, generate, chat, infer, bench_model, status, events,
    gateway, doctor, demo,
):  # fmt: skip
    # systemd does not restart `hearth serve` after exit status 2 (RestartPreventExitStatus).
    app.command()(handles_errors(expanded(command), contradiction_status=2 if command is serve else 1))
app.add_typer(key_app, name="key")


def main() -> None:
    """Run the `hearth` command."""
    app()


if __name__ == "__main__":
    main()
