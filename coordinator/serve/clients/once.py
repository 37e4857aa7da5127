"""Answers to changes, kept for clients that repeat a request because its answer was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hearth.platform.asyncio_tools import loop_time
from hearth.wire.messages import Message

_MAX_ANSWERS = 1024  # of all callers; a change is rare, so this covers hours
_KEPT_SECONDS = 600.0  # longer than the timeout of any such call


class RepeatedChanges:
    """Carries out each change once, and gives every repetition the same answer or error."""

    def __init__(self) -> None:
        # By caller and request id, the oldest first: the time of the first request, and its answer.
        self._answers: dict[tuple[str, str], tuple[float, asyncio.Future[Message]]] = {}

    async def once(self, caller: str, request_id: str, change: Callable[[], Awaitable[Message]]) -> Message:
        """The answer of `change`, which runs only at the first request with this id. Without an id it always runs."""
        if not request_id:
            return await change()
        now = loop_time()
        while self._answers:
            oldest = next(iter(self._answers))
            if len(self._answers) < _MAX_ANSWERS and now - self._answers[oldest][0] < _KEPT_SECONDS:
                break
            del self._answers[oldest]
        key = caller, request_id
        if key not in self._answers:
            self._answers[key] = now, asyncio.ensure_future(change())
        return await asyncio.shield(self._answers[key][1])
