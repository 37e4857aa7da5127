"""Disk accesses in threads, each with a time limit. A thread that a failing disk keeps in the kernel is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hearth.errors import DiskHung
from hearth.platform.asyncio_tools import loop_time

_T = TypeVar("_T")

FILE_SECONDS = 60.0  # of one access to small files or to one chunk: a busy SD card takes seconds
# Added for each byte that is read: a quarter of what an SD card reads.
_MIN_BYTES_PER_SECOND = 10e6
# Accesses that may hang at the same time; further ones fail at once. Callers try again for as long as the disk hangs, and each
# thread that is left behind holds its memory.
_MAX_HUNG = 16

_running: set[_Access] = set()  # of this process; changed by several threads, each time in one operation


def read_seconds(num_bytes: int, file_seconds: float = FILE_SECONDS) -> float:
    """The time limit of reading this many bytes. `file_seconds`: of reading none."""
    return file_seconds + num_bytes / _MIN_BYTES_PER_SECOND


class DaemonThreads(Executor):
    """Runs each call in a daemon thread of its own: one that hangs delays neither another call nor the end of the process."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the call."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="disk", daemon=True).start()
        return future


class _Access(DaemonThreads):
    """One access: a function that runs in a thread. It hangs if it has not ended at `deadline` (loop time)."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.began = loop_time()
        self.deadline = self.began + seconds

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the access."""
        _running.add(self)
        future = super().submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: _running.discard(self))
        return future


async def on_disk(path: Path, seconds: float, function: Callable[..., _T], *args: Any) -> _T:
    """Run a function that reads or writes files below `path` in a thread, and return its result.

    Raises what the function raises, and DiskHung if it has not ended after `seconds`, or if too many accesses hang already.
    """
    if len(hung := _hung()) >= _MAX_HUNG:
        raise DiskHung(path=str(path), seconds=round(loop_time() - min(access.began for access in hung)))
    loop = asyncio.get_running_loop()
    access = loop.run_in_executor(_Access(path, seconds), partial(function, *args))
    access.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
    await asyncio.wait({access}, timeout=seconds)  # which does not cancel it: it counts until its thread ends
    if not access.done():
        raise DiskHung(path=str(path), seconds=seconds)
    return access.result()


def hung_paths() -> list[Path]:
    """The files and folders whose accesses have exceeded their time limits and still run, one for each access."""
    return [access.path for access in _hung()]


def _hung() -> list[_Access]:
    now = loop_time()
    return [access for access in list(_running) if access.deadline < now]
