"""Admission of requests to the current deployment, in FIFO order, with exclusive slots for maintenance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from hearth.errors import HearthError, QueueFull

_D = TypeVar("_D")


class Admission(Generic[_D]):
    """FIFO queue. At most `capacity` requests run at once and at most `max_waiting` wait; while closed, all wait.

    The caller must call `leave` once for every `enter` that returned.
    """

    def __init__(self, max_waiting: int) -> None:
        self.num_running = 0
        self.num_admitted = 0  # in total
        self._max_waiting = max_waiting
        self._capacity = 0
        self._deployment: _D | None = None  # None: closed
        self._refusal: HearthError | None = None
        self._running_exclusive = False  # whether the running slot is exclusive
        self._queue: dict[asyncio.Future[_D], bool] = {}  # the queue in FIFO order; whether each entry is exclusive
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._deployment is not None

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, without exclusive ones."""
        return sum(not exclusive for exclusive in self._queue.values())

    def open(self, deployment: _D, capacity: int) -> None:
        self._deployment, self._capacity = deployment, capacity
        self._admit_waiting()

    def close(self, refusal: HearthError | None = None) -> None:
        """Admit no request until the next `open`. With `refusal`, waiting and future requests raise it."""
        self._deployment, self._refusal = None, refusal
        if refusal is not None:
            for slot in self._queue:
                slot.set_exception(refusal)
            self._queue.clear()

    async def enter(self, timeout_seconds: float) -> _D:
        """Wait for a slot; returns the deployment to run on.

        Raises QueueFull at once if the queue is full, asyncio.TimeoutError, and the refusal given to `close`.
        """
        if self._refusal is not None:
            raise self._refusal
        return await self._wait_for_slot(exclusive=False, timeout_seconds=timeout_seconds)

    def leave(self) -> None:
        self.num_running -= 1
        self._running_exclusive = False
        if self.num_running == 0:
            self._idle.set()
        self._admit_waiting()

    @asynccontextmanager
    async def exclusively(self, timeout_seconds: float | None = None) -> AsyncIterator[None]:
        """Hold the deployment exclusively: wait for running requests and admit no others meanwhile.

        Raises asyncio.TimeoutError if running requests take longer; admission then continues.
        """
        await self._wait_for_slot(exclusive=True, timeout_seconds=timeout_seconds)
        try:
            yield
        finally:
            self.leave()

    async def wait_until_drained(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    async def _wait_for_slot(self, exclusive: bool, timeout_seconds: float | None) -> _D:
        slot: asyncio.Future[_D] = asyncio.get_running_loop().create_future()
        self._queue[slot] = exclusive
        self._admit_waiting()
        try:
            if not slot.done():
                if not exclusive and self.num_waiting > self._max_waiting:
                    raise QueueFull(limit=self._max_waiting)
                await asyncio.wait({slot}, timeout=timeout_seconds)
            if not slot.done():
                raise asyncio.TimeoutError
            return slot.result()
        except asyncio.CancelledError:
            if slot.done() and slot.exception() is None:
                self.leave()  # admitted and cancelled at the same time
            raise
        finally:
            if self._queue.pop(slot, None):
                self._admit_waiting()  # a cancelled exclusive entry may have blocked those behind it

    def _admit_waiting(self) -> None:
        """Admit from the front of the queue while slots are free."""
        while self._queue and self._deployment is not None:
            slot, exclusive = next(iter(self._queue.items()))
            if self._running_exclusive or self.num_running >= (1 if exclusive else self._capacity):
                return
            del self._queue[slot]
            self._running_exclusive = exclusive
            self.num_running += 1
            self.num_admitted += 1
            self._idle.clear()
            slot.set_result(self._deployment)
