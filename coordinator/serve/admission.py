"""Admission of requests to the current deployment, in FIFO order, with exclusive slots for maintenance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from hearth.errors import HearthError, QueueFull

_D = TypeVar("_D")


class Admission(Generic[_D]):
    """FIFO queue. At most `capacity` requests run at once and at most `most_waiting` wait; while closed, all wait.

    The caller must call `leave` once for every `enter` that returned.
    """

    def __init__(self, most_waiting: int) -> None:
        self.running = 0
        self.admitted = 0  # in total
        self._most_waiting = most_waiting
        self._capacity = 0
        self._deployment: _D | None = None  # None: closed
        self._refusal: HearthError | None = None
        self._exclusive = False  # whether the running slot is exclusive
        self._turns: dict[asyncio.Future[_D], bool] = {}  # the queue in FIFO order; whether each entry is exclusive
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._deployment is not None

    @property
    def waiting(self) -> int:
        """Number of waiting requests, without exclusive ones."""
        return sum(not exclusive for exclusive in self._turns.values())

    def open(self, deployment: _D, capacity: int) -> None:
        self._deployment, self._capacity = deployment, capacity
        self._advance()

    def close(self, refusal: HearthError | None = None) -> None:
        """Admit no request until the next `open`. With `refusal`, waiting and future requests raise it."""
        self._deployment, self._refusal = None, refusal
        if refusal is not None:
            for turn in self._turns:
                turn.set_exception(refusal)
            self._turns.clear()

    async def enter(self, timeout_seconds: float) -> _D:
        """Wait for a slot; returns the deployment to run on.

        Raises QueueFull at once if the queue is full, asyncio.TimeoutError, and the refusal given to `close`.
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
        """Hold the deployment exclusively: wait for running requests and admit no others meanwhile.

        Raises asyncio.TimeoutError if running requests take longer; admission then continues.
        """
        await self._turn(exclusive=True, timeout_seconds=timeout_seconds)
        try:
            yield
        finally:
            self.leave()

    async def drained(self) -> None:
        """Wait until no request runs."""
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
                self.leave()  # admitted and cancelled at the same time
            raise
        finally:
            if self._turns.pop(turn, None):
                self._advance()  # a cancelled exclusive entry may have blocked those behind it

    def _advance(self) -> None:
        """Admit from the front of the queue while slots are free."""
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
