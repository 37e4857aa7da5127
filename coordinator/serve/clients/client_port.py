"""The port for clients: a process of its own owns it, and this end handles the requests that it passes on.

The coordinator opens the listening socket and lends it to the process. When a process ends or hangs, another one is started:
meanwhile the kernel accepts connections, and clients repeat their requests. Requests of the process before are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import zmq
import zmq.asyncio

from coordinator.port import protocol
from coordinator.port.access import Access
from coordinator.port.protocol import PortStart, PortState
from coordinator.serve.clients.trust import CLIENT_MESSAGES, MESSAGE_RULES, Trust
from coordinator.serve.config import CoordinatorSettings
from hearth.errors import HearthError, NotServing
from hearth.platform.asyncio_tools import cancel_all, loop_time, supervised, with_timeout
from hearth.platform.child import describe_exit
from hearth.platform.curve import BACKLOG, fingerprint
from hearth.platform.network import listening_socket
from hearth.platform.socket_folder import SocketFolder
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Handler, Policy, Reply, Request, RequestServer, Response
from hearth.wire.zmq_sockets import loop_socket

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25  # interval of the checks below; a stall of our own event loop counts as one tick
# Without a sign of life, after which a process hangs: three of its signs. Clients wait for its successor.
_SILENT_TICKS = 6
_START_SECONDS = 30.0  # until its first sign of life: starting Python takes seconds from a Raspberry Pi's SD card
_FLUSH_SECONDS = 3.0  # for a process to send the last answers and to end
# Pause before a process is started again: none if it ran for longer than this, else one that grows.
_STABLE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_WINDOW = 4  # large answers of a stream that have not left the process: two to overlap, doubled
# Memory of the process in addition to the limits of apps and administrators: the interpreter, and what ZeroMQ has received of
# messages that are not complete yet.
_SPARE_BYTES = 256 << 20


async def refuse(caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
    """The handler while no role handles requests."""
    raise NotServing(state="the coordinator is starting")


class ClientPort(RequestServer):
    """Listens from the start; until `serving`, requests are answered with NotServing."""

    def __init__(self, settings: CoordinatorSettings, trust: Trust) -> None:
        """Raises PortInUse, BadSetting."""
        super().__init__(refuse, Policy(CLIENT_MESSAGES, trust.authorise, sizes=wire.CLIENT_SIZES))
        self._trust = trust
        # It does not block: the process's I/O thread must not wait for a connection that was closed meanwhile.
        self._listener = listening_socket(settings.bind_host, settings.port, BACKLOG, "HEARTH_COORDINATOR_BIND_HOST")
        self.port: int = self._listener.getsockname()[1]
        self._context = zmq.asyncio.Context()
        self._process: _PortProcess | None = None  # that runs now
        self._num_processes = 0  # that were started
        self._earlier = PortState(0, 0)  # counters of all processes that have ended
        self._started_at = loop_time()
        self._num_turns = 0  # of the receive loop
        self._num_turns_seen = 0  # by `has_worked`
        self._supervision = supervised(self._supervise(), "the supervision of the client port")

    @asynccontextmanager
    async def serving(self, handler: Handler) -> AsyncIterator[None]:
        """Have a handler answer the requests; at the end, those that are not answered fail with NotServing."""
        self._handler = handler
        try:
            yield
        finally:
            self._handler = refuse
            await self.end_requests(None, NotServing(state="the coordinator has stopped serving"))

    @property
    def process_id(self) -> int | None:
        """The id of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def counters(self) -> PortState:
        """What all processes have refused, with the messages that this end has."""
        now = self._process.state if self._process is not None else PortState(0, 0)
        requests, connections = map(sum, zip(self._earlier, now, strict=True))
        return PortState(requests + self.refusals.count, connections)

    def has_worked(self) -> bool:
        """Whether the receive loop has handled a message since the last call: a process sends some all the time."""
        seen, self._num_turns_seen = self._num_turns_seen, self._num_turns
        return seen != self._num_turns or loop_time() - self._started_at < _START_SECONDS

    def change_access(self) -> None:
        """Tell the process at once who may send what. Without this call, it learns of changes within a tick."""
        if self._process is not None:
            self._process.change_access(self._trust.access)

    async def close(self) -> None:
        """Cancel all running requests, let the process send the last answers, and close the port."""
        await cancel_all(self._tasks)
        await cancel_all([self._supervision])
        self._listener.close()
        self._context.destroy(linger=0)

    # ---- the process ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep a process running, until cancelled."""
        pause = 0.0
        while True:
            started_at = loop_time()
            try:
                cause = await self._run_process()
            except OSError as error:
                cause = f"could not be started: {error}"
            pause = min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            if loop_time() - started_at > _STABLE_SECONDS:
                pause = 0.0
            log.error("the process of the client port %s; it is started again", cause)
            await asyncio.sleep(pause)

    async def _run_process(self) -> str:
        """Run one process until it ends or hangs. Returns the cause, as a phrase. Raises OSError."""
        self._num_processes += 1
        process = _PortProcess(self._context, self._num_processes)
        tasks: list[asyncio.Future[Any]] = []
        try:
            await process.start(self._trust, self._listener.fileno())
            self._process = process
            running = (process.wait(), process.watch(self._trust), self._receive_loop(process))
            tasks = [asyncio.ensure_future(each) for each in running]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return str(next(iter(done)).result())
        except asyncio.CancelledError:  # by `close`
            await process.stop()
            raise
        finally:
            self._process = None
            self._earlier = PortState(*map(sum, zip(self._earlier, process.state, strict=True)))
            for task, request in self._tasks.items():
                if request.identity == process.name:
                    task.cancel()
            await cancel_all(tasks)
            await process.close()

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def _receive_loop(self, process: _PortProcess) -> None:
        while True:
            frames = await process.socket.receive()
            self._num_turns += 1
            try:
                await self._receive(process, frames)
            except Exception:  # whatever a client sends, the others are served
                self.refusals.count += 1
                log.exception("a message could not be handled")
            # While messages wait, `receive` does not: without this, a flood would stop all other tasks.
            await asyncio.sleep(0)

    async def _receive(self, process: _PortProcess, frames: list[zmq.Frame]) -> None:
        kind = frames[0].bytes
        if kind == protocol.STATE:
            process.hear(PortState.decode(frames[1].bytes))
            return
        number = frames[1].bytes
        if kind == protocol.LEFT:
            process.left(number)
        elif kind in (protocol.CANCEL, protocol.GIVE_UP):
            process.expected.discard(number)
            self._cancel(process.name, number, final=kind == protocol.GIVE_UP)
        else:
            await self._accept(process, number, Caller(frames[2].bytes.decode()), frames[3], frames[4:])

    async def _accept(
        self, process: _PortProcess, number: bytes, caller: Caller, body: zmq.Frame, payload: list[zmq.Frame]
    ) -> None:
        """Start a request. The key may have been revoked since the process passed it on."""
        process.expected.add(number)
        try:
            kind = wire.message_type(body.buffer, self._policy.accepts)
            self._policy.authorise(caller.public_key, kind)
        except HearthError as error:
            self.refusals.note(f"{error.code} for {fingerprint(caller.public_key)}")
            process.send([protocol.LAST_ANSWER, number, wire.encode(wire.Failed.of(error))])
            return
        self._begin(Request(process.name, number, caller, kind, 0), body, payload)

    async def _send(
        self, request: Request, answer: wire.Message | Reply, is_last: bool, timeout_seconds: float = 0.0
    ) -> bool:
        process, number = self._process, request.request_id
        if process is None or process.name != request.identity or number not in process.expected:
            return False
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        frames = [wire.encode(reply.message), *reply.payload]
        if is_last:
            process.send([protocol.LAST_ANSWER, number, *frames])
        elif sum(memoryview(frame).nbytes for frame in frames) < protocol.LARGE_ANSWER_BYTES:
            process.send([protocol.ANSWER, number, *frames])
        elif await process.wait_for_room(number, timeout_seconds):
            process.send([protocol.LARGE_ANSWER, number, *frames])
        else:
            return False
        return True

    def _ended(self, request: Request) -> None:
        process, number = self._process, request.request_id
        if process is not None and process.name == request.identity:
            process.windows.pop(number, None)
            if number in process.expected:
                process.send([protocol.END, number])


