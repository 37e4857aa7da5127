"""Requests and answers over ROUTER and DEALER, encrypted: control and client planes.

On the wire a request or an answer is `[request id, message, payload frames...]`. An answer may be an error, which is
raised at the caller as the same `HearthError`. A stream is any number of answers under one id; its caller ends it early
with `Cancel`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hearth.errors import (
    BadMessage,
    ConnectionLost,
    DeadlineExceeded,
    HearthError,
    InternalError,
    PortInUse,
    ProtocolMismatch,
    QueueFull,
    Unreachable,
    WrongKey,
)
from hearth.platform.asyncio_tools import cancel_all, within
from hearth.platform.security import Access, KeyPair, secure_client, secure_server, user_id
from hearth.protocol import MAX_PAYLOAD_FRAMES, PROTOCOL_VERSION
from hearth.wire.messages import Cancel, Failed, Hello, Message, decode, encode, expected

log = logging.getLogger(__name__)

MAX_REQUESTS_PER_CALLER = 256  # at once; one more is answered with QueueFull
_ID_BYTES = 8
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_CHILD_RECONNECT_MS = 20  # until a child process that was just started listens
# A caller that leaves a whole socket buffer unread for so long takes no more part in its stream.
_STALLED_SECONDS = 30.0
_STALLED_POLL_SECONDS = 0.05
# The other end closed the handshake: our key is unknown there, or theirs is not the one we expect.
_REFUSALS = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_LOSSES = functools.reduce(operator.or_, _REFUSALS, zmq.EVENT_DISCONNECTED)

_M = TypeVar("_M", bound=Message)


class Caller(NamedTuple):
    """Who asks: the authenticated public key."""

    public_key: str


class Reply(NamedTuple):
    message: Message
    payload: Sequence[Any] = ()


Response: TypeAlias = Message | Reply | AsyncGenerator[Message | Reply, None]  # the last: a stream
Handler = Callable[[Caller, Message, Sequence[Any]], Awaitable[Response]]


class RpcServer:
    """A ROUTER that runs each request as a task of its own. Unreadable messages are counted in `dropped`.

    A handler that returns an async generator answers with a stream. The generator is closed when its caller cancels,
    is gone (noticed at the next answer: the socket's heartbeats end a connection that fell silent after some 8 s), or
    has stopped to read. What it does in `finally` runs in each case.
    """

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
        """Bind and listen. Port 0 takes any free one. Raises PortInUse, naming `port_setting` as the way out."""
        self.dropped = 0
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}  # by connection and request id
        self._running: Counter[str] = Counter()
        self._socket = context.socket(zmq.ROUTER)
        secure_server(self._socket, keypair, domain)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or an answer to nobody would pass for sent
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            if error.errno == zmq.EADDRINUSE:
                raise PortInUse(port=port, setting=port_setting) from None
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._loop_task = asyncio.create_task(self._receive_loop())

    @property
    def num_running(self) -> int:
        """Requests whose handlers run, or whose answers are still being sent."""
        return max(sum(self._running.values()), len(self._requests))

    async def close(self) -> None:
        await cancel_all([self._loop_task, *self._tasks])
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
                await self._send(identity, request_id, Failed.of(error))
                continue
            if isinstance(message, Cancel):
                if (task := self._requests.get((identity, message.request))) is not None:
                    task.cancel()
                continue
            self._running[caller.public_key] += 1
            task = asyncio.create_task(self._run(caller, identity, request_id, message, frames[3:]))
            self._tasks.add(task)
            self._requests[identity, request_id] = task
            task.add_done_callback(functools.partial(self._ended, caller, (identity, request_id)))

    def _read(self, caller: Caller, frames: list[zmq.Frame]) -> Message:
        if len(frames) - 3 > MAX_PAYLOAD_FRAMES:
            raise BadMessage(reason=f"{len(frames) - 3} payload frames, at most {MAX_PAYLOAD_FRAMES} are allowed")
        message = decode(frames[2].buffer)
        if self._running[caller.public_key] >= MAX_REQUESTS_PER_CALLER and not isinstance(message, Cancel):
            raise QueueFull(limit=MAX_REQUESTS_PER_CALLER)
        return message

    def _ended(self, caller: Caller, key: tuple[bytes, bytes], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._requests.get(key) is task:  # not a later request that took the same id
            del self._requests[key]
        self._running[caller.public_key] -= 1
        if not self._running[caller.public_key]:
            del self._running[caller.public_key]

    async def _run(
        self, caller: Caller, identity: bytes, request_id: bytes, message: Message, payload: list[zmq.Frame]
    ) -> None:
        try:
            response = await self._handler(caller, message, [frame.buffer for frame in payload])
            if isinstance(response, AsyncGenerator):
                async with aclosing(response) as replies:
                    async for reply in replies:
                        if not await self._send(identity, request_id, reply, _STALLED_SECONDS):
                            log.info("the caller of a stream (%s) is gone", type(message).__name__)
                            return
            else:
                await self._send(identity, request_id, response)
        except HearthError as error:
            await self._send(identity, request_id, Failed.of(error))
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            failure = InternalError(where="the other end", reason=f"{type(error).__name__}: {error}")
            await self._send(identity, request_id, Failed.of(failure))

    async def _send(
        self, identity: bytes, request_id: bytes, answer: Message | Reply, patience_seconds: float = 0.0
    ) -> bool:
        """Whether it was sent: not to a caller that is gone, nor to one whose buffer stays full for so long.

        Raises FrameTooLarge.
        """
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        frames = [identity, request_id, encode(reply.message), *reply.payload]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_seconds
        while True:
            try:
                # Never waits inside the socket: one full buffer would hold up the answers to all others.
                await self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                return True
            except zmq.Again:
                if loop.time() >= deadline:
                    return False
                await asyncio.sleep(_STALLED_POLL_SECONDS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False


class RpcClient:
    """A DEALER to one server. Any number of calls may be in flight; ZeroMQ reconnects by itself.

    A call made while there is no connection is not kept for later: it waits for the connection at most its own
    timeout, and is then forgotten (`ZMQ_IMMEDIATE`).

    Without `access`, the server is a child process of ours behind a private ipc endpoint. Calls are kept until it
    listens there, and `fail` ends them when the process has ended: the connection itself is not watched.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, access: Access | None, name: str) -> None:
        self.endpoint = endpoint
        self._name = name
        self._where = endpoint if access else name
        self._socket = context.socket(zmq.DEALER)
        self._settled = asyncio.Event()  # there is a connection, or our key was refused
        self._refused = False
        # What came for each request and was not yet taken. A stream that nobody reads grows here; what a server streams
        # is small and ends (the tokens of one answer), so that nothing more bounds it.
        self._pending: dict[bytes, asyncio.Queue[Reply | HearthError]] = {}
        self._last_id = 0
        self._failure: HearthError | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks = [asyncio.create_task(self._receive_loop())]
        if access is None:
            self._socket.linger = 0
            self._socket.reconnect_ivl = _CHILD_RECONNECT_MS
            self._settled.set()
        else:
            secure_client(self._socket, access.own, access.server_public)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.reconnect_ivl = _RECONNECT_MS
            self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
            monitor = self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _LOSSES)
            self._tasks.append(asyncio.create_task(self._watch(monitor)))
        self._socket.connect(endpoint)

    @property
    def pending(self) -> tuple[bytes, ...]:
        """The ids of requests that wait for an answer."""
        return tuple(self._pending)

    async def close(self) -> None:
        await cancel_all(self._tasks)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close()
        self._fail_pending(ConnectionLost(endpoint=self.endpoint))

    def fail(self, error: HearthError) -> None:
        """Raise `error` from all calls that wait, and from all later ones."""
        self._failure = error
        self._fail_pending(error)

    async def hello(self, welcome: type[_M], timeout_seconds: float) -> _M:
        """Introduce ourselves. Raises ProtocolMismatch, WrongKey, Unreachable, DeadlineExceeded."""
        try:
            reply = await self.call(Hello(name=self._name[:256]), timeout_seconds=timeout_seconds)
        except ProtocolMismatch as error:  # of our own decoder, or of the other end, which is the other way round
            other = error.theirs if error.ours == PROTOCOL_VERSION else error.ours
            raise ProtocolMismatch(peer=self.endpoint, ours=PROTOCOL_VERSION, theirs=other) from None
        theirs = getattr(reply.message, "protocol", None)
        if theirs is not None and theirs != PROTOCOL_VERSION:
            raise ProtocolMismatch(peer=self.endpoint, ours=PROTOCOL_VERSION, theirs=theirs)
        return expected(reply.message, welcome, self.endpoint)

    async def call(self, message: Message, payload: Sequence[Any] = (), *, timeout_seconds: float) -> Reply:
        """Ask and wait. Raises what the server raised; Unreachable (nothing was sent), WrongKey,
        ConnectionLost, DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        request_id, replies = await self._send(message, payload, timeout_seconds)
        try:
            remaining = max(deadline - loop.time(), 0.001)
            reply = await within(remaining, replies.get())
        except asyncio.TimeoutError:
            raise self._too_late(message, timeout_seconds) from None
        finally:
            del self._pending[request_id]
        return _raised(reply)

    async def stream(
        self,
        message: Message,
        payload: Sequence[Any] = (),
        *,
        timeout_seconds: float,
        last: type[Any],
        next_seconds: float | None = None,
    ) -> AsyncGenerator[Reply, None]:
        """Ask, and give every answer as it comes, up to the first that is a `last`.

        `timeout_seconds` bounds the wait for the connection and for each answer; `next_seconds`, where given, the waits
        for answers after the first. Closed before its end, it tells
        the server to cancel; wrap it in `contextlib.aclosing` to have that done at once. Raises as `call` does.
        """
        request_id, replies = await self._send(message, payload, timeout_seconds)
        ended = False
        try:
            while not ended:
                try:
                    reply = await within(timeout_seconds, replies.get())
                except asyncio.TimeoutError:
                    raise self._too_late(message, timeout_seconds) from None
                timeout_seconds = next_seconds or timeout_seconds
                ended = isinstance(reply, HearthError) or isinstance(reply.message, (last, Failed))
                yield _raised(reply)
        finally:
            del self._pending[request_id]
            if not ended:
                self._last_id += 1
                frames = [self._last_id.to_bytes(_ID_BYTES, "little"), encode(Cancel(request=request_id))]
                with suppress(zmq.ZMQError):  # no connection: the server has noticed, or will
                    await self._socket.send_multipart(frames, zmq.NOBLOCK)

    async def _send(
        self, message: Message, payload: Sequence[Any], timeout_seconds: float
    ) -> tuple[bytes, asyncio.Queue[Reply | HearthError]]:
        """Send once there is a connection; the id is pending from now on."""
        body = encode(message)
        await self._wait_connected(timeout_seconds)
        if self._failure is not None:
            raise self._failure
        self._last_id += 1
        request_id = self._last_id.to_bytes(_ID_BYTES, "little")
        self._pending[request_id] = asyncio.Queue()
        try:
            await self._socket.send_multipart([request_id, body, *payload], zmq.NOBLOCK, copy=False)
        except BaseException as error:
            del self._pending[request_id]
            if isinstance(error, zmq.Again):
                raise Unreachable(endpoint=self.endpoint, seconds=timeout_seconds) from None
            raise
        return request_id, self._pending[request_id]

    def _too_late(self, message: Message, timeout_seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(action=f"{type(message).__name__} at {self._where}", seconds=timeout_seconds)

    async def _wait_connected(self, timeout_seconds: float) -> None:
        if not self._settled.is_set():
            try:
                await within(timeout_seconds, self._settled.wait())
            except asyncio.TimeoutError:
                raise Unreachable(endpoint=self.endpoint, seconds=timeout_seconds) from None
        if self._refused:
            raise WrongKey(endpoint=self.endpoint)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._refused = not connected and (self._refused or event in _REFUSALS)
            if connected or self._refused:
                self._settled.set()
            else:
                self._settled.clear()
            if not connected:
                self._fail_pending(ConnectionLost(endpoint=self.endpoint))

    def _fail_pending(self, error: HearthError) -> None:
        for replies in self._pending.values():
            replies.put_nowait(error)

    async def _receive_loop(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            replies = self._pending.get(frames[0].bytes) if len(frames) >= 2 else None
            if replies is None:
                continue  # its caller has given up
            try:
                replies.put_nowait(Reply(decode(frames[1].buffer), [frame.buffer for frame in frames[2:]]))
            except HearthError as error:
                replies.put_nowait(error)


def _raised(reply: Reply | HearthError) -> Reply:
    """The reply, unless it is an error, which is raised."""
    if isinstance(reply, HearthError):
        raise reply
    if isinstance(reply.message, Failed):
        raise reply.message.error()
    return reply
