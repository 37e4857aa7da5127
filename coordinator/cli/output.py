"""What the commands share: consoles, JSON, files, and errors as one clear line."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

from hearth.errors import BadSetting, HearthError
from hearth.files import write_atomically

P = ParamSpec("P")
R = TypeVar("R")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def report(line: str) -> None:
    """A line about progress, for people."""
    err.print(line, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON object on stdout, for programs."""
    typer.echo(json.dumps(value, indent=1, default=str))


def write_file(option: str, path: Path, data: str | bytes) -> None:
    """Write the file that an option names. Raises BadSetting."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise BadSetting(setting=option, reason=f"{path} cannot be written ({error.strerror})") from None


def handles_errors(command: Callable[P, R], contradiction_status: int = 1) -> Callable[P, R]:
    """A user's mistake ends in one line on stderr (with `--json`: an object on stdout) and exit status 1, no traceback.

    `contradiction_status` is for errors that another attempt cannot mend.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except HearthError as error:
            message, next_step = error.explanation(), error.next_step()
            if kwargs.get("as_json"):
                details = error.details()
                print_json({"error": error.code, "message": message, "next_step": next_step, "details": details})
            report(f"[red]error:[/] {message} {next_step}")
            raise typer.Exit(contradiction_status if error.contradiction else 1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped
