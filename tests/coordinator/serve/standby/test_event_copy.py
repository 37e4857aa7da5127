"""A standby's copy of the events: what a coordinator that takes over shows, and how its numbers go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

from support.waiting import until

from coordinator.serve.events.stream import EventFile, EventStream
from coordinator.serve.standby.standby import copy_events
from hearth.platform.asyncio_tools import cancel_all
from hearth.wire import messages as wire
from hearth.wire.rpc import RpcClient


class Connection:
    """The leader's stream without a network."""

    def __init__(self, leader: EventStream) -> None:
        self._leader = leader

    async def stream(self, request: wire.WatchEvents, **_: Any) -> AsyncGenerator[tuple[wire.Message, list[Any]], None]:
        async with aclosing(await self._leader.watch(request)) as answers:
            async for answer in answers:
                yield answer, []


@asynccontextmanager
async def recording(path: Path) -> AsyncIterator[EventStream]:
    """A coordinator's stream that has read its file."""
    stream = EventStream(EventFile(path))
    running = asyncio.create_task(stream.run())
    try:
        yield stream
    finally:
        await cancel_all([running])


async def causes(stream: EventStream) -> tuple[list[str], str]:
    """The causes of all events that are shown, and the cursor after them."""
    async with aclosing(await stream.watch(wire.WatchEvents(follow=False))) as answers:
        shown = [each async for each in answers if isinstance(each, wire.EventsRecorded)]
    events = [each.event for answer in shown for each in answer.events]
    return [each.cause for each in events if isinstance(each, wire.PhaseChanged)], shown[-1].cursor


def phase(cause: str) -> wire.PhaseChanged:
    return wire.PhaseChanged(deployment="d", phase="settling", cause=cause)


@asynccontextmanager
async def copied(leader: EventStream, path: Path) -> AsyncIterator[None]:
    copying = asyncio.create_task(copy_events(cast(RpcClient, Connection(leader)), EventFile(path)))
    try:
        yield
    finally:
        await cancel_all([copying])


def holds(path: Path, cause: str) -> bool:
    _, events = EventFile(path).read()
    return any(isinstance(each.event, wire.PhaseChanged) and each.event.cause == cause for each in events)


async def test_coordinator_that_takes_over_shows_the_events_of_the_leader_and_counts_on(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "leader" / "events", tmp_path / "standby" / "events"

    async with recording(theirs) as earlier:  # it led another home's models once
        earlier.record(phase("long ago"))
    async with recording(ours) as leader:
        leader.record(phase("one"))
        async with copied(leader, theirs):
            await until("the first event", lambda: holds(theirs, "one"))
            leader.record(phase("two"))
            await until("the second event", lambda: holds(theirs, "two"))
        leader.record(phase("three"))
        async with copied(leader, theirs):  # it follows again
            await until("the third event", lambda: holds(theirs, "three"))
        assert not leader.is_watched
        _, cursor = await causes(leader)
    async with recording(theirs) as successor:
        successor.record(phase("four"))
        assert (await causes(successor))[0] == ["one", "two", "three", "four"]
        since = wire.WatchEvents(since=cursor, follow=False)
        async with aclosing(await successor.watch(since)) as answers:
            first = await anext(answers)
        assert isinstance(first, wire.EventsRecorded)
        assert ([each.event for each in first.events], first.has_gap) == ([phase("four")], False)
