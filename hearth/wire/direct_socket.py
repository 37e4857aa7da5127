"""ZeroMQ sockets for small messages, without what pyzmq adds around each frame: several times the time of sending it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import zmq

from hearth.platform.connections import end_connection

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
