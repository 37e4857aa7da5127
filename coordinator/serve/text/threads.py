"""Threads for texts and grammars, apart from those that read weights and write state, with a deadline for each caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hearth.errors import DeadlineExceeded, QueueFull
from hearth.platform.asyncio_tools import with_timeout

# Longer texts have a thread of their own, so that no usual request waits for them: a message may hold 4 MB, which take seconds.
_SHORT_CHARACTERS = 1 << 16
# Calls that may wait for one of the threads; one more is refused. With 4 MB each they take as much memory as one model layer.
_MAX_WAITING_SHORT = 1024
_MAX_WAITING_LONG = 16

_T = TypeVar("_T")


class _Lane:
    """One thread and its queue."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.max_waiting = max_waiting
        self.num_calls = 0


class TextThreads:
    """One thread for short texts, one for long ones, and one for grammars, of which a hostile one may take a second."""

    def __init__(self) -> None:
        self._short = _Lane("short-texts", _MAX_WAITING_SHORT)
        self._long = _Lane("long-texts", _MAX_WAITING_LONG)
        self._grammars = _Lane("grammars", _MAX_WAITING_SHORT)

    async def compile(self, timeout_seconds: float, function: Callable[[], _T]) -> _T:
        """Call `function`, which compiles a grammar or reads the vocabulary, in a thread.

        Raises QueueFull, DeadlineExceeded and its errors.
        """
        return await self._in_lane(self._grammars, "reading the vocabulary or the grammar", timeout_seconds, function)

    async def run(self, timeout_seconds: float, num_characters: int, function: Callable[[], _T]) -> _T:
        """Call `function` in a thread. A call that has begun cannot be stopped, but its caller waits no longer.

        Raises QueueFull, DeadlineExceeded and the function's errors.
        """
        lane = self._short if num_characters <= _SHORT_CHARACTERS else self._long
        return await self._in_lane(lane, "the tokenisation", timeout_seconds, function)

    async def _in_lane(self, lane: _Lane, action: str, timeout_seconds: float, function: Callable[[], _T]) -> _T:
        if lane.num_calls >= lane.max_waiting:
            raise QueueFull(limit=lane.max_waiting)
        call = asyncio.get_running_loop().run_in_executor(lane.executor, function)
        lane.num_calls += 1
        try:
            return await with_timeout(timeout_seconds, call)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(action=action, seconds=timeout_seconds) from None
        finally:
            lane.num_calls -= 1
