"""What this tree prints and sends: plans for recorded homes, options of every command, bytes of every message."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import typer
from click.testing import CliRunner
from support.messages import named_examples
from support.planning import in_process_planning

from agent.daemon.config import add_arguments
from coordinator.cli.app import app
from hearth.wire.messages import encode

HERE = Path(__file__).parent
PLANS = HERE / "plans"
OPTIONS = HERE / "options.json"
MESSAGES = HERE.parent / "hearth" / "wire" / "golden_messages.json"


def save(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def load(path: Path) -> Any:
    return json.loads(path.read_text())


# ---- plans ------------------------------------------------------------------------------------------------------------


def plans(case: dict[str, Any]) -> dict[str, Any]:
    """What `hearth plan` prints for a case's model and home, by strategy.

    Searches see a clock that stands still, so that they end by a proof or by their limit of work.
    """
    with tempfile.TemporaryDirectory() as folder, in_process_planning(lambda: 0.0):
        for name, content in case["files"].items():
            _write(Path(folder) / name, content)
        arguments = [each.replace("@", f"{folder}/") for each in case["arguments"]]
        return {each: _plan([*arguments, "--strategy", each, "--json"], folder) for each in case["plans"]}


def _write(path: Path, content: Any) -> None:
    """JSON; of a checkpoint only the header, since planning takes shapes from the config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(content).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data if path.suffix == ".safetensors" else data)


def _plan(arguments: list[str], folder: str) -> Any:
    result = CliRunner().invoke(typer.main.get_command(app), ["plan", *arguments], env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    printed = result.stdout[result.stdout.index("{") :].replace(f"{folder}/", "@")
    return _without_clock(json.JSONDecoder().raw_decode(printed)[0])


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_clock(each) for name, each in value.items() if name != "planning_seconds"}
    return [_without_clock(each) for each in value] if isinstance(value, list) else value


# ---- options and messages ---------------------------------------------------------------------------------------------


def options() -> dict[str, list[str]]:
    """Arguments and options with their defaults, by command."""
    parser = argparse.ArgumentParser("hearth-agent")
    add_arguments(parser)
    agent = [_parameter(each.option_strings or [each.dest], each.default) for each in parser._actions]
    return {**_options(typer.main.get_command(app), "hearth"), "hearth-agent": agent}


def _options(command: Any, path: str) -> dict[str, list[str]]:
    found = {path: [_parameter([*each.opts, *each.secondary_opts], each.default) for each in command.params]}
    for name, each in sorted(getattr(command, "commands", {}).items()):
        found |= _options(each, f"{path} {name}")
    return found


def _parameter(names: list[str], default: Any) -> str:
    shown = "computed" if callable(default) else json.dumps(default, default=str)
    return f"{' '.join(names)} = {shown}"


def messages() -> dict[str, str]:
    return {name: encode(message).hex() for name, message in named_examples().items()}
