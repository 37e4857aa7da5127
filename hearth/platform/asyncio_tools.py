"""Waiting for several things, or only so long, with nothing left running unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def cancel_all(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them and wait until they have ended; their errors are dropped."""
    ending = list(futures)
    for future in ending:
        future.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def within(timeout_seconds: float | None, call: Awaitable[_T]) -> _T:
    """As `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes together with the result."""
    waited = asyncio.ensure_future(call)
    try:
        await asyncio.wait({waited}, timeout=timeout_seconds)
        if not waited.done():
            raise asyncio.TimeoutError
        return waited.result()
    finally:
        await cancel_all([waited])


async def all_or_first_error(calls: Any) -> list[Any]:
    """As gather, but when one fails the others are cancelled and awaited, so that nothing runs on unseen."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise
