"""Waits of tests: they end as soon as what they wait for is there, and only a failure takes as long as they may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 180.0  # on a machine that does much else
_T = TypeVar("_T")


def wait_for(what: str, probe: Callable[[], _T | None], seconds: float = PATIENCE_SECONDS) -> _T:
    """Poll until `probe` gives something."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.02)
    return found


async def turns(count: int = 100) -> None:
    """Let the event loop run what is ready, and what that makes ready, `count` times: for code that waits for no clock."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(what: str, happened: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """The same inside of an event loop."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        await asyncio.sleep(0.002)
