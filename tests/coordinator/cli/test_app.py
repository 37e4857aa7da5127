"""The command line: help texts, keys, invalid input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.version import Version
from support.checkpoints import write_model
from support.graphs import save_two_branch_model
from support.plans import BERT_LARGE, make_plan
from typer.core import TyperGroup
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.output import out
from coordinator.cli.render.tables import plan_tables
from hearth.platform.security import load_credential

_ARGUMENTS_HAVE_HELP = Version(version("typer")) >= Version("0.26")  # as an attribute; before, only as text

WITH_PLAN = ("--plan", "PLAN", "--state-dir", "STATE", "--port", "0")  # with a port that no other program has

runner = CliRunner()


def run(*arguments: str, code: int = 0, text: str | None = None) -> str:
    result = runner.invoke(app, list(arguments), input=text)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all its subcommands, with the words that call each."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            yield from commands_of(below, (*path, name))


COMMANDS = dict(commands_of(typer.main.get_command(app)))


def test_commands_of_finds_commands_and_subcommands() -> None:
    assert {"plan", "serve", "generate", "infer", "bench-model", "key"} <= {path[0] for path in COMMANDS if path}
    assert ("key", "rotate") in COMMANDS


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("width", [80, 120])
def test_commands_and_options_have_help_within_the_terminal_width(path: tuple[str, ...], width: int) -> None:
    command = COMMANDS[path]
    assert (command.help or "").strip()
    # Not TERMINAL_WIDTH: typer reads it once, at its first help, which would be the width of all later ones.
    result = runner.invoke(app, [*path, "--help"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output
    assert max(map(len, result.output.splitlines())) <= width
    assert "…" not in result.output
    for parameter in command.params:
        if parameter.param_type_name == "option" or _ARGUMENTS_HAVE_HELP:
            assert (getattr(parameter, "help", "") or "").strip(), parameter.name
        if parameter.param_type_name == "option":
            assert all(name in result.output for name in (*parameter.opts, *parameter.secondary_opts)), parameter.name


def test_keys_are_created_shown_exported_and_rotated(tmp_path: Path) -> None:
    home, other, admin = (str(tmp_path / name) for name in ("home", "other", "admin"))
    run("key", "new", "--key", home)
    assert "There is a key at" in run("key", "new", "--key", home, code=1)
    line = runner.invoke(app, ["key", "export", "--key", home]).stdout.strip()
    assert line.startswith("hearth-home-1:")
    run("key", "import", "-", "--key", other, text=line)
    assert load_credential(Path(other)) == load_credential(Path(home))
    admin_line = runner.invoke(app, ["key", "export", "--role", "admin", "--key", home]).stdout
    run("key", "import", "-", "--key", admin, text=admin_line)
    shown = json.loads(run("key", "show", "--key", admin, "--json"))
    assert shown["kind"] == "admin"
    assert shown["home_fingerprint"] == json.loads(run("key", "show", "--key", home, "--json"))["home_fingerprint"]
    assert "needs the home key" in run("key", "export", "--key", admin, code=1)
    before = load_credential(Path(home))
    run("key", "rotate", "--key", home)
    assert load_credential(Path(home)) != before
    assert load_credential(Path(home + ".old")) == before
    assert "cannot be used" in run("key", "import", "-", "--key", other, "--force", code=1, text=line[:-9])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("embed", "hello", "--key", "none"), 1, "no key at none"),
        (("plan", "no-such-model"), 1, "no-such-model"),
        (("plan", "MODEL", "--strategy", "magic"), 1, "'magic' is none of auto, local"),
        (("demo", "--model", "no-such-model"), 1, "no-such-model"),
        (("embed", "hello", "--key", "KEY", "--address", "a:b"), 1, "'a:b' is not of the form"),
        # `hearth serve` exits with 2 if no retry can help; systemd does not restart it at this status.
        (("serve", "CUT"), 1, "model.safetensors cannot be used: it has"),
        (("serve", "MODEL", "--key", "none"), 1, "no key at none"),
        (("serve", "MODEL", "--wire", "fp3"), 2, "'fp3' is none of"),
        (("serve", "MODEL", "--strategy", "moirai"), 2, "'moirai' is none of auto, local"),
        (("serve", "GRAPH", "--strategy", "hmp"), 2, "'hmp' is none of auto, moirai"),
        (("serve", "MODEL", "--key", "KEY", "--plan", "no-plan.json"), 2, "no-plan.json cannot be read"),
        (("serve", "MODEL", *WITH_PLAN), 2, "it was made for the model bert-large"),
        (("serve", "GRAPH", *WITH_PLAN), 2, "it is for a transformer, and"),
    ],
)
def test_invalid_input_is_reported_in_one_line(
    arguments: tuple[str, ...], status: int, message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    run("key", "new", "--key", str(tmp_path / "key"))
    cut = write_model(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    (tmp_path / "plan.json").write_text(make_plan(BERT_LARGE, "hmp", (1, 1)).model_dump_json())
    places = {
        "CUT": cut.parent, "MODEL": tmp_path / "model", "KEY": tmp_path / "key", "STATE": tmp_path / "state",
        "PLAN": tmp_path / "plan.json", "GRAPH": save_two_branch_model(tmp_path / "graph.onnx", channels=4),
    }  # fmt: skip
    key = () if "--key" in arguments else ("--key", str(tmp_path / "key")) if arguments[0] != "demo" else ()
    output = run(*(str(places.get(argument, argument)) for argument in (*arguments, *key)), code=status)
    assert message in " ".join(output.split())


def test_plan_is_printed_with_bytes_and_budgets() -> None:
    with out.capture() as captured:
        out.print(*plan_tables(make_plan(BERT_LARGE, "hmp", (3, 1))))
    for expected in ("device0", "device1", "heads", "12", "3072", "384", "weights", "budget"):
        assert expected in captured.get()
