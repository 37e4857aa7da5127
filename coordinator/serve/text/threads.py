"""Threads for texts and grammars, apart from those that read weights and write state, with a deadline for each caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from coordinator.serve.requests.admission import Admission
from hearth.errors import DeadlineExceeded
from hearth.platform.asyncio_tools import loop_time

# Longer texts have a thread of their own, so that no usual request waits for them: a message may hold 4 MB, which take seconds.
_SHORT_CHARACTERS = 1 << 16
# Calls that may wait for one of the threads; one more is refused. With 4 MB each they take as much memory as one model layer.
_MAX_WAITING_SHORT = 1024
_MAX_WAITING_LONG = 16

_T = TypeVar("_T")


class TextThreads:
    """One thread for short texts, one for long ones, and one for grammars, of which a hostile one may take a second.

    Keys take turns for each.
    """

    def __init__(self) -> None:
        self._short = _lane("short-texts", _MAX_WAITING_SHORT)
        self._long = _lane("long-texts", _MAX_WAITING_LONG)
        self._grammars = _lane("grammars", _MAX_WAITING_SHORT)

    async def compile(self, timeout_seconds: float, function: Callable[[], _T]) -> _T:
        """Call `function`, which compiles a grammar or reads the vocabulary, in a thread.

        Raises QueueFull, DeadlineExceeded and its errors.
        """
        return await _in_lane(self._grammars, "reading the vocabulary or the grammar", timeout_seconds, function)

    async def run(self, timeout_seconds: float, num_characters: int, function: Callable[[], _T]) -> _T:
        """Call `function` in a thread. A call that has begun cannot be stopped, but its caller waits no longer.

        Raises QueueFull, DeadlineExceeded and the function's errors.
        """
        lane = self._short if num_characters <= _SHORT_CHARACTERS else self._long
        return await _in_lane(lane, "the tokenisation", timeout_seconds, function)


def _lane(name: str, max_waiting: int) -> Admission[ThreadPoolExecutor]:
    """Admission to one thread."""
    lane: Admission[ThreadPoolExecutor] = Admission(max_waiting)
    lane.open(ThreadPoolExecutor(1, thread_name_prefix=name), capacity=1)
    return lane


async def _in_lane(
    lane: Admission[ThreadPoolExecutor], action: str, timeout_seconds: float, function: Callable[[], _T]
) -> _T:
    deadline, place = loop_time() + timeout_seconds, lane.arrive()
    try:
        executor = await lane.enter(timeout_seconds, place)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action=action, seconds=timeout_seconds) from None
    call = asyncio.get_running_loop().run_in_executor(executor, function)

    def ended(_: asyncio.Future[_T]) -> None:
        lane.leave(place.caller)
        call.exception()  # it was retrieved, even if the caller no longer waits

    call.add_done_callback(ended)
    await asyncio.wait({call}, timeout=deadline - loop_time())
    if not call.done():
        raise DeadlineExceeded(action=action, seconds=timeout_seconds)
    return call.result()
