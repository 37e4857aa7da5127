"""asyncio helpers for time, timeouts, groups of tasks, and tasks that last as long as their process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_EXIT_STATUS = 70  # of a process that ends because of its own fault (EX_SOFTWARE in sysexits.h)


def loop_time() -> float:
    """Seconds of the running event loop's monotonic clock.

    Code that waits on the loop reads the time here, so that a simulation with a virtual clock controls both.
    """
    return asyncio.get_running_loop().time()


def supervised(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Start a task without which the process is of no use, such as the receive loop of a server.

    If it ends in any other way than by `cancel`, the process logs why and exits with status 70, after its cleanup. A service
    manager then starts it again; a process that goes on without that task would be deaf.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_exit_unless_cancelled)
    return task


def _exit_unless_cancelled(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        log.critical("%s ended unexpectedly, so the process exits", task.get_name(), exc_info=task.exception())
        raise SystemExit(_EXIT_STATUS)  # asyncio passes it on to the caller of `asyncio.run`


class Signal:
    """An event for one waiter. A wait with a timeout starts no task, unlike that for an `asyncio.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Set the signal, which ends a wait for it."""
        self._is_set = True
        _wake(self._waiter)

    def clear(self) -> None:
        """Make the next wait last until the signal is set again."""
        self._is_set = False

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until the signal is set; returns whether it is."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_seconds, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        return self._is_set


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def start_in(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task for which nobody needs to wait. It is in `tasks` until it has ended, so that its owner can end it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_all(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the futures and wait until they have ended; their exceptions are dropped."""
    ending = []
    for future in futures:
        if not future.done():
            future.cancel()
            ending.append(future)
        elif not future.cancelled():
            future.exception()  # asyncio reports an exception that nobody has read
    if ending:
        await asyncio.gather(*ending, return_exceptions=True)


async def with_timeout(timeout_seconds: float | None, awaitable: Awaitable[_T]) -> _T:
    """As `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives together with the result.

    Raises asyncio.TimeoutError.
    """
    future = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({future}, timeout=timeout_seconds)
        if not future.done():
            raise asyncio.TimeoutError
        return future.result()
    finally:
        await cancel_all([future])


async def first_result(awaitables: Iterable[Awaitable[_T]]) -> _T:
    """The result of the call that ends first, or its error; the others are cancelled and awaited."""
    futures = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel_all(futures)


async def all_or_first_error(awaitables: Any) -> list[Any]:
    """As `asyncio.gather`, but if one call fails, the others are cancelled and awaited before its error is raised.

    `asyncio.gather` drops a cancellation that arrives at the moment when a call has failed; this function does not.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()  # raises the error of a call that has failed
        return [task.result() for task in tasks]
    finally:
        await cancel_all(tasks)
