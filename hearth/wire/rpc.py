"""Encrypted request/reply over ROUTER and DEALER sockets, for the control plane and clients.

On the wire, a request or an answer is `[request id, message, payload frames...]`. An error travels as a `Failed` answer and is
raised in the caller as the same `HearthError`. A stream is a series of answers with one id; the caller may end it early by
sending `Cancel`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hearth import errors
from hearth.platform import curve
from hearth.platform.asyncio_tools import Signal, cancel_all, loop_time, supervised, with_timeout
from hearth.platform.network import bracketed, shortest_round_trip
from hearth.platform.security import Access
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire import messages as wire
from hearth.wire.intake import ID_BYTES, Begin, End, Intake, Limits, Refuse, Rules
from hearth.wire.zmq_sockets import end_connection_of, loop_socket

log = logging.getLogger(__name__)

_NO_REQUEST = bytes(ID_BYTES)  # the id of no request
_RECONNECT_MS = 100  # first reconnection interval; it grows, so that a lost peer costs little, up to the next value
_RECONNECT_MAX_MS = 1000  # a server that has restarted is reached again within a second
_CHILD_RECONNECT_MS = 20  # short, because a child process that was just started soon listens
# Close a stream whose caller has not drained its socket buffer for this long: a client may pause, but a request must not occupy
# the devices for a client that reads no more.
_STALLED_SECONDS = 30.0
# Interval of the attempts to send to such a caller: short compared with a pause of a reader.
_STALLED_POLL_SECONDS = 0.05
_KEY_REFUSED = 400  # status of `EVENT_HANDSHAKE_FAILED_AUTH`: the server does not know our key
# A server with another key than we expect closes the connection during the handshake. So does one that ends at that moment,
# but not several times in a row.
_MAX_CLOSED_HANDSHAKES = 3
_CONNECTION_LOSSES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)

_M = TypeVar("_M", bound=wire.Message)


class Caller(NamedTuple):
    """The sender of a request, identified by its authenticated public key.

    `is_connected()`: whether the connection of the request is open. The kernel closes those of a process that ends; one to a
    process that is stopped or cut off stays open until heartbeats close it.
    """

    public_key: str
    is_connected: Callable[[], bool] = lambda: True


class Reply(NamedTuple):
    """A message and its payload frames."""

    message: wire.Message
    payload: Sequence[Any] = ()


# A generator is a stream of answers.
Response: TypeAlias = wire.Message | Reply | AsyncGenerator[wire.Message | Reply, None]
Handler = Callable[[Caller, wire.Message, Sequence[Any]], Awaitable[Response]]


@dataclass(frozen=True)
class Policy(Rules):
    """What a server accepts, from whom, and how much. The default: every message of every caller that was admitted.

    `authorise(public_key, kind)` raises the error that answers a request that this key may not send. It is called before the
    message is decoded.
    """

    accepts: Mapping[str, type[wire.Message]] = field(default_factory=lambda: wire.MESSAGE_TYPES)  # keyed by tag
    authorise: Callable[[str, type[wire.Message]], None] = lambda public_key, kind: None
    limits: Callable[[str], Limits] = lambda public_key: Limits()
    sizes: wire.Sizes = wire.PEER_SIZES
    any_version = wire.ANY_VERSION_TAGS

    def check(self, public_key: str, tag: str) -> None:
        """See `Rules.check`."""
        if tag not in self.accepts:
            raise errors.UnknownMessage(tag=tag[:64])
        self.authorise(public_key, self.accepts[tag])

    def limits_of(self, public_key: str) -> Limits:
        """See `Rules.limits_of`."""
        return self.limits(public_key)


ACCEPT_ALL = Policy()


# Whether the caller of the request that the current task handles has cancelled it for good; set by `RequestServer`.
_CALLER_GAVE_UP: ContextVar[Callable[[], bool]] = ContextVar("_CALLER_GAVE_UP", default=lambda: False)


def caller_may_return() -> bool:
    """Whether somebody may ask for the rest of the answer to the current request; False if its caller has cancelled it."""
    return not _CALLER_GAVE_UP.get()()


class Request(NamedTuple):
    """A request in progress."""

    identity: bytes  # of the connection
    request_id: bytes
    caller: Caller
    kind: type[wire.Message]
    num_bytes: int


class RequestServer(ABC):
    """Handles each request in its own task. `refusals` counts refused and invalid messages.

    If the handler returns an async generator, the answer is a stream. The generator is closed, and its `finally` blocks run,
    when the caller cancels, stops reading, or is gone. Subclasses receive the requests and send the answers.
    """

    def __init__(self, handler: Handler, policy: Policy) -> None:
        self.refusals = curve.Refusals("messages", loop_time)
        self._handler = handler
        self._policy = policy
        self._tasks: dict[asyncio.Task[None], Request] = {}
        self._requests: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}  # keyed by connection and request id
        self._given_up: set[asyncio.Task[None]] = set()  # of requests that were cancelled for good

    @property
    def num_running(self) -> int:
        """Number of requests whose handler runs or whose answer is being sent."""
        return len(self._tasks)

    async def finish(self, timeout_seconds: float) -> None:
        """Wait until all running requests are answered."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_seconds)

    async def end_requests(self, public_key: str | None, error: errors.HearthError) -> None:
        """End all requests of a key, also its streams, with this error; None: those of all keys."""
        ending = [(task, each) for task, each in self._tasks.items() if public_key in (None, each.caller.public_key)]
        for task, request in ending:
            task.cancel()
            await self._send(request, wire.Failed.of(error), is_last=True)
        await cancel_all([task for task, _ in ending])

    def _begin(self, request: Request, body: zmq.Frame, payload: list[zmq.Frame], delay_seconds: float = 0.0) -> None:
        """Handle a request."""
        task = asyncio.create_task(self._run(request, body, payload, delay_seconds))
        self._tasks[task] = request
        self._requests[request.identity, request.request_id] = task
        task.add_done_callback(self._task_done)

    def _cancel(self, identity: bytes, request_id: bytes, final: bool) -> None:
        """Cancel a request, without an answer, if it is still in progress. `final`: as in `Cancel`."""
        if (task := self._requests.get((identity, request_id))) is not None:
            if final:
                self._given_up.add(task)
            task.cancel()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._given_up.discard(task)
        request = self._tasks.pop(task)
        key = (request.identity, request.request_id)
        if self._requests.get(key) is task:  # not a later request with the same id
            del self._requests[key]
        self._ended(request)

    async def _run(self, request: Request, body: zmq.Frame, payload: list[zmq.Frame], delay_seconds: float) -> None:
        caller, kind = request.caller, request.kind
        _CALLER_GAVE_UP.set(partial(self._given_up.__contains__, asyncio.current_task()))
        try:
            if delay_seconds:
                await asyncio.sleep(delay_seconds)
            message = wire.decode(body.buffer, kind, self._policy.sizes)
            response = await self._handler(caller, message, [frame.buffer for frame in payload])
            if isinstance(response, AsyncGenerator):
                async with aclosing(response) as replies:
                    async for reply in replies:
                        if not await self._send(request, reply, is_last=False, timeout_seconds=_STALLED_SECONDS):
                            log.info("the caller of a stream (%s) is gone", kind.__name__)
                            return
            else:
                await self._send(request, response, is_last=True, timeout_seconds=_STALLED_SECONDS)
        except errors.BadMessage as error:
            self.refusals.note(f"{error.code} for {curve.fingerprint(caller.public_key)}")
            await self._send(request, wire.Failed.of(error), is_last=True)
        except errors.HearthError as error:
            await self._send(request, wire.Failed.of(error), is_last=True)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of a library in Rust, which is no Exception
            log.exception("%s failed", kind.__name__)
            failure = errors.InternalError(where="the other end", reason=f"{type(error).__name__}: {error}")
            await self._send(request, wire.Failed.of(failure), is_last=True)

    @abstractmethod
    async def _send(
        self, request: Request, answer: wire.Message | Reply, is_last: bool, timeout_seconds: float = 0.0
    ) -> bool:
        """Send an answer. Returns False if the caller is gone, or reads nothing for `timeout_seconds`.

        Raises FrameTooLarge.
        """

    @abstractmethod
    def _ended(self, request: Request) -> None:
        """A request is no longer in progress: answered, cancelled, or failed."""


