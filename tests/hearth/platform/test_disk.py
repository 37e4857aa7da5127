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
from hearth.platform.disk import DiskWork, hung_paths, on_disk


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


async def test_work_that_hangs_delays_nobody_and_the_newest_content_is_written_last(
    tmp_path: Path, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FILE_SECONDS", 0.1)
    content, written = "", list[str]()

    def write() -> None:
        newest = content
        hung.wait()
        written.append(newest)

    work = DiskWork(tmp_path, write)
    for each in ("a", "b", "c"):
        content = each
        work.ask()
    await asyncio.wait_for(work.settled(0.01), 5)
    assert not work.is_done
    await until("it to count as hung", hung_paths)
    for _ in range(20):  # none starts a thread: it would hang, too
        work.ask()
        work.retry()
        await work.settled(5.0)
    assert len(hung_paths()) == 1
    content = "d"
    hung.set()
    await until("the thread to end", lambda: not hung_paths())
    work.retry()
    await work.settled(20.0)
    assert (work.is_done, written) == (True, ["c", "d"])


def test_work_without_an_event_loop_is_done_at_once_and_its_first_failure_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter((OSError(28, "full"), OSError(28, "full"), None))

    def write() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    work = DiskWork(tmp_path, write)
    done = []
    for act in (work.ask, work.retry, work.retry, work.retry):
        act()
        done.append(work.is_done)
    assert done == [False, False, True, True]
    assert [line.partition(f"{tmp_path} ")[2][:16] for line in caplog.messages] == [
        "cannot be writte",
        "is written again",
    ]


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
