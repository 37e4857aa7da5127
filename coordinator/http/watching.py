"""`GET /v1/events` and `GET /metrics`: what the home records, for those whose token may read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.answer_stream import SILENCE_SECONDS
from coordinator.http.failures import Failure
from coordinator.http.homes import Served
from coordinator.http.openai.common import failed_event
from coordinator.http.request import EventStream
from hearth.client.events import AsyncEvents
from hearth.platform.asyncio_tools import with_timeout

# As `Metrics.content_type` of the coordinator's answer, which `AsyncHome.metrics` does not return.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ALIVE = b": nothing has happened\n\n"
_RECONNECT_SECONDS = 120.0  # without a coordinator, after which a stream ends; its client asks again


async def metrics(request: Request) -> Response:
    """All metrics of the home."""
    return Response(await request.state.served.home.metrics(), media_type=METRICS_TYPE)


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
    try:
        await happened.open()
        yield b": events follow\n\n"
        while True:
            try:
                recorded = await with_timeout(SILENCE_SECONDS, anext(happened))
            except asyncio.TimeoutError:
                yield _ALIVE
                continue
            except StopAsyncIteration:
                return
            if happened.has_gap:
                yield b": events are missing here\n\n"
            data = recorded.model_dump_json()
            yield f"id: {happened.cursor}\nevent: {recorded.event.kind}\ndata: {data}\n\n".encode()
    finally:
        await happened.aclose()
