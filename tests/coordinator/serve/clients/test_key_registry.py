"""App keys: admission, revocation, persistence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.waiting import until

from coordinator.serve import state as module
from coordinator.serve.clients.key_registry import KeyRegistry, RegisteredKeys
from hearth.errors import BadRequest
from hearth.platform.asyncio_tools import cancel_all


def test_apps_are_admitted_revoked_and_persisted(tmp_path: Path) -> None:
    apps = KeyRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    assert "k1" in KeyRegistry(tmp_path / "apps.json").current.keys
    for bad in ("lamp", "Lamp", "x\n", "", "a b", "x" * 33):
        with pytest.raises(BadRequest):
            apps.add(bad, "k2")
    apps.revoke("lamp")
    assert apps.current == RegisteredKeys(revoked={"k1": "lamp"})
    with pytest.raises(BadRequest, match="no key of the app 'lam'"):
        apps.revoke("lam")
    apps.add("lamp", "k3")
    assert apps.current == RegisteredKeys(keys={"k3": "lamp"}, revoked={"k1": "lamp"})


def test_change_that_a_client_repeats_at_another_coordinator_has_no_further_effect(tmp_path: Path) -> None:
    """After a restart or a hand-over, the coordinator does not know which requests were answered."""
    for number, change in enumerate((("add", "lamp", "k1"), ("revoke", "lamp"), ("add", "lamp", "k2"))):
        for _ in range(2):
            apps = KeyRegistry(tmp_path / "apps.json")
            getattr(apps, change[0])(*change[1:])
        assert (
            apps.current
            == [
                RegisteredKeys(keys={"k1": "lamp"}),
                RegisteredKeys(revoked={"k1": "lamp"}),
                RegisteredKeys(keys={"k2": "lamp"}, revoked={"k1": "lamp"}),
            ][number]
        )


def test_revoked_key_is_not_admitted_again(tmp_path: Path) -> None:
    apps = KeyRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    apps.revoke("lamp")
    for name in ("lamp", "another"):
        with pytest.raises(BadRequest, match="key of the app 'lamp' was revoked"):
            apps.add(name, "k1")


def test_roles_are_kept_and_merged_with_their_keys(tmp_path: Path) -> None:
    apps = KeyRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    apps.add("prometheus", "k2", "metrics")
    assert KeyRegistry(tmp_path / "apps.json").current.roles == {"k2": "metrics"}
    with pytest.raises(BadRequest, match="already"):  # a role does not change
        apps.add("lamp", "k1", "observer")
    theirs = RegisteredKeys(
        keys={"k3": "screen", "k4": "lamp"}, revoked={"k2": "prometheus"}, roles={"k3": "observer", "k4": "observer"}
    )
    apps.merge(theirs)
    assert apps.current.roles == {"k3": "observer"}
    apps.revoke("screen")
    assert apps.current.roles == {}


def test_keys_of_another_coordinator_are_merged(tmp_path: Path) -> None:
    apps = KeyRegistry(tmp_path / "apps.json")
    for name, key in (("lamp", "k1"), ("door", "k2"), ("clock", "k4")):
        apps.add(name, key)
    apps.revoke("door")
    theirs = {"k2": "door", "k4": "clock", "k5": "heater", "k6": "clock", "k7": "Bad Name", "k3": "radio"}
    changed = apps.merge(RegisteredKeys(keys=theirs, revoked={"k1": "lamp", "k3": "radio"}))
    assert changed == RegisteredKeys(keys={"k5": "heater"}, revoked={"k1": "lamp", "k3": "radio"})
    expected = RegisteredKeys(keys={"k4": "clock", "k5": "heater"}, revoked={"k2": "door", "k1": "lamp", "k3": "radio"})
    assert KeyRegistry(tmp_path / "apps.json").current == expected
    assert apps.merge(RegisteredKeys(keys=theirs, revoked={"k1": "lamp"})) == RegisteredKeys()


async def test_changes_by_another_program_take_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    first, second = (KeyRegistry(tmp_path / "apps.json") for _ in range(2))
    following = asyncio.create_task(module.keep_retrying([second.file]))
    first.add("lamp", "k1")
    await until("the key", lambda: "k1" in second.current.keys)
    first.revoke("lamp")
    await until("the revocation", lambda: "k1" not in second.current.keys)
    second.add("door", "k2")
    assert second.current.keys == {"k2": "door"}  # at once, and it stays although the disk has it later
    assert await second.file.saved()
    await second.file.look()
    assert second.current == KeyRegistry(tmp_path / "apps.json").current
    assert second.current == RegisteredKeys(keys={"k2": "door"}, revoked={"k1": "lamp"})
    await cancel_all([following])


async def test_what_another_program_has_written_is_not_written_again(tmp_path: Path) -> None:
    """That program might have changed it again meanwhile, for instance to revoke the key."""
    first, second = (KeyRegistry(path := tmp_path / "apps.json") for _ in range(2))
    first.add("lamp", "k1")
    assert await first.file.saved()
    written = path.stat().st_ino
    await second.file.look()
    assert await second.file.saved()
    assert second.current.keys == {"k1": "lamp"}
    assert path.stat().st_ino == written


async def test_damaged_list_is_replaced_by_its_second_copy(tmp_path: Path) -> None:
    apps = KeyRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    assert await apps.file.saved()
    (tmp_path / "apps.json").write_text("{")
    await apps.file.look()
    assert apps.current == KeyRegistry(tmp_path / "apps.json").current == RegisteredKeys(keys={"k1": "lamp"})
    for name in ("apps.json", "apps.json.bak"):
        (tmp_path / name).write_text("{")
    await apps.file.look()
    assert apps.current == RegisteredKeys(keys={"k1": "lamp"})  # the last list stays in force


def test_revocation_holds_while_the_disk_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = KeyRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    with monkeypatch.context() as patched:
        patched.setattr("coordinator.serve.state.write_atomically", _disk_full)
        apps.revoke("lamp")
        assert apps.current == RegisteredKeys(revoked={"k1": "lamp"})
    assert "k1" in KeyRegistry(tmp_path / "apps.json").current.keys
    apps.file.retry()
    assert KeyRegistry(tmp_path / "apps.json").current == RegisteredKeys(revoked={"k1": "lamp"})


def _disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")
