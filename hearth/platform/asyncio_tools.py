"""asyncio helpers for time, timeouts and groups of tasks; no task keeps running after its caller has returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


def loop_time() -> float:
    """Seconds of the running event loop's monotonic clock.

    Code that waits on the loop reads the time here, so that a simulation with a virtual clock controls both.
    """
    return asyncio.get_running_loop().time()


async def cancel_all(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the futures and wait until they have ended; their exceptions are dropped."""
    ending = list(futures)
    for future in ending:
        future.cancel()
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


async def all_or_first_error(awaitables: Any) -> list[Any]:
    """As `asyncio.gather`, but if one call fails, the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise
