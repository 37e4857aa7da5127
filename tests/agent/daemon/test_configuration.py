"""The configuration that an agent votes in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from agent.daemon import configuration as module
from agent.daemon.configuration import StoredConfiguration
from hearth.errors import BadRequest, DiskHung
from hearth.files import write_atomically
from hearth.wire.messages import Configuration


def configuration(number: int, leader: str = "l") -> Configuration:
    return Configuration(number=number, leader=leader, voters=("a", "b"), tie_breaker="a")


async def test_later_configuration_is_kept_over_a_restart(tmp_path: Path) -> None:
    stored = StoredConfiguration(tmp_path)
    assert stored.current is None
    for number in (3, 5):
        await stored.store(configuration(number))
    await stored.store(configuration(5))
    for refused in (configuration(4), configuration(5, leader="other")):
        with pytest.raises(BadRequest, match="not later"):
            await stored.store(refused)
    assert StoredConfiguration(tmp_path).current == configuration(5)


def test_damaged_file_is_no_vote(tmp_path: Path) -> None:
    (tmp_path / "configuration.json").write_text("{")
    assert StoredConfiguration(tmp_path).current is None


async def test_configuration_that_cannot_be_written_holds_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    stored = StoredConfiguration(tmp_path)
    await stored.store(configuration(1))
    with monkeypatch.context() as patched:
        patched.setattr("agent.daemon.configuration.write_atomically", disk_full)
        await stored.store(configuration(2))
        stored.writing.retry()
        await stored.writing.settled(20.0)
        assert stored.current == configuration(2)
        assert StoredConfiguration(tmp_path).current is None
    stored.writing.retry()
    await stored.writing.settled(20.0)
    assert StoredConfiguration(tmp_path).current == configuration(2)


async def test_configuration_is_not_confirmed_before_a_disk_that_hangs_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the agent could cast an older vote after a power cut. A repeated request is not confirmed either."""
    answers = threading.Event()

    def write(*arguments: Any, **options: Any) -> None:
        answers.wait(60)
        write_atomically(*arguments, **options)

    monkeypatch.setattr(module, "write_atomically", write)
    monkeypatch.setattr(module, "STORE_SECONDS", 0.05)
    stored = StoredConfiguration(tmp_path)
    try:
        for _ in range(3):
            with pytest.raises(DiskHung, match="configuration"):
                await stored.store(configuration(1))
        assert stored.current == configuration(1)
        with pytest.raises(BadRequest, match="not later"):
            await stored.store(configuration(1, leader="other"))
    finally:
        answers.set()
    await until("the disk has it", lambda: stored.writing.is_done)
    await stored.store(configuration(1))
    assert StoredConfiguration(tmp_path).current == configuration(1)
