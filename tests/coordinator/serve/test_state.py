"""The saved state and the coordinator's settings."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from support.plans import BERT_LARGE, make_plan
from support.waiting import until

from coordinator.serve import config
from coordinator.serve import state as module
from coordinator.serve.clients.key_registry import KeyRegistry
from coordinator.serve.config import load_coordinator_settings
from coordinator.serve.state import GraphGoal, SavedDeployment, StateFile, TransformerGoal, keep_retrying, locked_state
from hearth.errors import BadSetting
from hearth.platform.asyncio_tools import cancel_all


def test_state_persists_and_damaged_files_are_replaced_by_their_second_copy(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.current.deployments == {}
    first = SavedDeployment(goal=TransformerGoal(model_dir="/m"), plan=make_plan(BERT_LARGE, "hmp", (1, 1)))
    second = SavedDeployment(goal=GraphGoal(model_file="/m.onnx", dims={"batch": 2}))
    file.save("default", first, 7)
    file.save("other", second, 6)
    state = StateFile(tmp_path).current
    assert (state.deployments, state.last_epoch) == ({"default": first, "other": second}, 7)
    for damage in (b'{"goal": 3', b"", b"\xff\x00", b"[]"):
        (tmp_path / "serving.json").write_bytes(damage)
        assert StateFile(tmp_path).current == state
        assert (tmp_path / "serving.unreadable").read_bytes() == damage
    for name in ("serving.json", "serving.json.bak"):
        (tmp_path / name).write_text("{")
    assert StateFile(tmp_path).current.deployments == {}


def test_holder_is_kept_over_a_restart_but_not_on_another_computer(tmp_path: Path) -> None:
    file = StateFile(tmp_path, boot_id="one")
    file.save("default", SavedDeployment(goal=TransformerGoal(model_dir="/m")), 1)
    assert StateFile(tmp_path, boot_id="one").current.holder == file.current.holder
    assert StateFile(tmp_path, boot_id="two").current.holder != file.current.holder


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
    assert file.current.last_epoch == 2
    assert sum("cannot be written" in line for line in caplog.messages) == 1
    assert StateFile(tmp_path).current.last_epoch == 0
    file.file.retry()
    assert StateFile(tmp_path).current == file.current


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_what_a_full_disk_did_not_take_is_written_later_or_when_the_coordinator_stops(
    is_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revocation would be forgotten with the next restart."""

    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_RETRY_SECONDS", 600.0 if is_stopped else 0.01)
    state, devices = StateFile(tmp_path), KeyRegistry(tmp_path / "devices.json", "device")
    with monkeypatch.context() as patched:
        patched.setattr(module, "write_atomically", disk_full)
        state.save_configuration(None)
        devices.add("attic", "k1")
    assert not any(file.path.exists() for file in (state.file, devices.file))
    saving = asyncio.create_task(keep_retrying([state.file, devices.file]))
    if is_stopped:
        await asyncio.sleep(0)
    else:
        await until("the files", devices.file.path.exists, seconds=20)
    await cancel_all([saving])
    assert StateFile(tmp_path).current.holder == state.current.holder
    assert list(KeyRegistry(tmp_path / "devices.json", "device").current.keys.values()) == ["attic"]


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


def test_commands_read_the_keys_of_devices_where_the_service_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, service = tmp_path / "own", tmp_path / "service"
    monkeypatch.setattr(config, "_SERVICE_STATE_DIR", service)
    assert config.device_registry_dir(own) == own  # there is no service
    service.mkdir()
    assert config.device_registry_dir(own) == service
    own.mkdir()
    (own / "devices.json").touch()
    assert config.device_registry_dir(own) == own
