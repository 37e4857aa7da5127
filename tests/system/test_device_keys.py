"""Devices with keys of their own: admitted, serving, and shut out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.home import LOOPBACK, TestHome
from support.models import save_random_model, small_bert
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

from hearth.errors import HearthError
from hearth.platform.security import HomeKey, agent_trust, load_credential, new_device_key, save_credential

pytestmark = pytest.mark.processes


def test_device_with_its_own_key_serves_until_it_is_revoked(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", small_bert())
    with TestHome(tmp_path, model_dir, profiles) as home:
        credential = load_credential(home.key)
        assert isinstance(credential, HomeKey)
        device = new_device_key(credential, "b")
        key = tmp_path / "b.key"
        save_credential(key, device)
        home.start_agent("a")
        home.start_agent("b", "--key-path", str(key))
        home.start_coordinator("--strategy", "sp", "--min-devices", "2", "--devices", f"{LOOPBACK}:{home.port('b')}")
        with home.connect() as client:
            client.add_device("b", agent_trust(device).own.public)
            client.wait_ready(60)

            def devices_of_the_plan() -> set[str]:
                plan = client.status().plan
                return {planned.name for planned in plan.devices} if plan is not None else set()

            assert devices_of_the_plan() == {"a", "b"}
            before = client.hidden_states([1, 2, 3])
            client.revoke_device("b")
            after = client.hidden_states([1, 2, 3], timeout_seconds=60)
            assert abs(before - after).max() < 1e-5
            assert wait_for("a plan without it", lambda: devices_of_the_plan() == {"a"}, 60)
            (revoked,) = [each for each in client.devices().devices if each.name == "b"]
            assert (revoked.state, revoked.reason) == ("refused", "its key was revoked")
            client.revoke_device("b")  # a repetition has no effect
            with pytest.raises(HearthError, match="no key of the device 'c'"):
                client.revoke_device("c")
