"""The saved state and the coordinator's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.plans import BERT_LARGE, make_plan
from typer.testing import CliRunner

from coordinator.serve.config import load_settings
from coordinator.serve.state import SavedState, ServingGoal, StateFile
from hearth.errors import BadSetting

runner = CliRunner()


def test_state_survives_and_damage_is_kept_aside(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.load() == SavedState()
    state = SavedState(goal=ServingGoal(model_dir="/m"), plan=make_plan(BERT_LARGE, "hmp", (1, 1)), last_epoch=7)
    file.save(state)
    assert StateFile(tmp_path).load() == state
    (tmp_path / "serving.json").write_text('{"goal": 3')
    assert file.load() == SavedState()
    assert (tmp_path / "serving.unreadable").exists()


def test_coordinator_settings_come_from_flags_then_environment() -> None:
    environ = {
        "HOME": "/h",
        "HEARTH_COORDINATOR_PORT": "5",
        "HEARTH_COORDINATOR_MDNS_INTERFACES": "1.2.3.4, 5.6.7.8",
    }
    assert load_settings({}, environ).port == 5
    assert load_settings({"port": 6}, environ).port == 6
    assert load_settings({}, environ).interfaces == ["1.2.3.4", "5.6.7.8"]
    assert load_settings({}, {"HOME": "/h"}).state_dir == Path("/h/.local/state/hearth-coordinator")
    with pytest.raises(BadSetting, match="--port"):
        load_settings({"port": 70_000}, environ)
