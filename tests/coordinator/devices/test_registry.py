"""Health of devices, heartbeats and duplicate device ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.devices import registry
from coordinator.devices.registry import MAX_DEAD_SECONDS, MIN_DEAD_SECONDS, RECONNECT_SECONDS, Device
from hearth import errors
from hearth.protocol import DEAD_SECONDS, HEARTBEAT_SECONDS, LEASE_SECONDS, late_seconds
from hearth.wire.messages import AgentState, AgentWelcome, WorkerStatus


def device(name: str = "a", boot_id: str = "boot", host: str = "10.0.0.1", last_seen: float = 100.0) -> Device:
    welcome = AgentWelcome(
        version="0.1.0", device_id="id", boot_id=boot_id, name=name, device_public_key="0" * 40, link_port=1
    )
    return Device(welcome, host, 47800, last_seen)


STATE = AgentState(boot_id="boot", workers=(WorkerStatus(state="ready", epoch=1),))


WIRE = 0.0004  # seconds of a round trip


def test_silent_device_becomes_suspect_then_dead_and_recovers() -> None:
    known = device()
    assert registry.after_missed_heartbeat(known, 101.5).health == "alive"
    suspect = registry.after_missed_heartbeat(known, 102.0)
    assert suspect.health == "suspect"
    assert "no answer for 2.0 s" in suspect.reason
    assert registry.after_missed_heartbeat(suspect, 100 + DEAD_SECONDS).health == "dead"
    back = registry.after_heartbeat(suspect, STATE, 102.0, WIRE)
    assert (back.health, back.reason, back.last_seen) == ("alive", "", 102.0)


def watched(intervals: list[float], round_trip: float = WIRE) -> tuple[Device, float]:
    """A device that answered after these intervals, in seconds, and the time of its last answer."""
    known, now = replace(device(), watched_since=100.0), 100.0
    for interval in intervals:
        now += interval
        known = registry.after_heartbeat(known, STATE, now, round_trip)
    return known, now


def test_device_that_always_answers_at_once_is_given_up_after_a_second_and_an_unknown_one_after_three() -> None:
    assert registry.dead_seconds(replace(device(), watched_since=100.0), 100.0) == DEAD_SECONDS
    known, now = watched([0.5])
    assert DEAD_SECONDS - 0.1 < registry.dead_seconds(known, now) < DEAD_SECONDS
    known, now = watched([0.5] * 30)
    assert registry.dead_seconds(known, now) == pytest.approx((DEAD_SECONDS + MIN_DEAD_SECONDS) / 2)
    known, now = watched([0.5] * 29 + [1.4])
    assert registry.dead_seconds(known, now) == pytest.approx(2.8)
    known, now = watched([0.51] * 100)
    assert MIN_DEAD_SECONDS <= registry.dead_seconds(known, now) < 1.1
    known, now = watched([0.51] * 100 + [1.2] + [0.51] * 100)
    assert registry.dead_seconds(known, now) == pytest.approx(2.4)
    known, now = watched([0.51] * 100 + [1.2] + [0.51] * 600)
    assert registry.dead_seconds(known, now) < 1.1


def test_device_on_a_radio_link_is_given_the_longest_time_before_its_first_stall() -> None:
    radio, now = watched([0.51] * 100, round_trip=0.006)
    assert registry.dead_seconds(radio, now) == MAX_DEAD_SECONDS
    assert LEASE_SECONDS >= registry.lease_seconds(radio, 2.0, now) > MAX_DEAD_SECONDS
    wired, _ = watched([0.51] * 100)
    stall = 2.0
    for witnesses in (1, 3):
        assert (
            registry.witnessed_seconds(radio, now, witnesses)
            > stall
            > registry.witnessed_seconds(wired, now, witnesses)
        )
    for pair in ((radio, wired), (wired, radio)):
        assert registry.connect_seconds(*pair, now) > stall
    assert not device().is_on_radio
    # While its round trip cannot be read, a device stays what it was.
    assert registry.after_answer(radio, now + 0.51).is_on_radio


def test_device_that_was_given_up_although_it_ran_gets_more_time() -> None:
    known, now = watched([0.51] * 100)
    assert registry.silences_at_return(known, known.welcome, now + 1.7)[-1] == (now + 1.7, pytest.approx(1.7))
    assert registry.silences_at_return(known, device(boot_id="new").welcome, now + 9) == known.silences
    assert registry.silences_at_return(None, known.welcome, now) == ()


def test_device_that_was_away_for_longer_than_any_limit_is_noticed_as_soon_as_before_at_its_next_loss() -> None:
    known, now = watched([0.51] * 100)
    assert registry.silences_at_return(known, known.welcome, now + 12) == known.silences


@pytest.mark.parametrize("longest_silence", [0.51, 1.0, 1.8])
def test_witnessed_device_or_link_is_given_a_second_with_the_wait_before_and_longer_if_it_is_often_silent(
    longest_silence: float,
) -> None:
    known, now = watched([0.51] * 100 + [longest_silence])
    waited = late_seconds(5.0)
    assert waited + registry.witnessed_seconds(known, now, 3) >= max(MIN_DEAD_SECONDS, longest_silence)
    assert waited + registry.witnessed_seconds(known, now, 1) >= max(1.35, longest_silence)
    assert MIN_DEAD_SECONDS <= waited + registry.connect_seconds(known, known, now) <= 1.5
    new, now = watched([0.51])
    assert waited + registry.witnessed_seconds(new, now, 3) < 2.0


@given(st.lists(st.floats(0.05, 6.0), min_size=1, max_size=200))
def test_time_until_death_covers_every_recent_silence(intervals: list[float]) -> None:
    known, now = watched(intervals)
    limit = registry.dead_seconds(known, now)
    assert MIN_DEAD_SECONDS <= limit <= MAX_DEAD_SECONDS < LEASE_SECONDS
    if now >= 130.0:
        assert limit >= min(max(intervals[-49:]), MAX_DEAD_SECONDS)  # 49 intervals of at most 6 s are in the window
    assert [length for _, length in known.silences] == sorted((length for _, length in known.silences), reverse=True)
    assert registry.after_missed_heartbeat(known, now + MAX_DEAD_SECONDS + 0.01).health == "dead"
    assert registry.after_missed_heartbeat(known, now + MIN_DEAD_SECONDS / 2).health == "alive"


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
    back = registry.after_heartbeat(broken, STATE, 100.3, WIRE)
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


DIED = errors.WorkerDied(device="a", reason="killed")
FULL = errors.StoreFull(device="a", needed_bytes=2, free_bytes=1)
CORRUPT = errors.ChunkCorrupt(chunk="c", where="the disk of a", device="a")


def test_quarantined_devices_are_used_only_if_no_other_is_left_and_then_those_with_the_mildest_fault() -> None:
    good = device("good")
    died, full = (registry.after_device_fault(device(error.code), error, 100.0) for error in (DIED, FULL))
    assert registry.usable([good, died, full], 101.0) == [good]
    assert registry.usable([died, full], 101.0) == [died]
    assert registry.usable([full], 101.0) == [full]
    assert registry.usable([good, died, full], 160.0) == [full, died, good]  # by name
    assert registry.needed_despite_quarantine([good, died, full], 101.0) == [died]
    assert not registry.after_pardon(died, 101.0).is_quarantined(101.0)
    assert "left out of plans for 59 s: its worker died: killed" in died.info(101.0).reason
    assert died.info(160.0).reason == ""


def test_of_quarantined_devices_with_the_same_fault_those_are_used_that_had_it_least_often() -> None:
    once, often = (registry.after_device_fault(device(name), DIED, 100.0) for name in ("once", "often"))
    assert registry.usable([once, often], 101.0) == [often, once]  # by name
    often = registry.after_device_fault(often, DIED, 101.0)
    assert registry.usable([once, often], 102.0) == [once]
    assert registry.needed_despite_quarantine([once, often], 102.0) == [once]
    assert registry.usable([often], 102.0) == [often]


def test_device_whose_worker_dies_again_and_again_does_not_keep_out_one_whose_store_failed_once() -> None:
    failed = registry.after_device_fault(device("failed"), errors.StoreFailed(device="a", reason="read-only"), 100.0)
    dying = device("dying")
    for attempt in range(1, 4):
        dying = registry.after_device_fault(dying, DIED, 100.0 + attempt)
        assert registry.usable([dying, failed], 105.0) == [dying]
    dying = registry.after_device_fault(dying, DIED, 104.0)
    assert registry.usable([dying, failed], 105.0) == [failed]
    failed = registry.after_device_fault(failed, errors.StoreFailed(device="a", reason="read-only"), 105.0)
    assert registry.usable([dying, failed], 106.0) == [dying]


def test_quarantine_grows_with_each_repetition_and_starts_again_after_an_hour() -> None:
    known, now, lengths = device(), 100.0, []
    for _ in range(6):
        known = registry.after_device_fault(known, DIED, now)
        lengths.append(known.quarantine.until - now)
        now = known.quarantine.until
    assert lengths == [60, 120, 240, 480, 960, 960]
    later = registry.after_device_fault(known, DIED, now + 4000).quarantine
    assert later.until - now - 4000 == 60


def test_worker_that_served_may_start_again_once_in_a_minute() -> None:
    known = registry.after_device_fault(device(), DIED, 100.0, may_restart=True)
    assert not known.is_quarantined(100.0)
    again = registry.after_device_fault(known, DIED, 161.0, may_restart=True)
    assert not again.is_quarantined(161.0)
    soon = registry.after_device_fault(known, DIED, 130.0, may_restart=True)
    assert (soon.is_quarantined(189.0), soon.is_quarantined(190.0)) == (True, False)
    assert not registry.after_device_fault(soon, DIED, 200.0, may_restart=True).is_quarantined(200.0)
    assert registry.after_device_fault(device(), FULL, 100.0, may_restart=True).is_quarantined(159.0)


def test_first_damaged_chunk_is_forgiven_and_the_second_is_not() -> None:
    once = registry.after_device_fault(device(), CORRUPT, 100.0)
    assert not once.is_quarantined(100.0)
    assert registry.after_device_fault(once, CORRUPT, 110.0).is_quarantined(169.0)


@pytest.mark.parametrize(
    "error", [errors.StepFailed(device="a", reason="late"), errors.DeviceLost(device="a", reason="gone")]
)
def test_errors_that_say_nothing_about_the_device_quarantine_nobody(error: errors.HearthError) -> None:
    assert not registry.after_device_fault(device(), error, 100.0).is_quarantined(100.0)


def test_cloned_device_id_is_detected_but_restart_is_not() -> None:
    known = device()
    registry.check_device_id_unique(None, known.welcome, "x", 1)
    registry.check_device_id_unique(known, known.welcome, "elsewhere", 1)  # the same run, over another network
    registry.check_device_id_unique(known, device(boot_id="new").welcome, "10.0.0.1", 47800)  # the agent was restarted
    with pytest.raises(errors.DuplicateDevice, match="copy"):
        registry.check_device_id_unique(known, device(boot_id="new").welcome, "10.0.0.2", 47800)
