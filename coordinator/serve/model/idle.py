"""When a model that serves counts as idle and is unloaded."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from coordinator.serve.requests.admission import Admission
from coordinator.serve.state import Goal

_LONGEST_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.2  # interval of looking whether a model is idle, while a request runs


class KeepAlive:
    """How long one model stays loaded without a request: as its goal says, or as a client has asked meanwhile."""

    def __init__(self, goal: Goal, admission: Admission[Any]) -> None:
        self._goal = goal
        self._admission = admission
        # By a client, until the next request: seconds, and how many requests had been admitted.
        self._asked: tuple[float, int] | None = None
        self._changed = asyncio.Event()

    def keep_loaded(self, seconds: float) -> None:
        """Let the model count as idle after this time (below 0: never), until the next request."""
        self._asked = seconds, self._admission.num_admitted
        self._changed.set()

    async def wait_until_idle(self) -> None:
        """Wait until no request has come for as long as the model stays loaded, and admit none from then on."""
        admission = self._admission
        while True:
            self._changed.clear()
            keep_alive_seconds, idle_seconds = self._seconds, admission.idle_seconds
            wait_seconds = None  # until that changes
            if keep_alive_seconds is not None:
                if idle_seconds is not None and idle_seconds >= keep_alive_seconds:
                    break
                wait_seconds = _POLL_SECONDS
                if idle_seconds is not None:  # a request may come and go, and take back what a client has asked for
                    wait_seconds = min(keep_alive_seconds - idle_seconds, _LONGEST_WAIT_SECONDS)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_seconds)
        admission.close()

    @property
    def _seconds(self) -> float | None:
        """How long the model stays loaded without a request; None: for ever."""
        if self._goal.pinned:
            return None
        if self._asked is not None:
            seconds, num_admitted = self._asked
            if num_admitted == self._admission.num_admitted:
                return seconds if seconds >= 0 else None
        return self._goal.keep_alive_seconds
