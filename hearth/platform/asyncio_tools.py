"""asyncio helpers for timeouts and groups of tasks; no task keeps running after its caller has returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def cancel_all(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the futures and wait until they have ended; their exceptions are dropped."""
    ending = list(futures)
    for future in ending:
        future.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def within(timeout_seconds: float | None, call: Awaitable[_T]) -> _T:
    """As `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives together with the result.

    Raises asyncio.TimeoutError.
    """
    waited = asyncio.ensure_future(call)
    try:
        await asyncio.wait({waited}, timeout=timeout_seconds)
        if not waited.done():
            raise asyncio.TimeoutError
        return waited.result()
    finally:
        await cancel_all([waited])


async def all_or_first_error(calls: Any) -> list[Any]:
    """As `asyncio.gather`, but if one call fails, the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise
