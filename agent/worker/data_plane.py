"""One rank's end of the data plane: the transport, one codec per link, and the receiving and sending threads."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from hearth.errors import BadMessage, FrameTooLarge, InternalError
from hearth.platform.curve import new_keypair
from hearth.transport.base import Received, Transport
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import Codec
from hearth.wire.messages import Start, WireStats

log = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0  # longest wait for a thread at the end: it notices the end within half a second

T = TypeVar("T")


def bind_transport(start: Start, copied_bytes: int | None = None) -> SocketTransport:
    """Create and bind the transport of a worker's rank; see `SocketTransport`. Raises PortInUse."""
    load = start.load
    keypair = new_keypair() if load.encrypt_data_plane else None
    return SocketTransport(load.rank, load.plan.num_ranks, start.bind_host, start.ports, keypair, copied_bytes)


class DataPlane(ABC, Generic[T]):
    """Two threads: one receives messages, one sends the items of the queue `_outgoing`. `codecs` has one codec per peer.

    `dropped` counts refused messages.
    """

    def __init__(self, transport: Transport, epoch: int, token: bytes, codecs: Mapping[int, Codec]) -> None:
        self.dropped = 0
        self._transport = transport
        self._epoch = epoch
        self._token = token
        self._codecs = codecs
        self._closing = False
        self._outgoing: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._receive_loop, name="communication", daemon=True),
            threading.Thread(target=self._send_loop, name="sending", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wire_stats(self) -> WireStats:
        """Codec counters of all outgoing links since the plan was loaded."""
        return WireStats.sum(codec.stats for codec in self._codecs.values())

    def _stop(self) -> None:
        """End the threads; the transport stays open. Call it once `_closing` is set and no thread waits for anything else.

        Raises InternalError if a thread does not end: it may still use the transport.
        """
        self._outgoing.put(None)
        self._transport.interrupt()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=_JOIN_SECONDS)
                if thread.is_alive():
                    raise InternalError(where="the worker", reason=f"the thread {thread.name} did not end")

    @abstractmethod
    def _receive_loop(self) -> None:
        """Pass received messages to `_accept_or_drop` until `_closing` is set."""

    @abstractmethod
    def _accept(self, received: Received) -> None:
        """Process a message. Raises BadMessage, FrameTooLarge."""

    @abstractmethod
    def _send_one(self, item: T) -> None:
        """Send one item of `_outgoing`. Must not raise."""

    def _send_loop(self) -> None:
        while (item := self._outgoing.get()) is not None:
            self._send_one(item)
            del item  # frees its tensor while waiting for the next item

    def _accept_or_drop(self, received: Received | None) -> None:
        if received is None:
            return
        try:
            self._accept(received)
        except (BadMessage, FrameTooLarge) as error:
            self._drop(str(error))

    def _drop(self, description: str) -> None:
        self.dropped += 1
        if self.dropped == 1:  # log only the first one; the status contains the count
            log.warning("dropped %s", description)
