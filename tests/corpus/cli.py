"""The `hearth` command of this tree: found by its entry point, run in this process, and described option by option."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import typer
from click.testing import CliRunner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def _entry_point(command: str) -> tuple[Any, str]:
    """Module and function name from pyproject.toml; an installed package may be of another tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"][command].partition(":")
    return import_module(module), function


@cache
def hearth_app() -> typer.Typer:
    """The typer app named `hearth` in the entry point's module."""
    module, _ = _entry_point("hearth")
    return next(each for each in vars(module).values() if isinstance(each, typer.Typer) and each.info.name == "hearth")


@cache
def _root() -> Any:
    """The app's root command, which takes 0.05 s to build."""
    return typer.main.get_command(hearth_app())


def run_hearth(arguments: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """The exit code and the printed JSON object, which is empty if none was printed."""
    result = CliRunner().invoke(_root(), list(arguments), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    start = result.stdout.find("{")
    printed = json.JSONDecoder().raw_decode(result.stdout[start:])[0] if start >= 0 else {}
    return result.exit_code, printed


# ---- options ----------------------------------------------------------------------------------------------------------


def surface() -> dict[str, Any]:
    """Commands and parameters of `hearth`, options of `hearth-agent`: names, defaults, choices; no help texts."""
    return {"hearth": _command(_root()), "hearth-agent": _agent_options(), "choices": _choices()}


def _command(command: Any) -> dict[str, Any]:
    hints = get_type_hints(command.callback) if command.callback else {}
    described: dict[str, Any] = {"parameters": [_parameter(each, hints.get(each.name, str)) for each in command.params]}
    if command.hidden:
        described["hidden"] = True
    if commands := getattr(command, "commands", None):
        described["commands"] = {name: _command(each) for name, each in sorted(commands.items())}
    return described


def _parameter(parameter: Any, hint: Any) -> dict[str, Any]:
    """An option or argument. Its type is that of the command's function: typer's types differ between versions."""
    described = {
        "kind": "option" if parameter.opts[0].startswith("-") else "argument",
        "names": [*parameter.opts, *parameter.secondary_opts],
        "required": parameter.required,
        "default": _plain(parameter.default),
        **_type(hint),
    }
    for field in ("multiple", "is_flag", "count", "hidden", "envvar"):
        if value := getattr(parameter, field, None):
            described[field] = _plain(value)
    if parameter.nargs != 1:
        described["nargs"] = parameter.nargs
    for field in ("min", "max"):
        value = getattr(parameter, field, getattr(getattr(parameter, "type", None), field, None))
        if value is not None:
            described[field] = value
    return described


def _type(hint: Any) -> dict[str, Any]:
    """The name of a type, without None and lists around it, and its choices."""
    if get_origin(hint) is Literal:
        return {"type": "str", "choices": list(get_args(hint))}
    inner = [each for each in get_args(hint) if each is not type(None)]
    if inner:
        return _type(inner[0])
    if issubclass(hint, Enum):
        return {"type": "str", "choices": [each.value for each in hint]}
    return {"type": hint.__name__}


def _plain(value: Any) -> Any:
    """As in JSON; a computed default is marked as such."""
    if callable(value):
        return "computed"
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


class _Seen(Exception):
    """Raised with the parser, before it parses."""


def _agent_options() -> list[dict[str, Any]]:
    """The agent's argparse parser, which its entry point creates: intercepted when it is about to parse."""
    module, function = _entry_point("hearth-agent")

    def caught(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Seen(parser)

    main: Callable[[], object] = getattr(module, function)
    with mock.patch.object(argparse.ArgumentParser, "parse_args", caught), mock.patch.object(sys, "argv", ["agent"]):
        try:
            main()
        except _Seen as seen:
            return [_action(each) for each in seen.args[0]._actions]
    raise AssertionError("the agent parsed nothing")


def _action(action: argparse.Action) -> dict[str, Any]:
    return {
        "names": list(action.option_strings) or [action.dest],
        "required": action.required,
        "default": _plain(action.default),
        "choices": _plain(list(action.choices)) if action.choices else None,
        "nargs": action.nargs,
    }


def _choices() -> dict[str, list[str]]:
    """Choices of options that take any text and are validated later, from the error for a wrong value."""
    found = {}
    graph = str(ROOT / "none.onnx")
    for model, option in (
        (str(ROOT), "--strategy"), (str(ROOT), "--wire"), (str(ROOT), "--lz4"), (str(ROOT), "--weights"),
        (graph, "--strategy"), (graph, "--objective"), (graph, "--wire"), (graph, "--lz4"),
    ):  # fmt: skip
        _, printed = run_hearth(["plan", model, option, "?", "--json"])
        reason = printed["details"]["reason"]
        kind = "graph" if model == graph else "transformer"
        found[f"{kind} {option}"] = reason.partition("is none of ")[2].split(", ")
    return found
