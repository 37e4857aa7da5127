"""Options that apply to only one kind of model."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from support.checkpoints import write_model
from support.graphs import save_graph, two_branches
from support.plans import device_profile
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.model_options import ServeOptions, kinds_of_options
from coordinator.devices.profile_file import SavedTransformerProfile
from coordinator.models.checkpoint.families import read_spec
from coordinator.serve.state import goal_from_json
from hearth.errors import BadRequest
from hearth.platform.security import new_home_key, save_credential

VALUES = {
    "strategy": "auto", "objective": "latency", "dim": "batch=1", "time_limit": "5", "seq_len": "8", "context": "9",
    "sequences": "2", "weights": "int8", "kv_cache": "int8", "wire": "int8", "lz4": "on", "accuracy_budget": "0.1",
    "exclude": "attic", "limit": "attic=1GiB", "rounds": "3", "learn": "30s",
    "speculate": "off",
}  # fmt: skip
OTHER_NAMES = {"name_as": "--as"}  # of options whose parameter has another name
FLAGS = {
    "no_congestion", "no_kv_copies", "shared_prefixes", "special_contents", "deterministic", "no_learn", "compare", "pin",
}  # fmt: skip


PLAN = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
PLAN_KINDS = kinds_of_options(typer.Context(PLAN))


def arguments_for(name: str) -> list[str]:
    option = OTHER_NAMES.get(name, f"--{name.replace('_', '-')}")
    return [option] if name in FLAGS else [option, VALUES.get(name, "some-file.json")]


def error(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    # `hearth serve` exits with 2, at which systemd does not restart it.
    assert result.exit_code == (2 if arguments[0] == "serve" else 1), result.output
    return re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize("name", sorted(PLAN_KINDS))
def test_option_for_another_kind_of_model_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    save_graph(tmp_path / "graph.json", two_branches(flops=1e6, out_bytes=1000, weights=1 << 20))
    models = {"transformer": write_model(tmp_path / "model"), "graph": tmp_path / "graph.json"}
    for kind, model in models.items():
        if kind not in PLAN_KINDS[name]:
            message = error("plan", str(model), *arguments_for(name))
            assert f"The setting --{name.replace('_', '-')} cannot be used: it applies to" in message


@pytest.mark.parametrize("name", [each.name for each in fields(ServeOptions)])
def test_serve_without_model_rejects_model_options(name: str, tmp_path: Path) -> None:
    save_credential(tmp_path / "key", new_home_key())
    message = error("serve", "--key", str(tmp_path / "key"), "--state-dir", str(tmp_path), *arguments_for(name))
    assert "it needs a MODEL" in message


def test_deterministic_plans_need_times_of_deterministic_kernels(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    profile = SavedTransformerProfile(devices=(device_profile(0, 1.0),), model=read_spec(model))
    (tmp_path / "profile.json").write_text(profile.model_dump_json())
    load = ("plan", str(model), "--load-profile", str(tmp_path / "profile.json"))
    assert "was measured without --deterministic" in error(*load, "--deterministic")
    (tmp_path / "profile.json").write_text(profile.model_copy(update={"deterministic": True}).model_dump_json())
    assert "was measured with --deterministic" in error(*load)


def test_times_of_keep_alive_and_pins_are_checked(tmp_path: Path) -> None:
    save_credential(tmp_path / "key", new_home_key())
    model = str(write_model(tmp_path / "model"))
    common = ("serve", model, "--key", str(tmp_path / "key"), "--state-dir", str(tmp_path / "state"))
    message = error(*common, "--keep-alive", "soon")
    assert "--keep-alive cannot be used: 'soon' is not a time such as 30s or 5min" in message
    message = error(*common, "--keep-alive", "5min", "--pin")
    assert "--keep-alive cannot be used: a pinned model stays loaded" in message


def test_goals_of_clients_are_checked_in_the_same_way() -> None:
    with pytest.raises(BadRequest, match="a pinned model stays loaded"):
        goal_from_json('{"kind": "graph", "model_file": "a.onnx", "pinned": true, "keep_alive_seconds": 5}')
    assert goal_from_json('{"kind": "graph", "model_file": "a.onnx", "keep_alive_seconds": 5}').keep_alive_seconds == 5
