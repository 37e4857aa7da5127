"""uvicorn's HTTP connections, with deadlines for clients that send or read too slowly.

uvicorn closes a connection without a request only after an answer. A client that sends half a request, or nothing, or that
does not read its answer, would keep one of the gateway's connections for ever.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_SECONDS = 30.0  # for a whole request, from the connection or from its first byte on: 8 MiB at 2.2 Mbit/s
UNREAD_SECONDS = 60.0  # for which a client may leave 64 KiB of its answer unread, besides what the kernel holds


class BoundedProtocol(H11Protocol):
    """One connection. It is closed if a request takes too long to arrive, or an answer to be read."""

    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_arrival()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:  # the next request has begun
            self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_arrival()
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _watch_arrival(self) -> None:
        """Keep a deadline while a part of a request is missing."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_arrival()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_SECONDS, self.transport.abort)

    def _stop_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
