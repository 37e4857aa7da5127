"""ZeroMQ sockets in the running event loop, at a quarter of the time that `zmq.asyncio` takes for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import zmq
import zmq.asyncio


class LoopSocket(zmq.Socket[Any]):
    """A socket that sends without waiting, and whose messages one task receives.

    ZeroMQ's descriptor is readable until this thread has looked at the socket, whether or not that was to receive. So each
    access looks for messages while a task waits for them. A message is lost if its receiver is cancelled as it arrives.
    """

    # Attributes must be known to the class: ZeroMQ takes others for its options.
    _loop: asyncio.AbstractEventLoop | None = None
    _descriptor = -1
    _waiter: asyncio.Future[list[zmq.Frame]] | None = None

    async def receive(self) -> list[zmq.Frame]:
        """The frames of the next message."""
        try:
            return self.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return await self._next()

    def send_now(self, frames: Sequence[Any]) -> None:
        """Send a message. Raises zmq.Again if the buffer is full or there is no connection, zmq.ZMQError."""
        self.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._look()

    def get(self, option: int) -> Any:
        """The value of an option."""
        value = super().get(option)
        if option == zmq.EVENTS:
            self._look()
        return value

    def close(self, linger: int | None = None) -> None:
        """Close the socket; a receiver is cancelled."""
        if self._loop is not None and not self.closed:
            self._loop.remove_reader(self._descriptor)
        if self._waiter is not None:
            self._waiter.cancel()
        super().close(linger)

    async def _next(self) -> list[zmq.Frame]:
        if self._loop is None:
            self._loop, self._descriptor = asyncio.get_running_loop(), int(super().get(zmq.FD))
            self._loop.add_reader(self._descriptor, self._receive)
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """Receive the next message if there is one: its signal was cleared by the last access."""
        if self._waiter is not None and not self._waiter.done() and int(super().get(zmq.EVENTS)) & zmq.POLLIN:
            self._receive()

    def _receive(self) -> None:
        """The descriptor is readable: messages may have come."""
        if self._waiter is None or self._waiter.done():
            super().get(zmq.EVENTS)  # clears the signal; the next call of `recv_multipart` finds the message
            return
        try:
            self._waiter.set_result(self.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            self._waiter.set_exception(error)


def loop_socket(context: zmq.asyncio.Context, kind: int) -> LoopSocket:
    """Create a socket for the running event loop."""
    made: Any = context.socket(kind, socket_class=cast(Any, LoopSocket))
    return cast(LoopSocket, made)
