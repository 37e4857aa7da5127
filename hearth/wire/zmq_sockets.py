"""ZeroMQ sockets for small messages, without what pyzmq adds around each frame: several times the time of sending it.

A `DirectSocket` is for a program that polls its sockets itself. A `LoopSocket` is for an event loop: it imports asyncio only
when it is used, because the client port's process must stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import zmq

from hearth.platform.connections import end_connection

if TYPE_CHECKING:
    import asyncio

    import zmq.asyncio

# As plain numbers: to combine zmq's flags takes longer than to send a frame.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_SENDABLE = (bytes, memoryview, zmq.Frame)


class DirectSocket(zmq.Socket[Any]):
    """A socket that neither sends nor receives with waiting."""

    def send_frames(self, frames: Sequence[Any]) -> None:
        """Send a message. Raises zmq.Again if the buffer is full or there is no connection, zmq.ZMQError, TypeError."""
        checked = [frame if isinstance(frame, _SENDABLE) else memoryview(frame) for frame in frames]
        last = checked.pop()
        send = super(zmq.Socket, self).send
        for frame in checked:
            send(frame, _MORE, False)
        send(last, _LAST, False)

    def receive_frames(self) -> list[zmq.Frame] | None:
        """The frames of the next message; None if there is none. Both clear the signal of the socket's descriptor."""
        if not self.has_message():
            return None
        receive = super(zmq.Socket, self).recv
        frames: list[Any] = [receive(_LAST, False)]
        while frames[-1].more:
            frames.append(receive(_LAST, False))
        return frames

    def has_message(self) -> bool:
        """Whether a message has come."""
        events: Any = super(zmq.Socket, self).get(_EVENTS)
        return bool(events & _POLLIN)


def direct_socket(context: zmq.Context[Any], kind: int) -> DirectSocket:
    """Create a socket for a program that polls its sockets itself."""
    return cast(DirectSocket, context.socket(kind, DirectSocket))


def end_connection_of(frame: zmq.Frame) -> None:
    """End the connection on which a frame came."""
    with suppress(zmq.ZMQError):  # the frame came over no connection
        end_connection(int(frame.get(zmq.SRCFD)))


class LoopSocket(DirectSocket):
    """A socket of the running event loop, at a fraction of the time that `zmq.asyncio` takes for each message.

    It sends without waiting, and one task receives its messages.

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
            import asyncio

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
