"""Silences of devices that outlast a run of the coordinator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.devices import ready_device
from support.waiting import until

from coordinator.devices import registry, silences
from coordinator.devices.registry import MIN_DEAD_SECONDS, Device
from coordinator.devices.silences import SilenceFile, differ_much, learned
from hearth.platform.asyncio_tools import loop_time


def watched(longest: float, now: float, for_seconds: float = 60.0, **changes: object) -> Device:
    """A device that is well, and whose longest silence was this long."""
    since, seen = now - for_seconds, (now, longest)
    return replace(ready_device("a"), last_seen=now, watched_since=since, silences=(seen,), **changes)  # type: ignore[arg-type]


def test_only_devices_that_are_well_and_no_longer_new_are_known() -> None:
    known = learned([watched(0.9, 100.0)], 100.0)
    assert [each.seconds for each in known.values()] == [0.9]
    assert learned([watched(0.9, 100.0, for_seconds=20.0)], 100.0) == {}
    assert learned([watched(0.9, 100.0, health="suspect")], 100.0) == {}
    assert learned([watched(0.9, 100.0, health="busy")], 100.0) == {}


def test_a_silence_counts_only_for_the_same_run_key_and_address() -> None:
    (known,) = learned([device := watched(0.9, 100.0)], 100.0).values()
    welcome, host = device.welcome, device.host
    assert known.counts_for(welcome, host)
    assert not known.counts_for(welcome.model_copy(update={"boot_id": "restarted"}), host)
    assert not known.counts_for(welcome.model_copy(update={"device_public_key": "1" * 40}), host)
    assert not known.counts_for(welcome, "10.9.9.9")


def test_only_changes_that_matter_are_written() -> None:
    def found(longest: float, **changes: object) -> silences.KnownSilences:
        return learned([watched(longest, 100.0, **changes)], 100.0)

    assert differ_much({}, found(0.5))
    assert not differ_much(found(0.51), found(0.31))  # the limit is 1 s with both
    assert not differ_much(found(1.0), found(1.1))
    assert differ_much(found(0.5), found(1.0))
    assert differ_much(found(1.5), found(0.9))
    assert not differ_much(found(2.5), found(3.5))  # the limit is 4 s with both
    assert differ_much(found(0.5), found(0.5, host="10.9.9.9"))
    assert not differ_much(found(0.5), {})  # a device that is away stays known


def test_device_with_a_known_silence_is_not_new() -> None:
    device = registry.after_known_silence(ready_device("a"), 0.52, 100.0)
    assert registry.dead_seconds(device, 100.0) == pytest.approx(1.04)
    slow = registry.after_known_silence(ready_device("a"), 1.7, 100.0)
    assert registry.dead_seconds(slow, 100.0) == pytest.approx(3.4)
    later = registry.after_answer(replace(device, last_seen=100.0), 101.4)  # it goes on learning
    assert registry.dead_seconds(later, 101.4) == pytest.approx(2.8)
    quick = registry.after_known_silence(ready_device("a"), 0.1, 100.0)
    assert registry.dead_seconds(quick, 100.0) == MIN_DEAD_SECONDS


def test_silences_are_kept_for_the_next_run_and_rarely_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silences, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(silences, "_WRITE_PAUSE_SECONDS", 3600.0)
    path = tmp_path / "silences.json"

    async def main() -> None:
        devices = {"id": watched(0.9, loop_time())}
        keeping = asyncio.create_task(SilenceFile(tmp_path, "holder").keep(devices))
        while not path.exists():
            await asyncio.sleep(0.01)
        devices["id"] = watched(2.0, loop_time())
        await asyncio.sleep(0.1)
        keeping.cancel()

    asyncio.run(main())
    assert [each.seconds for each in SilenceFile(tmp_path, "holder").devices.values()] == [0.9]
    assert SilenceFile(tmp_path, "of another run of this computer").devices == {}
    path.write_text("damaged")
    assert SilenceFile(tmp_path, "holder").devices == {}


def test_silences_that_a_full_disk_did_not_take_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silences, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(silences, "_WRITE_PAUSE_SECONDS", 0.01)
    working, num_failures = silences.write_atomically, 0

    def disk_full(*_: object) -> None:
        nonlocal num_failures
        num_failures += 1
        raise OSError(28, "No space left on device")

    async def main() -> None:
        keeping = asyncio.create_task(SilenceFile(tmp_path, "holder").keep({"id": watched(0.9, loop_time())}))
        monkeypatch.setattr(silences, "write_atomically", disk_full)
        await until("two attempts", lambda: num_failures > 1, seconds=20)
        monkeypatch.setattr(silences, "write_atomically", working)
        await until("the file", (tmp_path / "silences.json").exists, seconds=20)
        assert not keeping.done()
        keeping.cancel()

    asyncio.run(main())