class _PortProcess:
    """One process that owns the port, and the private socket to it."""

    def __init__(self, context: zmq.asyncio.Context, number: int) -> None:
        """Bind the socket. Raises OSError."""
        self.name = number.to_bytes(8, "big")
        self.state = PortState(0, 0)
        self.expected: set[bytes] = set()  # numbers of the requests of which the process expects the last answer
        self.windows: dict[bytes, asyncio.Semaphore] = {}  # of streams with large answers, by number
        self._access: Access | None = None  # that the process was told
        self._heard = False  # of the process since the last tick
        self._process: asyncio.subprocess.Process | None = None
        self._folder = SocketFolder("hearth-coordinator-")
        self._endpoint = f"ipc://{self._folder.path / 'port'}"
        self.socket = loop_socket(context, zmq.DEALER)
        self.socket.sndhwm = self.socket.rcvhwm = 0  # what is under way is bounded by the process's limits
        self.socket.linger = 0
        try:
            self.socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            self._folder.remove()
            raise OSError(f"{self._endpoint}: {error.strerror}") from None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, trust: Trust, listener: int) -> None:
        """Start the process. Raises OSError."""
        access = self._access = trust.access
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator.port", stdin=asyncio.subprocess.PIPE, pass_fds=(listener,)
        )
        memory_bytes = access.app_bytes + access.admin_limits.total_bytes + _SPARE_BYTES
        keypair = trust.keypair
        start = PortStart(keypair.public, keypair.secret, listener, self._endpoint, memory_bytes, MESSAGE_RULES, access)
        assert process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended already
            process.stdin.write(protocol.encode(start))
            await process.stdin.drain()
        process.stdin.close()

    def send(self, frames: Sequence[Any]) -> bool:
        """Send a message; the socket queues without limit. False: no process is connected, and its clients repeat."""
        if frames[0] in (protocol.LAST_ANSWER, protocol.END):
            self.expected.discard(frames[1])
        try:
            self.socket.send_now(frames)
        except zmq.Again:
            return False
        return True

    def change_access(self, access: Access) -> None:
        """Send the rules, if they have changed. While the process starts, they wait for the next tick."""
        if access is not self._access and self.send([protocol.ACCESS, protocol.encode(access)]):
            self._access = access

    def hear(self, state: PortState) -> None:
        """Take note of a sign of life."""
        self.state = state
        self._heard = True

    def left(self, number: bytes) -> None:
        """A large answer of this stream has left."""
        if (window := self.windows.get(number)) is not None:
            window.release()

    async def wait_for_room(self, number: bytes, timeout_seconds: float) -> bool:
        """Wait until one more large answer of a stream may be sent. Returns False after the timeout."""
        window = self.windows.setdefault(number, asyncio.Semaphore(_WINDOW))
        try:
            await with_timeout(timeout_seconds, window.acquire())
        except asyncio.TimeoutError:
            return False
        return True

    async def wait(self) -> str:
        """Wait for the end of the process. Returns the cause, as a phrase."""
        assert self._process is not None
        return describe_exit(await self._process.wait())

    async def watch(self, trust: Trust) -> str:
        """Pass on changes of the rules. Returns a phrase once the process hangs."""
        silent_ticks, limit = 0, round(_START_SECONDS / _TICK_SECONDS)
        while silent_ticks <= limit:
            await asyncio.sleep(_TICK_SECONDS)
            self.change_access(trust.access)
            if self._heard:
                limit = _SILENT_TICKS
            silent_ticks = 0 if self._heard else silent_ticks + 1
            self._heard = False
        return f"gave no sign of life for {limit * _TICK_SECONDS:g} s"

    async def stop(self) -> None:
        """Have the process send the last answers and end, and wait for it."""
        if self._process is not None:
            self.send([protocol.STOP])
            with suppress(asyncio.TimeoutError):
                await with_timeout(_FLUSH_SECONDS, self._process.wait())

    async def close(self) -> None:
        """End the process, if it runs, and remove the socket."""
        self.socket.close()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            with suppress(asyncio.TimeoutError):
                await with_timeout(_FLUSH_SECONDS, self._process.wait())
        self._folder.remove()


@asynccontextmanager
async def client_port(settings: CoordinatorSettings, trust: Trust) -> AsyncIterator[ClientPort]:
    """An open port, closed at the end."""
    port = ClientPort(settings, trust)
    try:
        yield port
    finally:
        await port.close()
