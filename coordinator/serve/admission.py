"""Admits requests to the present deployment, in the order in which they came, and lets maintenance in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from hearth.errors import HearthError, QueueFull

_D = TypeVar("_D")


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
        self._exclusive = False  # whether what runs now does
        self._turns: dict[asyncio.Future[_D], bool] = {}  # the queue, first come first; whether each is exclusive
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._deployment is not None

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(not exclusive for exclusive in self._turns.values())

    def open(self, deployment: _D, capacity: int) -> None:
        self._deployment, self._capacity = deployment, capacity
        self._advance()

    def close(self, refusal: HearthError | None = None) -> None:
        """Admit nobody until the next `open`. With `refusal`, raise it to all that wait and to all that come."""
        self._deployment, self._refusal = None, refusal
        if refusal is not None:
            for turn in self._turns:
                turn.set_exception(refusal)
            self._turns.clear()

    async def enter(self, timeout_seconds: float) -> _D:
        """Wait for the turn; returns the deployment to run on.

        Raises QueueFull at once where too many wait, asyncio.TimeoutError, and the refusal once there is one.
        """
        if self._refusal is not None:
            raise self._refusal
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

    async def _turn(self, exclusive: bool, timeout_seconds: float | None) -> _D:
        turn: asyncio.Future[_D] = asyncio.get_running_loop().create_future()
        self._turns[turn] = exclusive
        self._advance()
        try:
            if not turn.done():
                if not exclusive and self.waiting > self._most_waiting:
                    raise QueueFull(limit=self._most_waiting)
                await asyncio.wait({turn}, timeout=timeout_seconds)
            if not turn.done():
                raise asyncio.TimeoutError
            return turn.result()
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:
                self.leave()  # admitted and given up in the same moment
            raise
        finally:
            if self._turns.pop(turn, None):
                self._advance()  # an exclusive one may have held up those behind it

    def _advance(self) -> None:
        """Admit from the front of the queue as long as there is room."""
        while self._turns and self._deployment is not None:
            turn, exclusive = next(iter(self._turns.items()))
            if self._exclusive or self.running >= (1 if exclusive else self._capacity):
                return
            del self._turns[turn]
            self._exclusive = exclusive
            self.running += 1
            self.admitted += 1
            self._idle.clear()
            turn.set_result(self._deployment)
