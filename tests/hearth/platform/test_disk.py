"""Disk accesses with a time limit: what happens when a disk does not answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until, wait_for

from hearth.errors import DiskHung
from hearth.platform import disk
from hearth.platform.disk import hung_paths, on_disk


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """Set when the disk answers again; at the end at the latest."""
    answers = threading.Event()
    yield answers
    answers.set()
    wait_for("the threads to end", lambda: not disk._running)


async def test_result_and_errors_are_passed(tmp_path: Path) -> None:
    assert await on_disk(tmp_path, 60.0, lambda *args: args, 1, 2) == (1, 2)
    with pytest.raises(FileNotFoundError):
        await on_disk(tmp_path, 60.0, (tmp_path / "absent").read_bytes)
    assert hung_paths() == []


async def test_access_that_hangs_is_left_behind_and_counted_until_it_ends(
    tmp_path: Path, hung: threading.Event
) -> None:
    with pytest.raises(DiskHung, match="has not answered for") as error:
        await on_disk(tmp_path, 0.05, hung.wait)
    assert error.value.path == str(tmp_path)
    waiting = asyncio.create_task(on_disk(tmp_path / "b", 0.05, hung.wait))
    await asyncio.sleep(0)
    waiting.cancel()  # its caller has gone; the thread has not
    await until("both to count", lambda: sorted(hung_paths()) == [tmp_path, tmp_path / "b"])
    assert await on_disk(tmp_path, 60.0, lambda: "others go on") == "others go on"
    hung.set()
    await until("the threads to end", lambda: not hung_paths())


async def test_disk_that_hangs_for_long_gets_no_more_threads(
    tmp_path: Path, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MAX_HUNG", 3)

    for _ in range(5):
        with pytest.raises(DiskHung):
            await on_disk(tmp_path, 0.01, hung.wait)
    assert len(disk._running) == 3


_PROGRAM = """
import asyncio, contextlib, threading
from pathlib import Path
from hearth.errors import DiskHung
from hearth.platform.disk import on_disk

async def main():
    with contextlib.suppress(DiskHung):
        await on_disk(Path("x"), 0.01, threading.Event().wait)

asyncio.run(main())
"""


def test_process_ends_although_a_thread_hangs() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)
