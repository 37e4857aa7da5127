"""Disk accesses in threads, each with a time limit. A thread that a failing disk keeps in the kernel is left behind."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hearth.errors import DiskHung
from hearth.platform.asyncio_tools import loop_time

log = logging.getLogger(__name__)

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


class DiskWork:
    """Runs `work`, which writes files below `path`, whenever it is asked to: on an event loop in a thread, else at once.

    `work` runs once at a time, also while the disk hangs, and again if it was asked meanwhile: what it writes last is the
    newest content. It may raise OSError; the first failure is logged.
    """

    def __init__(self, path: Path, work: Callable[[], object]) -> None:
        self._path, self._work = path, work
        self._asked = self._done = object()  # a new one whenever it is asked; that of the last success
        self.lock = threading.Lock()  # held while `work` runs, also by a thread that was left behind
        self._attempt: asyncio.Task[None] | None = None  # the last one
        self._is_failing = False
        self._late: asyncio.Task[None] | None = None  # an attempt that was waited for in vain

    @property
    def is_done(self) -> bool:
        """Whether `work` has succeeded since it was last asked to run."""
        return self._done is self._asked

    def ask(self) -> None:
        """Have it run."""
        self._asked = object()
        self.retry()

    def retry(self) -> None:
        """Have it run again if it has failed."""
        if self.is_done:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._try()
            return
        is_running = self._attempt is not None and not self._attempt.done() and self._attempt.get_loop() is loop
        if not is_running and not self.lock.locked():  # else it runs again after that, or hangs
            self._attempt = loop.create_task(self._try_in_thread())

    async def settled(self, seconds: float) -> None:
        """Wait until it has succeeded or failed, at most for some seconds, and only once for an attempt that takes longer."""
        attempt = self._attempt
        if attempt is not None and attempt is not self._late and not attempt.done():
            await asyncio.wait({attempt}, timeout=seconds)
            self._late = None if attempt.done() else attempt

    async def _try_in_thread(self) -> None:
        try:
            while not self.is_done and await on_disk(self._path, FILE_SECONDS, self._try):
                pass
        except DiskHung as error:
            log.warning("%s", error)

    def _try(self) -> bool:
        with self.lock:
            asked = self._asked
            try:
                self._work()
            except OSError as error:
                if not self._is_failing:
                    log.warning("%s cannot be written; that is tried again, from memory: %s", self._path, error)
                self._is_failing = True
                return False
            if self._is_failing:
                log.warning("%s is written again", self._path)
            self._is_failing, self._done = False, asked
        return True


def hung_paths() -> list[Path]:
    """The files and folders whose accesses have exceeded their time limits and still run, one for each access."""
    return [access.path for access in _hung()]


def _hung() -> list[_Access]:
    now = loop_time()
    return [access for access in list(_running) if access.deadline < now]
