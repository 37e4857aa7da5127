"""`GET /v1/events` and `GET /metrics`: what the home records, for those whose token may read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.call import EventStream
from coordinator.http.failures import Failure
from coordinator.http.homes import Served
from coordinator.http.openai.sampling import failed_event
from hearth.client.events import AsyncEvents
from hearth.wire.messages import RecordedEvent

# Prometheus's text format; the coordinator writes it.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ALIVE_SECONDS = 5.0  # without an event, after which a stream gets a comment
_ALIVE = b": nothing has happened\n\n"
_RECONNECT_SECONDS = 120.0  # without a coordinator, after which a stream ends; its client asks again


async def metrics(served: Served) -> Response:
    """All metrics of the home."""
    return Response(await served.home.metrics(), media_type=METRICS_TYPE)


async def events(served: Served, request: Request) -> EventStream:
    """The events after `since` or the header `Last-Event-ID`, of the `kinds` that are named, as server-sent events."""
    query = request.query_params
    if unknown := set(query) - {"since", "kinds"}:
        raise Failure(
            400, f"There is no parameter '{min(unknown)}'; there are 'since' and 'kinds'.", param=min(unknown)
        )
    since = query.get("since") or request.headers.get("last-event-id", "")
    kinds = [kind for kind in query.get("kinds", "").split(",") if kind]
    happened = served.home.events(since, kinds, timeout_seconds=_RECONNECT_SECONDS)
    return EventStream("text/event-stream", _pieces(happened), failed_event)


async def _pieces(happened: AsyncEvents) -> AsyncGenerator[bytes, None]:
    waiting: asyncio.Future[RecordedEvent] | None = None
    try:
        await happened.open()
        yield b": events follow\n\n"
        while True:
            waiting = waiting or asyncio.ensure_future(anext(happened))
            done, _ = await asyncio.wait({waiting}, timeout=_ALIVE_SECONDS)
            if not done:
                yield _ALIVE
                continue
            try:
                recorded = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            if happened.has_gap:
                yield b": events are missing here\n\n"
                happened.has_gap = False
            yield _piece(recorded, happened.cursor)
    finally:
        if waiting is not None:
            waiting.cancel()
        await happened.aclose()


def _piece(recorded: RecordedEvent, cursor: str) -> bytes:
    """One event: its cursor as id, its kind as name, and all of it as JSON."""
    return f"id: {cursor}\nevent: {recorded.event.kind}\ndata: {recorded.model_dump_json()}\n\n".encode()
