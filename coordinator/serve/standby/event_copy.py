"""A standby's copy of the leader's events, so that the coordinator that takes over shows them and counts on."""

from __future__ import annotations

import logging
from contextlib import aclosing

from coordinator.serve.events.file import EventFile
from hearth.errors import HearthError
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.wire import messages as wire
from hearth.wire.rpc import RpcClient

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0  # for the first answer; the leader then sends a sign of life every 5 s


async def copy_events(client: RpcClient, file: EventFile) -> None:
    """Append the leader's events to the file as they happen, until cancelled or until the leader is gone.

    Events of another coordinator that the file holds are no longer read.
    """
    try:
        stream, events = await on_disk(file.path, FILE_SECONDS, file.read)
        since = f"{stream}-{events[-1].number}" if events else ""
        request = wire.WatchEvents(since=since, is_copy=True)
        async with aclosing(client.stream(request, timeout_seconds=_CONNECT_SECONDS, last=wire.Done)) as replies:
            async for message, _ in replies:
                if isinstance(message, wire.EventsRecorded) and message.events:
                    stream = message.cursor.rpartition("-")[0]
                    await on_disk(file.path, FILE_SECONDS, file.append, stream, message.events)
    except (OSError, HearthError) as error:
        log.info("the leader's events are not copied: %s", error)
