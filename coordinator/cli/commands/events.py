"""`hearth events`: what the coordinator has recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.options import HomeOptions, TimeoutOption
from coordinator.cli.output import err
from coordinator.cli.render.events import event_line
from hearth.wire.messages import EVENT_KINDS


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events until Ctrl-C.")] = False,
    kind: Annotated[
        list[str], typer.Option(help=f"Only events of this kind: {', '.join(EVENT_KINDS)}.", metavar="KIND")
    ] = [],  # noqa: B006 (typer's form of an empty default)
    since: Annotated[
        str, typer.Option(help="Begin after this cursor, printed at the end, or 'now'.", metavar="CURSOR")
    ] = "",
    timeout: TimeoutOption = 10.0,
    *,
    where: HomeOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print requests, devices, links, plans and phases as recorded. Needs an admin or home key, or the role observer."""
    with where.connect(timeout) as home:
        with home.events(since, kind, follow) as happened:
            try:
                for recorded in happened:
                    if happened.has_gap:
                        err.print("[yellow]events are missing here[/]")
                    typer.echo(recorded.model_dump_json() if as_json else event_line(recorded))
            finally:
                if happened.cursor:
                    err.print(f"[dim]to go on: --since {happened.cursor}[/]")
