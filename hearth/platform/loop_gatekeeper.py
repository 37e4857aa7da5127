"""A gatekeeper that answers handshakes in the running event loop."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator

from hearth.platform.asyncio_tools import cancel_all, loop_time, supervised
from hearth.platform.curve import Gatekeeper

log = logging.getLogger(__name__)

_DECISION_SECONDS = 5.0  # a rule reads a set of keys, or a small file: it takes milliseconds


class _LoopAuthenticator(Authenticator):
    """pyzmq's authenticator in the running event loop. It survives a message that it cannot handle."""

    _waiting_since: float | None = None  # since when a message is handled, in the loop's time

    def has_worked(self) -> bool:
        """Whether no handshake has waited for its decision for long."""
        return self._waiting_since is None or loop_time() - self._waiting_since < _DECISION_SECONDS

    async def _answer_all(self) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(self.zap_socket, zmq.POLLIN)
        while True:
            await poller.poll()
            message = self.zap_socket.recv_multipart(zmq.NOBLOCK)
            self._waiting_since = loop_time()
            try:
                await self.handle_zap_message(message)
            except Exception:
                log.exception("a handshake could not be decided; it must be tried again")
                with suppress(zmq.ZMQError):  # it was answered before
                    self._send_zap_reply(message[1], b"300", b"Internal error")  # temporary: the client tries again
            self._waiting_since = None

    def start(self) -> None:
        super().start()
        self._task = supervised(self._answer_all(), "the gatekeeper")

    async def end_task(self) -> None:
        await cancel_all([self._task])

    def stop(self) -> None:
        self._task.cancel()
        super().stop()


class LoopGatekeeper(Gatekeeper):
    """A gatekeeper whose handshakes are answered in the running event loop, in which it must be started."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._loop_authenticator = _LoopAuthenticator(context)
        super().__init__(self._loop_authenticator)

    def has_worked(self) -> bool:
        """Whether no handshake has waited for its decision for long."""
        return self._loop_authenticator.has_worked()

    async def close(self) -> None:
        """As `stop`, in an event loop that goes on: a later socket may get the file descriptor of the closed one."""
        await self._loop_authenticator.end_task()
        self.stop()
