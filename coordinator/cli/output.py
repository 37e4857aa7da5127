"""What the commands share: consoles, JSON, and errors as one clear line."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from hearth.errors import HearthError

P = ParamSpec("P")
R = TypeVar("R")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def report(line: str) -> None:
    """A line about progress, for people."""
    err.print(line, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON object on stdout, for programs."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def handles_errors(command: Callable[P, R], contradiction_status: int = 1) -> Callable[P, R]:
    """A user's mistake ends in one line on stderr (with `--json`: an object on stdout) and exit status 1, no traceback.

    `contradiction_status` is for errors that another attempt cannot mend.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except HearthError as error:
            if kwargs.get("as_json"):
                print_json(error_object(error))
            err.print(f"[red]error:[/] {error.explanation()} {error.next_step()}", soft_wrap=True)
            raise typer.Exit(contradiction_status if error.contradiction else 1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped


def error_object(error: HearthError) -> dict[str, Any]:
    """An error as `--json` prints it."""
    return {
        "error": error.code,
        "message": error.explanation(),
        "next_step": error.next_step(),
        "details": error.details(),
    }
