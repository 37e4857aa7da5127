"""App keys: admitted, revoked, remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.serve.apps import AppRegistry
from hearth.errors import BadRequest, BadSetting


def test_apps_are_admitted_revoked_and_remembered(tmp_path: Path) -> None:
    apps = AppRegistry(tmp_path / "apps.json")
    apps.add("lamp", "k1")
    assert AppRegistry(tmp_path / "apps.json").is_admitted("k1")
    for bad in ("lamp", "Lamp", "", "a b", "x" * 33):
        with pytest.raises(BadRequest):
            apps.add(bad, "k2")
    apps.revoke("lamp")
    assert apps.is_revoked("k1")
    assert not apps.is_admitted("k1")
    assert apps.name_of("k1") == "lamp"
    with pytest.raises(BadRequest, match="no app"):
        apps.revoke("lamp")
    apps.add("lamp", "k3")
    assert (apps.names(), apps.revoked_names()) == (["lamp"], ["lamp"])


def test_a_change_of_the_file_counts_at_the_next_request(tmp_path: Path) -> None:
    first, second = (AppRegistry(tmp_path / "apps.json") for _ in range(2))
    first.add("lamp", "k1")
    assert second.is_admitted("k1")
    first.revoke("lamp")
    assert not second.is_admitted("k1")
    (tmp_path / "apps.json").write_text("{")
    with pytest.raises(BadSetting, match="cannot be read"):
        second.is_admitted("k1")
