"""Client side of the event stream: iterators over what a coordinator records."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager

from hearth.client.answers import BlockingIterator
from hearth.wire.messages import EventsRecorded, RecordedEvent


class AsyncEvents(AbstractAsyncContextManager["AsyncEvents"], AsyncIterator[RecordedEvent]):
    """Iterator over events. The request is sent when the first one is awaited, or by `open`; closing cancels it.

    `cursor`: to go on after the last event, with `since`; empty before the first answer. `has_gap`: events are missing before
    the last event, because too many happened meanwhile, or another coordinator leads now.
    """

    def __init__(self, batches: AsyncGenerator[EventsRecorded, None]) -> None:
        self.cursor = self._last_cursor = ""  # the latter: after all events that have arrived
        self.has_gap = self._gap_follows = False  # the latter: before the next event
        self._batches = batches
        self._waiting: deque[RecordedEvent] = deque()
        self._next: asyncio.Future[EventsRecorded] | None = None
        self._ended = False

    async def open(self) -> None:
        """Wait until the coordinator has accepted the request. Raises what iterating raises."""
        if not self.cursor and not self._ended:
            await self._receive()

    async def __anext__(self) -> RecordedEvent:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            await self._receive()
        event = self._waiting.popleft()
        self.has_gap, self._gap_follows = self._gap_follows, False
        if self._waiting:
            self.cursor = f"{self.cursor.partition('-')[0]}-{event.number}"
        else:
            self.cursor = self._last_cursor
        return event

    async def aclose(self) -> None:
        """End the request. Does nothing if it has ended."""
        self._ended = True
        self._waiting.clear()
        if self._next is not None and not self._next.done():
            self._next.cancel()
            await asyncio.wait({self._next})
        await self._batches.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _receive(self) -> None:
        """Wait for the next answer, which may hold no event. A wait that is cancelled loses none."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._batches))
        await asyncio.wait({self._next})
        received, self._next = self._next, None
        try:
            batch = received.result()
        except StopAsyncIteration:
            self._ended = True
            return
        self._waiting.extend(batch.events)
        self._last_cursor = batch.cursor
        self._gap_follows |= batch.has_gap
        if not batch.events:
            self.cursor = batch.cursor
        elif not self.cursor:
            self.cursor = f"{batch.cursor.partition('-')[0]}-{batch.events[0].number - 1}"


class Events(BlockingIterator[AsyncEvents, RecordedEvent]):
    """As `AsyncEvents`, for programs without an event loop. Closing or deleting it, or Ctrl-C, ends the request."""

    @property
    def cursor(self) -> str:
        """As of `AsyncEvents`."""
        return self._source.cursor

    @property
    def has_gap(self) -> bool:
        """As of `AsyncEvents`."""
        return self._source.has_gap
