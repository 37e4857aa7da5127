"""A new home: its coordinator serves no model yet, and a device joins with a key of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.home import TestHome
from support.waiting import wait_for


@pytest.mark.processes
def test_device_joins_a_home_that_serves_no_model_yet(tmp_path: Path) -> None:
    with TestHome(tmp_path, tmp_path / "no model") as home:
        home.start_coordinator(model=False)
        with home.connect() as client:
            line = home.run("key", "add-device", "kitchen", check=True).stdout
            assert line.startswith("hearth-device-1:")
            key = tmp_path / "kitchen.key"
            key.write_text(line)
            key.chmod(0o600)
            home.start_agent("kitchen", "--key-path", str(key))
            wait_for("the device", lambda: [each.state for each in client.devices().devices] == ["alive"])
        assert "no model is served; add one with `hearth serve MODEL`" in home.log("coordinator")
