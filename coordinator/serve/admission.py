"""Admits requests to the present deployment, in the order in which they came, and lets maintenance in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from hearth.errors import HearthError, QueueFull

_D = TypeVar("_D")


@dataclass(eq=False)
class _Waiter(Generic[_D]):
    turn: asyncio.Future[_D]
    exclusive: bool


class Admission(Generic[_D]):
    """FIFO. At most `capacity` requests run at once, at most `most_waiting` wait; while it is closed, all wait.

    Every `enter` that returns is followed by one `leave`.
    """

    def __init__(self, most_waiting: int) -> None:
        self.running = 0
        self.admitted = 0  # ever
        self._most_waiting = most_waiting
        self._capacity = 0
        self._deployment: _D | None = None  # None: closed
        self._refusal: HearthError | None = None
        self._exclusive = False
        self._waiters: deque[_Waiter[_D]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._deployment is not None

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(not waiter.exclusive for waiter in self._waiters)

    def open(self, deployment: _D, capacity: int) -> None:
        self._deployment, self._capacity = deployment, capacity
        self._advance()

    def close(self, refusal: HearthError | None = None) -> None:
        """Admit nobody until the next `open`. With `refusal`, raise it to all that wait and to all that come."""
        self._deployment, self._refusal = None, refusal
        if refusal is not None:
            for waiter in self._waiters:
                if not waiter.turn.done():
                    waiter.turn.set_exception(refusal)
            self._waiters.clear()

    async def enter(self, timeout_seconds: float) -> _D:
        """Wait for the turn; returns the deployment to run on.

        Raises QueueFull at once where too many wait, asyncio.TimeoutError, and the refusal once there is one.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._deployment is not None and not self._waiters and self._has_room():
            self._take()
            return self._deployment
        if self.waiting >= self._most_waiting:
            raise QueueFull(limit=self._most_waiting)
        return await self._turn(exclusive=False, timeout_seconds=timeout_seconds)

    def leave(self) -> None:
        self.running -= 1
        self._exclusive = False
        if self.running == 0:
            self._idle.set()
        self._advance()

    @asynccontextmanager
    async def exclusively(self, timeout_seconds: float | None = None) -> AsyncIterator[None]:
        """Nothing else runs inside: it waits for all that run, and lets nobody in meanwhile.

        Raises asyncio.TimeoutError when they run on for longer; then the others are let in again.
        """
        await self._turn(exclusive=True, timeout_seconds=timeout_seconds)
        try:
            yield
        finally:
            self.leave()

    async def drained(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()

    # ---- turns ----------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self.running < self._capacity and not self._exclusive

    def _take(self) -> None:
        self.running += 1
        self.admitted += 1
        self._idle.clear()

    async def _turn(self, exclusive: bool, timeout_seconds: float | None) -> _D:
        loop = asyncio.get_running_loop()
        waiter = _Waiter[_D](loop.create_future(), exclusive)
        self._waiters.append(waiter)
        self._advance()
        timer = loop.call_later(timeout_seconds, self._expire, waiter) if timeout_seconds is not None else None
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._forget(waiter)
            elif not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.leave()  # admitted and given up in the same moment
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self, waiter: _Waiter[_D]) -> None:
        if waiter in self._waiters:
            self._forget(waiter)
            waiter.turn.set_exception(asyncio.TimeoutError())

    def _forget(self, waiter: _Waiter[_D]) -> None:
        self._waiters.remove(waiter)
        self._advance()  # an exclusive one may have held up those behind it

    def _advance(self) -> None:
        """Admit from the front of the queue as long as there is room."""
        while self._waiters and self._deployment is not None:
            waiter = self._waiters[0]
            if not (self.running == 0 if waiter.exclusive else self._has_room()):
                return
            self._waiters.popleft()
            self._exclusive = waiter.exclusive
            self._take()
            waiter.turn.set_result(self._deployment)
