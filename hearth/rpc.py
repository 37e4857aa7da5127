"""Requests and answers over ROUTER and DEALER, encrypted: control and client planes.

On the wire a request or an answer is `[request id, message, payload frames...]`. An answer may be an error, which is
raised at the caller as the same `HearthError`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hearth.errors import (
    BadMessage,
    ConnectionLost,
    DeadlineExceeded,
    FrameTooLarge,
    HearthError,
    InternalError,
    PortInUse,
    ProtocolMismatch,
    QueueFull,
    Unreachable,
    WrongKey,
)
from hearth.messages import MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION, Failed, Hello, Message, decode, encode
from hearth.security import Access, KeyPair, secure_client, secure_server, user_id

log = logging.getLogger(__name__)

MAX_REQUESTS_PER_CALLER = 256  # at once; one more is answered with QueueFull
_ID_BYTES = 8
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
# The other end closed the handshake: our key is unknown there, or theirs is not the one we expect.
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)

_T = TypeVar("_T")


class Caller(NamedTuple):
    """Who asks: the authenticated public key."""

    public_key: str


class Reply(NamedTuple):
    message: Message
    payload: Sequence[Any] = ()


Handler = Callable[[Caller, Message, Sequence[Any]], Awaitable["Message | Reply"]]


class RpcServer:
    """A ROUTER that runs each request as a task of its own. Unreadable messages are counted in `dropped`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        bind_host: str,
        port: int,
        keypair: KeyPair,
        domain: str,
        handler: Handler,
        port_setting: str = "--port",
    ) -> None:
        """Port 0 takes any free one. Raises PortInUse, naming `port_setting` as the way out."""
        self.dropped = 0
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: Counter[str] = Counter()
        self._socket = context.socket(zmq.ROUTER)
        secure_server(self._socket, keypair, domain)
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            if error.errno == zmq.EADDRINUSE:
                raise PortInUse(port=port, setting=port_setting) from None
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def start(self) -> None:
        self._loop_task = asyncio.create_task(self._receive_loop())

    async def close(self) -> None:
        tasks = [self._loop_task, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _receive_loop(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            if len(frames) < 3 or len(frames[1]) != _ID_BYTES:
                self.dropped += 1
                continue
            caller = Caller(user_id(frames[-1]))
            identity, request_id = frames[0].bytes, frames[1].bytes
            try:
                message = self._read(caller, frames)
            except HearthError as error:
                self.dropped += 1
                await self._answer(identity, request_id, Reply(Failed.of(error)))
                continue
            self._running[caller.public_key] += 1
            task = asyncio.create_task(self._run(caller, identity, request_id, message, frames[3:]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _read(self, caller: Caller, frames: list[zmq.Frame]) -> Message:
        if len(frames) - 3 > MAX_PAYLOAD_FRAMES:
            raise BadMessage(reason=f"{len(frames) - 3} payload frames, at most {MAX_PAYLOAD_FRAMES} are allowed")
        if self._running[caller.public_key] >= MAX_REQUESTS_PER_CALLER:
            raise QueueFull(limit=MAX_REQUESTS_PER_CALLER)
        return decode(frames[2].buffer)

    async def _run(
        self, caller: Caller, identity: bytes, request_id: bytes, message: Message, payload: list[zmq.Frame]
    ) -> None:
        try:
            answer = await self._handler(caller, message, [frame.buffer for frame in payload])
            reply = answer if isinstance(answer, Reply) else Reply(answer)
        except HearthError as error:
            reply = Reply(Failed.of(error))
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            reply = Reply(Failed.of(InternalError(where="the other end", reason=f"{type(error).__name__}: {error}")))
        finally:
            self._running[caller.public_key] -= 1
            if not self._running[caller.public_key]:
                del self._running[caller.public_key]
        await self._answer(identity, request_id, reply)

    async def _answer(self, identity: bytes, request_id: bytes, reply: Reply) -> None:
        try:
            body = encode(reply.message)
        except FrameTooLarge as error:
            body = encode(Failed.of(error))
        # A ROUTER drops what is for a caller that has gone.
        await self._socket.send_multipart([identity, request_id, body, *reply.payload], copy=False)


class RpcClient:
    """A DEALER to one server. Any number of calls may be in flight; ZeroMQ reconnects by itself.

    A call made while there is no connection is not kept for later: it waits for the connection at most its own
    timeout, and is then forgotten (`ZMQ_IMMEDIATE`).
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, access: Access, name: str) -> None:
        self.endpoint = endpoint
        self._name = name
        self._socket = context.socket(zmq.DEALER)
        secure_client(self._socket, access.own, access.server_public)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._connected = asyncio.Event()
        self._refused = asyncio.Event()
        self._pending: dict[bytes, asyncio.Future[Reply]] = {}
        self._last_id = 0
        self._socket.connect(endpoint)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._receive_loop())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        for answer in self._pending.values():
            answer.cancel()

    async def hello(self, expected: type[_T], timeout_seconds: float) -> _T:
        """Introduce ourselves. Raises ProtocolMismatch, WrongKey, Unreachable, DeadlineExceeded."""
        reply = await self.call(Hello(name=self._name[:256]), timeout_seconds=timeout_seconds)
        theirs = getattr(reply.message, "protocol", None)
        if theirs is not None and theirs != PROTOCOL_VERSION:
            raise ProtocolMismatch(peer=self.endpoint, ours=PROTOCOL_VERSION, theirs=theirs)
        if not isinstance(reply.message, expected):
            raise BadMessage(reason=f"{self.endpoint} answered hello with {type(reply.message).__name__}")
        return reply.message

    async def call(self, message: Message, payload: Sequence[Any] = (), *, timeout_seconds: float) -> Reply:
        """Ask and wait. Raises what the server raised; Unreachable (nothing was sent), WrongKey,
        ConnectionLost, DeadlineExceeded."""
        body = encode(message)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        await self._wait_connected(timeout_seconds)
        self._last_id += 1
        request_id = self._last_id.to_bytes(_ID_BYTES, "little")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = answer
        try:
            await self._socket.send_multipart([request_id, body, *payload], zmq.NOBLOCK, copy=False)
            remaining = max(deadline - asyncio.get_running_loop().time(), 0.001)
            reply = await asyncio.wait_for(answer, remaining)
        except zmq.Again:
            raise Unreachable(endpoint=self.endpoint, seconds=timeout_seconds) from None
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                action=f"{type(message).__name__} at {self.endpoint}", seconds=timeout_seconds
            ) from None
        finally:
            self._pending.pop(request_id, None)
        if isinstance(reply.message, Failed):
            raise reply.message.error()
        return reply

    async def _wait_connected(self, timeout_seconds: float) -> None:
        if self._connected.is_set():
            return
        waits = [asyncio.ensure_future(self._connected.wait()), asyncio.ensure_future(self._refused.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._connected.is_set():
            return
        if self._refused.is_set():
            raise WrongKey(endpoint=self.endpoint)
        raise Unreachable(endpoint=self.endpoint, seconds=timeout_seconds)

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refused.clear()
                self._connected.set()
            else:
                self._connected.clear()
                self._fail_pending(ConnectionLost(endpoint=self.endpoint))
                if event in _REFUSALS:
                    self._refused.set()

    def _fail_pending(self, error: HearthError) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)

    async def _receive_loop(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            answer = self._pending.get(frames[0].bytes) if len(frames) >= 2 else None
            if answer is None or answer.done():
                continue  # its caller has given up
            try:
                answer.set_result(Reply(decode(frames[1].buffer), [frame.buffer for frame in frames[2:]]))
            except HearthError as error:
                answer.set_exception(error)
