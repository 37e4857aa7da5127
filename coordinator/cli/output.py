"""Output helpers of the commands: consoles, JSON, files, and errors as one line."""

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
    """Print a progress line or a note to stderr."""
    err.print(line, soft_wrap=True)


def print_line(line: str) -> None:
    """Print one line to stdout: wrapped between words in a terminal, and whole elsewhere."""
    out.print(line, soft_wrap=not out.is_terminal)


def print_json(value: object) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(value, indent=1, default=str))


def write_file(option: str, path: Path, data: str | bytes) -> None:
    """Write the file that `option` names. Raises BadSetting."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise BadSetting(setting=option, reason=f"{path} cannot be written ({error.strerror})") from None


def handles_errors(command: Callable[P, R], contradiction_status: int = 1) -> Callable[P, R]:
    """Report a HearthError as one line on stderr (with `--json` also as an object on stdout) instead of a traceback.

    The exit status is 1, or `contradiction_status` for errors that a retry cannot fix; 130 after Ctrl-C.
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
