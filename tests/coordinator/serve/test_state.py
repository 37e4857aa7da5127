"""The saved state and the coordinator's settings."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.plans import BERT_LARGE, make_plan
from typer.testing import CliRunner

from coordinator.serve.config import load_coordinator_settings
from coordinator.serve.state import GraphGoal, SavedDeployment, StateFile, TransformerGoal, locked_state
from hearth.errors import BadSetting

runner = CliRunner()


def test_state_persists_and_damaged_files_are_replaced_by_their_second_copy(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.load().deployments == {}
    first = SavedDeployment(goal=TransformerGoal(model_dir="/m"), plan=make_plan(BERT_LARGE, "hmp", (1, 1)))
    second = SavedDeployment(goal=GraphGoal(model_file="/m.onnx", dims={"batch": 2}))
    file.save("default", first, 7)
    file.save("other", second, 6)
    state = StateFile(tmp_path).load()
    assert (state.deployments, state.last_epoch) == ({"default": first, "other": second}, 7)
    for damage in (b'{"goal": 3', b"", b"\xff\x00", b"[]"):
        (tmp_path / "serving.json").write_bytes(damage)
        assert StateFile(tmp_path).load() == state
        assert (tmp_path / "serving.unreadable").read_bytes() == damage
    for name in ("serving.json", "serving.json.bak"):
        (tmp_path / name).write_text("{")
    assert StateFile(tmp_path).load().deployments == {}


def test_holder_is_kept_over_a_restart_but_not_on_another_computer(tmp_path: Path) -> None:
    file = StateFile(tmp_path, boot_id="one")
    file.save("default", SavedDeployment(goal=TransformerGoal(model_dir="/m")), 1)
    assert StateFile(tmp_path, boot_id="one").load().holder == file.load().holder
    assert StateFile(tmp_path, boot_id="two").load().holder != file.load().holder


def test_state_is_kept_in_memory_while_the_disk_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    file = StateFile(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("coordinator.serve.state.write_atomically", disk_full)
        for epoch in (1, 2):
            file.save("default", SavedDeployment(goal=TransformerGoal(model_dir="/m")), epoch)
    assert file.load().last_epoch == 2
    assert sum("cannot be written" in line for line in caplog.messages) == 1
    assert StateFile(tmp_path).load().last_epoch == 0
    file.retry()
    assert StateFile(tmp_path).load() == file.load()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_coordinator_starts_although_its_folder_cannot_be_locked(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with locked_state(tmp_path / "new"):
        pass


def test_coordinator_settings_come_from_flags_then_environment() -> None:
    environ = {"HOME": "/h", "HEARTH_COORDINATOR_PORT": "5", "HEARTH_COORDINATOR_MDNS_INTERFACES": "1.2.3.4, 5.6.7.8"}
    assert load_coordinator_settings({}, environ).port == 5
    assert load_coordinator_settings({"port": 6}, environ).port == 6
    assert load_coordinator_settings({}, environ).interfaces == ["1.2.3.4", "5.6.7.8"]
    assert load_coordinator_settings({}, {"HOME": "/h"}).state_dir == Path("/h/.local/state/hearth-coordinator")
    with pytest.raises(BadSetting, match="--port"):
        load_coordinator_settings({"port": 70_000}, environ)
