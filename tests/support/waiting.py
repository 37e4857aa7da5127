"""Waiting in tests: until a condition holds, with a deadline that only failures reach."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = float(
    os.environ.get("HEARTH_TEST_PATIENCE", "1")
)  # factor of deadlines: more under emulation (tools/boot/arm64.sh)
WAIT_LIMIT_SECONDS = 180.0 * PATIENCE  # long enough for a busy machine
# Between two polls: at first, and at most. A poll may start a process, and what is awaited needs the same cores.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.1
_T = TypeVar("_T")


def wait_for(what: str, probe: Callable[[], _T | None], seconds: float = WAIT_LIMIT_SECONDS) -> _T:
    """Poll until `probe` returns something true, less and less often, and return it."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
    return found


async def let_tasks_run(count: int = 100) -> None:
    """Run the event loop `count` times, for code that waits for no clock."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(what: str, happened: Callable[[], object], seconds: float = WAIT_LIMIT_SECONDS) -> None:
    """As `wait_for`, inside an event loop."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        await asyncio.sleep(0.002)
