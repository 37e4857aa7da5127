"""The client's iterator over events: gaps, cursors, and waits that are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from hearth.client.events import AsyncEvents
from hearth.wire.messages import CoordinatorStarted, EventsRecorded, RecordedEvent

STARTED = CoordinatorStarted(name="home", version="1")


def batch(*numbers: int, has_gap: bool = False) -> EventsRecorded:
    events = tuple(RecordedEvent(number=number, unix_seconds=0.0, event=STARTED) for number in numbers)
    return EventsRecorded(events=events, cursor=f"stream-{max(numbers, default=0)}", has_gap=has_gap)


async def test_gap_is_shown_once_before_the_first_event_after_it() -> None:
    async def batches() -> AsyncGenerator[EventsRecorded, None]:
        yield batch(1, 2)
        yield batch(has_gap=True)
        yield batch(7, 8)
        yield batch(12, 13, has_gap=True)

    async with AsyncEvents(batches()) as events:
        found = [(recorded.number, events.has_gap) async for recorded in events]
    assert found == [(1, False), (2, False), (7, True), (8, False), (12, True), (13, False)]


async def test_wait_that_is_given_up_when_events_arrive_loses_none() -> None:
    arrives = asyncio.Event()

    async def batches() -> AsyncGenerator[EventsRecorded, None]:
        await arrives.wait()
        yield batch(1, 2)

    async with AsyncEvents(batches()) as events:
        waiting = asyncio.ensure_future(anext(events))
        while events._next is None:
            await asyncio.sleep(0)
        events._next.add_done_callback(lambda _: waiting.cancel())  # before the waiting task runs again
        arrives.set()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert [recorded.number async for recorded in events] == [1, 2]
