"""ZeroMQ sockets in the running event loop, at a fraction of the time that `zmq.asyncio` takes for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import zmq
import zmq.asyncio

from hearth.wire.direct_socket import DirectSocket


class LoopSocket(DirectSocket):
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
        if (frames := self.receive_frames()) is not None:
            return frames
        if self._loop is None:
            self._loop, self._descriptor = asyncio.get_running_loop(), int(super().get(zmq.FD))
            self._loop.add_reader(self._descriptor, self._look)
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def send_now(self, frames: Sequence[Any]) -> None:
        """Send a message. Raises zmq.Again if the buffer is full or there is no connection, zmq.ZMQError."""
        try:
            self.send_frames(frames)
        finally:
            if self._waiter is not None and not self.closed:
                self._look()

    def has_waiting_message(self) -> bool:
        """Whether a message has come that is not received yet."""
        found = self.has_message()
        if found and self._waiter is not None:
            self._look()
        return found

    def close(self, linger: int | None = None) -> None:
        """Close the socket; a receiver is cancelled."""
        if self._loop is not None and not self.closed:
            self._loop.remove_reader(self._descriptor)
        if self._waiter is not None:
            self._waiter.cancel()
        super().close(linger)

    def _look(self) -> None:
        """Hand the next message to the receiver, if there are both. The descriptor is not readable after this."""
        if self._waiter is None or self._waiter.done():
            self.has_message()  # `receive` finds it
            return
        try:
            if (frames := self.receive_frames()) is not None:
                self._waiter.set_result(frames)
        except zmq.ZMQError as error:
            self._waiter.set_exception(error)


def loop_socket(context: zmq.asyncio.Context, kind: int) -> LoopSocket:
    """Create a socket for the running event loop."""
    made: Any = context.socket(kind, socket_class=cast(Any, LoopSocket))
    return cast(LoopSocket, made)
