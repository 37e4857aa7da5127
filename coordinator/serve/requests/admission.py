"""Admission of requests, to the current deployment or to a thread: keys take turns, with exclusive slots for maintenance."""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from hearth.errors import HearthError, QueueFull
from hearth.platform.asyncio_tools import loop_time

_D = TypeVar("_D")

# The public key that has sent the request of the current task; empty: the coordinator itself.
CALLER: ContextVar[str] = ContextVar("CALLER", default="")


@dataclass(eq=False)
class Place:
    """A request's place in the order of arrival. It keeps the place when it returns to the queue."""

    number: int  # in the order of arrival
    turn: int = 0  # among the keys; see `Turns`
    caller: str = ""  # public key
    alone: bool = False  # it must run alone, and goes before the others: it may have made a deployment fail
    was_admitted: bool = False
    maintenance: bool = False  # exclusive work of the coordinator's own, which does not count as a waiting request

    @property
    def exclusive(self) -> bool:
        return self.alone or self.maintenance

    @property
    def order(self) -> tuple[bool, int, int]:
        return not self.alone, self.turn, self.number


class Admission(Generic[_D]):
    """Queue in which keys take turns, and requests of one key keep their order of arrival.

    At most `capacity` requests run at once; while closed or paused, all wait. At most `max_waiting` requests may wait: if one
    more arrives, the latest one of the key with the most waiting requests is refused, except one that was admitted before and
    returns. The caller must call `leave` once for every `enter` that returned.

    Where requests last long, waiting for a turn is not enough. With `reserve`, a key gets a further slot only while it holds
    fewer than are free, so that some are left for other keys: half of them if one key asks, a third if two do (dynamic
    thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, max_waiting: int) -> None:
        self.num_running = 0
        self.num_admitted = 0  # in total
        self._max_waiting = max_waiting
        self._capacity = 0
        self._reserve = False
        self._running_of: Counter[str] = Counter()  # by key
        self._deployment: _D | None = None  # None: closed
        self._refusal: HearthError | None = None
        self._running_exclusive = False  # whether the running slot is exclusive
        self._maintains = False  # whether it is maintenance
        self._queue: list[tuple[Place, asyncio.Future[_D]]] = []  # sorted by `Place.order`
        self._last_number = 0
        self._turns = Turns()
        self._num_pauses = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._request_waits = asyncio.Event()
        self._used_at: float | None = None  # when the last request ended since `open`, or was first asked for

    @property
    def is_open(self) -> bool:
        return self._deployment is not None

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, without maintenance."""
        return sum(not place.maintenance for place, _ in self._queue)

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without a request; None while one runs or waits. Maintenance is none."""
        if self.num_waiting or (self.num_running and not self._maintains):
            return None
        now = loop_time()
        self._used_at = now if self._used_at is None else self._used_at
        return now - self._used_at

    def open(self, deployment: _D, capacity: int, reserve: bool = False) -> None:
        self._deployment, self._capacity, self._reserve, self._used_at = deployment, capacity, reserve, None
        self._admit_waiting()

    def close(self, refusal: HearthError | None = None) -> None:
        """Admit no request until the next `open`. With `refusal`, waiting and future requests raise it."""
        self._deployment, self._refusal = None, refusal
        if refusal is not None:
            for _, slot in self._queue:
                slot.set_exception(refusal)
            self._queue.clear()

    def pause(self) -> None:
        """Admit no request until `resume` was called as often as `pause`."""
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1
        self._admit_waiting()

    def arrive(self) -> Place:
        """The place of a new request of the current caller."""
        self._last_number += 1
        caller = CALLER.get()
        return Place(self._last_number, self._turns.next(caller), caller)

    async def enter(self, timeout_seconds: float, place: Place | None = None, resume: bool = False) -> _D:
        """Wait for a slot; returns the deployment to run on. Without `place`, the request arrives now.

        `resume` ends a pause as soon as the request is in the queue, so that no later one overtakes it.

        Raises QueueFull at once if the queue is full, asyncio.TimeoutError, and the refusal given to `close`.
        """
        if resume:
            self._num_pauses -= 1
        if self._refusal is not None:
            raise self._refusal
        return await self._wait_for_slot(place or self.arrive(), timeout_seconds)

    def leave(self, caller: str = "") -> None:
        """A request of this key has ended."""
        self.num_running -= 1
        self._running_of -= Counter([caller])
        self._running_exclusive = False
        self._used_at = self._used_at if self._maintains else loop_time()
        if self.num_running == 0:
            self._idle.set()
        self._admit_waiting()

    def share(self) -> None:
        """Let others run with the request that runs alone."""
        self._running_exclusive = False
        self._admit_waiting()

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Hold the deployment exclusively: wait for running requests and admit no others meanwhile."""
        self._last_number += 1
        place = Place(self._last_number, self._turns.latest, maintenance=True)
        await self._wait_for_slot(place, None)
        self._maintains = True
        try:
            yield
        finally:
            self.leave()
            self._maintains = False

    async def wait_until_drained(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    async def wait_for_request(self) -> None:
        """Wait until a request waits for a slot."""
        while not self.num_waiting:
            self._request_waits.clear()
            await self._request_waits.wait()

    async def _wait_for_slot(self, place: Place, timeout_seconds: float | None) -> _D:
        slot: asyncio.Future[_D] = asyncio.get_running_loop().create_future()
        entry = (place, slot)
        bisect.insort(self._queue, entry, key=lambda entry: entry[0].order)
        self._request_waits.set()
        self._admit_waiting()
        try:
            if not slot.done():
                if not place.exclusive and not place.was_admitted and self.num_waiting > self._max_waiting:
                    self._refuse_one(place)
                await asyncio.wait({slot}, timeout=timeout_seconds)
            if not slot.done():
                raise asyncio.TimeoutError
            return slot.result()
        except asyncio.CancelledError:
            if slot.done() and slot.exception() is None:
                self.leave(place.caller)  # admitted and cancelled at the same time
            raise
        finally:
            if not slot.done():
                self._queue.remove(entry)
                self._admit_waiting()  # an exclusive entry may have blocked those behind it

    def _refuse_one(self, newcomer: Place) -> None:
        """Refuse the latest request of the key with the most waiting ones."""
        new = [(place, slot) for place, slot in self._queue if not place.exclusive and not place.was_admitted]
        caller = greediest((place.caller for place, _ in new), newcomer.caller)
        entry = [each for each in new if each[0].caller == caller][-1]
        self._queue.remove(entry)
        entry[1].set_exception(QueueFull(limit=self._max_waiting))

    def _admit_waiting(self) -> None:
        """Admit the first in the queue that may run, while slots are free."""
        while self._deployment is not None and not self._num_pauses and not self._running_exclusive:
            if (index := self._first_that_may_run()) is None:
                return
            place, slot = self._queue.pop(index)
            self._running_exclusive = place.exclusive
            place.was_admitted = True
            self._turns.serve(place.turn)
            self.num_running += 1
            self._running_of[place.caller] += 1
            self.num_admitted += 1
            self._idle.clear()
            slot.set_result(self._deployment)

    def _first_that_may_run(self) -> int | None:
        """Its index in the queue; None if there is none. None overtakes one that is exclusive."""
        num_free = self._capacity - self.num_running
        for index, (place, _) in enumerate(self._queue):
            if place.exclusive:
                return index if index == self.num_running == 0 else None
            if num_free > (self._running_of[place.caller] if self._reserve else 0):
                return index
        return None


# ---- turns of keys -----------------------------------------------------------------------------------------------------


class Turns:
    """Gives out turns, which are served in increasing order: those of one key keep their order, and the keys take turns.

    This is start-time fair queueing with requests of equal size. A key that has sent many requests waits for its own; the
    first request of another key gets its turn next.
    """

    def __init__(self) -> None:
        self._served = 0  # the latest turn that was served
        self.latest = 0  # that was given out
        self._latest_of: dict[str, int] = {}

    def next(self, key: str) -> int:
        """The turn of a new request of this key."""
        turn = max(self._served, self._latest_of.get(key, -1) + 1)
        self._latest_of[key] = turn
        self.latest = max(self.latest, turn)
        return turn

    def serve(self, turn: int) -> None:
        """A request with this turn is served."""
        self._served = max(self._served, turn)
        self._latest_of = {key: latest for key, latest in self._latest_of.items() if latest >= self._served}


def greediest(keys: Iterable[str], newcomer: str) -> str:
    """Of the keys of the waiting requests, the one that must give up a place; the newcomer's, if no other has more."""
    counts = Counter(keys)
    key = max(counts, key=counts.__getitem__)
    return key if counts[key] > counts[newcomer] else newcomer