class RpcServer(RequestServer):
    """A ROUTER socket. A caller that is gone is noticed at the next answer; heartbeats close a silent connection after 8 s."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        bind_host: str,
        port: int,
        keypair: curve.KeyPair,
        domain: str,
        handler: Handler,
        port_setting: str = "--port",
        policy: Policy = ACCEPT_ALL,
    ) -> None:
        """Bind and listen. Port 0: any free port. Raises PortInUse, whose advice names `port_setting`."""
        super().__init__(handler, policy)
        self._num_turns = 0  # of the receive loop
        self._num_turns_seen = 0  # by `has_worked`
        self._intake = Intake(policy, self._requests)
        self._socket = loop_socket(context, zmq.ROUTER)
        curve.secure_server(self._socket, keypair, domain)
        curve.limit_connections(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise an error for an answer to a caller that is gone
        try:
            self._socket.bind(f"tcp://{bracketed(bind_host)}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            if error.errno == zmq.EADDRINUSE:
                raise errors.PortInUse(port=port, setting=port_setting) from None
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._loop_task = supervised(self._receive_loop(), f"the server on port {self.port}")

    async def finish(self, timeout_seconds: float) -> None:
        """Wait until all running requests are answered. `close` then leaves the answers time to be sent."""
        await super().finish(timeout_seconds)
        self._socket.linger = int(1000 * timeout_seconds)

    async def close(self) -> None:
        """Cancel all running requests, without answers, and close the socket."""
        await cancel_all([self._loop_task, *self._tasks])
        self._socket.close()

    def has_worked(self) -> bool:
        """Whether the receive loop has handled a message since the last call, or none waits for it."""
        seen, self._num_turns_seen = self._num_turns_seen, self._num_turns
        return seen != self._num_turns or not self._socket.has_waiting_message()

    async def _receive_loop(self) -> None:
        while True:
            frames = await self._socket.receive()
            try:
                self._num_turns += 1
                await self._receive(frames)
            except Exception:  # whatever a peer sends, the others are served
                self.refusals.count += 1
                log.exception("a message could not be handled")
            # While messages wait, `receive` does not: without this, a flood would stop all other tasks.
            await asyncio.sleep(0)

    async def _receive(self, frames: list[zmq.Frame]) -> None:
        """Handle one message: start its request, cancel one, or refuse it."""
        public_key = curve.user_id(frames[-1])
        match self._intake.receive(frames, public_key, loop_time()):
            case Begin(identity, request_id, tag, num_bytes, delay_seconds):
                caller = Caller(public_key, partial(self._is_connected, identity))
                request = Request(identity, request_id, caller, self._policy.accepts[tag], num_bytes)
                self._begin(request, frames[2], frames[3:], delay_seconds)
            case End(identity, request_id, is_final):
                self._cancel(identity, request_id, is_final)
            case Refuse(reason, error, ends_connection):
                if reason:
                    self.refusals.note(f"{reason}, of {curve.fingerprint(public_key)}")
                if ends_connection:
                    end_connection_of(frames[-1])
                elif error is not None:
                    await self._send_frames([*frames[:2], wire.encode(wire.Failed.of(error))], 0.0)

    async def _send(
        self, request: Request, answer: wire.Message | Reply, is_last: bool, timeout_seconds: float = 0.0
    ) -> bool:
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        frames = [request.identity, request.request_id, wire.encode(reply.message), *reply.payload]
        return await self._send_frames(frames, timeout_seconds)

    async def _send_frames(self, frames: Sequence[Any], timeout_seconds: float) -> bool:
        deadline = loop_time() + timeout_seconds
        while True:
            try:
                # Non-blocking: one full buffer must not delay the answers to other callers.
                self._socket.send_now(frames)
                return True
            except zmq.Again:
                if loop_time() >= deadline:
                    return False
                await asyncio.sleep(_STALLED_POLL_SECONDS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False

    def _is_connected(self, identity: bytes) -> bool:
        """Whether a connection is open: ZeroMQ tells by refusing a message, here one that no caller waits for."""
        try:
            self._socket.send_now([identity, _NO_REQUEST, wire.encode(wire.Done())])
        except zmq.ZMQError as error:
            return isinstance(error, zmq.Again)  # the buffer is full
        return True

    def _ended(self, request: Request) -> None:
        self._intake.leave(request.caller.public_key, request.num_bytes)


class _Answers:
    """Received answers to one request, for one reader. Unbounded: a stream is finite and small (the tokens of one answer)."""

    def __init__(self) -> None:
        self._received: deque[Reply | errors.HearthError] = deque()
        self._arrival = Signal()

    def put(self, answer: Reply | errors.HearthError) -> None:
        self._received.append(answer)
        self._arrival.set()

    async def get(self, timeout_seconds: float) -> Reply | errors.HearthError:
        """The next answer. Raises asyncio.TimeoutError."""
        if not self._received and not await self._arrival.wait(timeout_seconds):
            raise asyncio.TimeoutError
        answer = self._received.popleft()
        if not self._received:
            self._arrival.clear()
        return answer


class RpcClient:
    """A DEALER socket connected to one server. Any number of calls may be in flight; ZeroMQ reconnects automatically.

    Calls are not queued while there is no connection (`ZMQ_IMMEDIATE`): a call waits for the connection within its timeout,
    then fails with Unreachable.

    Without `access`, the server is our child process at a private ipc endpoint. Calls are then queued until it listens. The
    connection is not monitored: the owner calls `fail` when the process has ended.
    """

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, access: Access | None, name: str, quick: bool = False
    ) -> None:
        """`quick`: notice a silent server within 3 s; for callers that repeat their calls elsewhere."""
        self.endpoint = endpoint
        self.server_key = access.server_public if access else ""  # public key that the server must have
        self._name = name
        self._where = endpoint if access else name
        self._socket = loop_socket(context, zmq.DEALER)
        self._handshake_ended = asyncio.Event()  # set while connected, or once our key was refused
        self._refused = False
        self._num_closed_handshakes = 0  # in a row
        self.on_disconnect: Callable[[], None] = lambda: None  # called when the connection breaks
        self._pending: dict[bytes, _Answers] = {}  # by request
        self._last_id = 0
        self._failure: errors.HearthError | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._descriptor: int | None = None  # of the TCP socket, which ZeroMQ owns
        self._tasks = [asyncio.create_task(self._receive_loop())]
        if access is None:
            self._socket.linger = 0
            self._socket.reconnect_ivl = _CHILD_RECONNECT_MS
            self._handshake_ended.set()
        else:
            curve.secure_client(self._socket, access.own, access.server_public)
            if quick:
                curve.detect_silence(self._socket)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.reconnect_ivl = _RECONNECT_MS
            self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
            events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _CONNECTION_LOSSES
            monitor = self._monitor = cast(zmq.asyncio.Socket, self._socket.get_monitor_socket(events))
            self._tasks.append(asyncio.create_task(self._watch_connection(monitor)))
        self._socket.connect(endpoint)

    @property
    def pending(self) -> tuple[bytes, ...]:
        """The ids of requests without a final answer."""
        return tuple(self._pending)

    @property
    def is_connected(self) -> bool:
        """Whether a request would be sent at once."""
        return self._handshake_ended.is_set() and not self._refused

    @property
    def round_trip_seconds(self) -> float | None:
        """The shortest round trip of the connection in the last minutes, as the kernel has measured it; None if unknown.

        No program that is busy, here or at the other end, makes it longer.
        """
        return None if self._descriptor is None or not self.is_connected else shortest_round_trip(self._descriptor)

    async def close(self) -> None:
        """Close the connection; calls in flight, and those that wait for the connection, raise ConnectionLost."""
        await cancel_all(self._tasks)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close()
        self.fail(errors.ConnectionLost(endpoint=self.endpoint))

    def fail(self, error: errors.HearthError) -> None:
        """Make all current and future calls raise `error`, also those that wait for the connection."""
        self._failure = error
        self._fail_pending(error)
        self._handshake_ended.set()

    async def hello(self, welcome: type[_M], timeout_seconds: float) -> _M:
        """Send `Hello` and return the server's welcome. Raises ProtocolMismatch, WrongKey, Unreachable, DeadlineExceeded."""
        try:
            reply = await self.call(wire.Hello(name=self._name[:256]), timeout_seconds=timeout_seconds)
        except errors.ProtocolMismatch as error:  # by our decoder, or by the other end with ours and theirs swapped
            other = error.theirs if error.ours == PROTOCOL_VERSION else error.ours
            raise errors.ProtocolMismatch(peer=self.endpoint, ours=PROTOCOL_VERSION, theirs=other) from None
        theirs = getattr(reply.message, "protocol", None)
        if theirs is not None and theirs != PROTOCOL_VERSION:
            raise errors.ProtocolMismatch(peer=self.endpoint, ours=PROTOCOL_VERSION, theirs=theirs)
        return wire.expect_message(reply.message, welcome, self.endpoint)

    async def call(self, message: wire.Message, payload: Sequence[Any] = (), *, timeout_seconds: float) -> Reply:
        """Send a request and wait for its answer.

        Raises the server's error; Unreachable (the request was not sent), WrongKey, ConnectionLost, DeadlineExceeded.
        """
        deadline = loop_time() + timeout_seconds
        request_id, replies = await self._send(message, payload, timeout_seconds)
        try:
            reply = await replies.get(max(deadline - loop_time(), 0.001))
        except asyncio.TimeoutError:
            raise self._deadline_exceeded(message, timeout_seconds) from None
        finally:
            del self._pending[request_id]
        return _reply_or_raise(reply)

    async def stream(
        self,
        message: wire.Message,
        payload: Sequence[Any] = (),
        *,
        timeout_seconds: float,
        last: type[Any],
        next_timeout_seconds: float | None = None,
        total_seconds: float = math.inf,
        may_return: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[Reply, None]:
        """Send a request and yield its answers, up to the first of the type `last`.

        `timeout_seconds` bounds the wait for the connection and for each answer; `next_timeout_seconds`, if given, the waits
        for answers after the first; `total_seconds` bounds all of them together. Closing the generator early cancels the
        request on the server; use `contextlib.aclosing` to do so at once. `may_return`: whether somebody may ask for the rest
        then (see `Cancel.final`). Raises as `call` does.
        """
        deadline = loop_time() + total_seconds
        request_id, replies = await self._send(message, payload, timeout_seconds)
        ended = closed = False
        try:
            while not ended:
                try:
                    reply = await replies.get(max(min(timeout_seconds, deadline - loop_time()), 0.001))
                except asyncio.TimeoutError:
                    raise self._deadline_exceeded(message, min(timeout_seconds, total_seconds)) from None
                timeout_seconds = next_timeout_seconds or timeout_seconds
                ended = isinstance(reply, errors.HearthError) or isinstance(reply.message, (last, wire.Failed))
                yield _reply_or_raise(reply)
        except (GeneratorExit, asyncio.CancelledError):
            closed = True
            raise
        finally:
            del self._pending[request_id]
            if not ended:
                self._last_id += 1
                cancel = wire.Cancel(request=request_id, final=closed and not may_return())
                frames = [self._last_id.to_bytes(ID_BYTES, "little"), wire.encode(cancel)]
                with suppress(zmq.ZMQError):  # no connection: the server notices that by itself
                    self._socket.send_now(frames)

    async def _send(
        self, message: wire.Message, payload: Sequence[Any], timeout_seconds: float
    ) -> tuple[bytes, _Answers]:
        """Wait for the connection, send, and register the request id. Returns the id and its answers."""
        body = wire.encode(message)
        await self._wait_connected(timeout_seconds)
        if self._failure is not None:
            raise self._failure
        self._last_id += 1
        request_id = self._last_id.to_bytes(ID_BYTES, "little")
        self._pending[request_id] = _Answers()
        try:
            self._socket.send_now([request_id, body, *payload])
        except BaseException as error:
            del self._pending[request_id]
            if isinstance(error, zmq.Again):
                raise errors.Unreachable(endpoint=self.endpoint, seconds=timeout_seconds) from None
            raise
        return request_id, self._pending[request_id]

    def _deadline_exceeded(self, message: wire.Message, timeout_seconds: float) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(action=f"{type(message).__name__} at {self._where}", seconds=timeout_seconds)

    async def _wait_connected(self, timeout_seconds: float) -> None:
        if not self._handshake_ended.is_set():
            try:
                await with_timeout(timeout_seconds, self._handshake_ended.wait())
            except asyncio.TimeoutError:
                raise errors.Unreachable(endpoint=self.endpoint, seconds=timeout_seconds) from None
        if self._refused:
            raise errors.WrongKey(endpoint=self.endpoint)

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            message = parse_monitor_message(await monitor.recv_multipart())
            event, value = message["event"], message["value"]
            if event == zmq.EVENT_CONNECTED:
                self._descriptor = value
                continue
            connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # The value is an errno: EAGAIN if the server did not answer in time, which says nothing about keys.
                self._num_closed_handshakes += value in (errno.EPIPE, errno.ECONNRESET)
            elif connected:
                self._num_closed_handshakes = 0
            refused = (
                event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                or (event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _KEY_REFUSED)
                or self._num_closed_handshakes >= _MAX_CLOSED_HANDSHAKES
            )
            self._refused = not connected and (self._refused or refused)
            if connected or self._refused:
                self._handshake_ended.set()
            else:
                self._handshake_ended.clear()
            if not connected:
                self._fail_pending(errors.ConnectionLost(endpoint=self.endpoint))
                self.on_disconnect()

    def _fail_pending(self, error: errors.HearthError) -> None:
        for replies in self._pending.values():
            replies.put(error)

    async def _receive_loop(self) -> None:
        while True:
            frames = await self._socket.receive()
            replies = self._pending.get(frames[0].bytes) if len(frames) >= 2 else None
            if replies is None:
                continue  # the caller no longer waits
            try:
                replies.put(Reply(wire.decode(frames[1].buffer), [frame.buffer for frame in frames[2:]]))
            except errors.HearthError as error:
                replies.put(error)


def _reply_or_raise(reply: Reply | errors.HearthError) -> Reply:
    """Return the reply, or raise the error that it holds."""
    if isinstance(reply, errors.HearthError):
        raise reply
    if isinstance(reply.message, wire.Failed):
        raise reply.message.error()
    return reply
