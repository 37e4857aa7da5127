"""Health of devices, heartbeats and duplicate device ids."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coordinator.devices import registry
from coordinator.devices.registry import QUARANTINE_SECONDS, RECONNECT_SECONDS, Device
from hearth.errors import DuplicateDevice
from hearth.protocol import DEAD_SECONDS, HEARTBEAT_SECONDS, SUSPECT_SECONDS
from hearth.wire.messages import AgentState, AgentWelcome, WorkerStatus

runner = CliRunner()


def device(name: str = "a", boot_id: str = "boot", host: str = "10.0.0.1", last_seen: float = 100.0) -> Device:
    welcome = AgentWelcome(
        version="0.1.0", device_id="id", boot_id=boot_id, name=name, device_public_key="0" * 40, link_port=1
    )
    return Device(welcome, host, 47800, last_seen)


STATE = AgentState(boot_id="boot", workers=(WorkerStatus(state="ready", epoch=1),))


def test_silent_device_becomes_suspect_then_dead_and_recovers() -> None:
    known = device()
    assert registry.after_missed_heartbeat(known, 100 + SUSPECT_SECONDS - 0.1).health == "alive"
    suspect = registry.after_missed_heartbeat(known, 100 + SUSPECT_SECONDS)
    assert suspect.health == "suspect"
    assert "no answer for 1.5 s" in suspect.reason
    assert registry.after_missed_heartbeat(suspect, 100 + DEAD_SECONDS).health == "dead"
    back = registry.after_heartbeat(suspect, STATE, 102.0)
    assert (back.health, back.reason, back.last_seen) == ("alive", "", 102.0)


def test_missed_heartbeat_is_retried_immediately() -> None:
    now, beats = 100.0, []
    known = device(last_seen=now)
    while known.health != "dead":
        pause, patience = registry.next_heartbeat(known, now)
        beats.append(pause)
        now += pause + patience
        known = registry.after_missed_heartbeat(known, now)
    assert beats[0] == HEARTBEAT_SECONDS
    assert len(beats) >= 4
    assert now - 100.0 <= DEAD_SECONDS + 0.2


def test_broken_connection_takes_a_device_out_of_plans_until_it_answers() -> None:
    known, other = device("a"), device("b")
    broken = registry.after_connection_lost(known, 100.1)
    assert (broken.health, broken.reason) == ("suspect", "its connection broke")
    assert registry.after_connection_lost(broken, 100.2) == broken
    assert registry.usable([broken, other], 100.2) == [other]
    assert registry.usable([broken], 100.2) == []
    assert registry.after_missed_heartbeat(broken, 100.2) == broken
    back = registry.after_heartbeat(broken, STATE, 100.3)
    assert registry.usable([back, other], 100.3) == [back, other]


def test_device_that_accepts_no_new_connection_is_dead_before_a_silent_one_would_be() -> None:
    now = 100.0
    known = registry.after_connection_lost(device(last_seen=now), now)
    while known.health != "dead":
        pause, patience = registry.next_heartbeat(known, now)
        assert pause < 0.1
        now += pause + patience
        known = registry.after_missed_heartbeat(known, now)
    assert now - 100.0 <= RECONNECT_SECONDS + 0.2 < DEAD_SECONDS
    assert "accepts no new one" in known.reason


def test_quarantined_device_is_used_only_if_no_other_is_left() -> None:
    good, bad = device("good"), registry.after_worker_death(device("bad"), now=100.0)
    assert registry.usable([good, bad], now=101.0) == [good]
    assert registry.usable([bad], now=101.0) == [bad]
    assert registry.usable([good, bad], now=100.0 + QUARANTINE_SECONDS) == [bad, good]  # sorted by name
    assert registry.usable([registry.after_missed_heartbeat(good, 110.0)], now=110.0) == []


def test_cloned_device_id_is_detected_but_restart_is_not() -> None:
    known = device()
    registry.check_device_id_unique(None, known.welcome, "x", 1)
    registry.check_device_id_unique(known, known.welcome, "elsewhere", 1)  # the same run, over another network
    registry.check_device_id_unique(known, device(boot_id="new").welcome, "10.0.0.1", 47800)  # the agent was restarted
    with pytest.raises(DuplicateDevice, match="copy"):
        registry.check_device_id_unique(known, device(boot_id="new").welcome, "10.0.0.2", 47800)
