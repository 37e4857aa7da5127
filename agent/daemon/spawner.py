"""Starts worker processes: forked from a template that has imported the libraries if there is one, else from scratch."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, Protocol, TypeAlias, get_args

from hearth.platform.asyncio_tools import cancel_all, loop_time, with_timeout
from hearth.platform.child_main import adopt_orphans
from hearth.protocol import WORKER_LOAD_SECONDS
from hearth.wire.messages import Done, ForkWorker, WorkerForked, WorkerLibrary, decode, encode

log = logging.getLogger(__name__)

SpareMode: TypeAlias = Literal["auto", "on", "off"]

# Memory that must be free to start a template: it shares its memory (160 MB with torch, 70 MB with onnxruntime) with the worker
# that it forks, except for page tables and for the few pages that the worker writes to.
_ROOM_BYTES = 64 << 20
_FORK_SECONDS = 2.0  # a fork takes milliseconds; later than this, the template hangs, and a new process is quicker
_RETRY_SECONDS = 60.0  # between two starts of a template: one that ends again and again takes little processor time
# After the last worker has ended, or `prepare`, until the template ends: coordinators ask for it every 600 s.
_IDLE_SECONDS = 900.0
_IDLE_CHECK_SECONDS = 10.0  # interval of the checks for that
_MAX_MESSAGE_BYTES = 4096


class ChildProcess(Protocol):
    """A worker process; `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def send_signal(self, number: int, /) -> None: ...

    async def wait(self) -> int:
        """Wait for the end and return the exit status."""


class Spawner:
    """Starts workers. `has_room(num_bytes)` tells whether that much memory is free.

    In the mode `auto`, a template starts with the first worker that needs its library, which is forked from it as well, or
    before, when one is expected (`prepare`). It ends when no worker has been forked from it for a while. In the mode `on`, the
    one with torch is there from the start, and templates stay.
    """

    def __init__(self, mode: SpareMode, has_room: Callable[[int], bool]) -> None:
        self._templates: dict[WorkerLibrary, _Templates] = {
            library: _Templates(library, mode, has_room) for library in get_args(WorkerLibrary)
        }

    async def spawn(self, request: ForkWorker, library: WorkerLibrary) -> ChildProcess:
        """Start a worker, which needs `library`. If cancelled, no process is left. Raises OSError."""
        if (forked := await self._templates[library].fork(request)) is not None:
            return forked
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agent.worker.main", request.endpoint, request.model_dump_json(),
            stdin=asyncio.subprocess.DEVNULL, env=worker_environment(os.environ),
        )  # fmt: skip

    def prepare(self, library: WorkerLibrary) -> None:
        """Start the template if there is none, since a worker that needs the library may be wanted soon."""
        self._templates[library].prepare()

    async def keep_templates(self) -> None:
        """Start templates again that have ended, and end those that are idle, until cancelled."""
        while True:
            for templates in self._templates.values():
                await templates.keep()
            await asyncio.sleep(_IDLE_CHECK_SECONDS)

    async def close(self) -> None:
        """End the templates, and the workers that are left."""
        for templates in self._templates.values():
            await templates.close()
        adopt_orphans(False)


class _Templates:
    """The template with one library, and the workers that were forked from it and from those before it."""

    def __init__(self, library: WorkerLibrary, mode: SpareMode, has_room: Callable[[int], bool]) -> None:
        self._library = library
        self._mode = mode
        self._has_room = has_room
        self._template: _Template | None = None
        self._workers: list[ForkedProcess] = []
        self._next_start = 0.0  # the template does not start before; event loop's clock
        self._wanted = mode == "on" and library == "torch"
        self._used_at = 0.0  # event loop's clock: when the template last had a worker, or was asked for

    async def fork(self, request: ForkWorker) -> ForkedProcess | None:
        """Fork a worker; None if there is no template, or if it does not fork."""
        self._wanted = True
        if (template := self._running()) is None:
            return None
        try:
            forked = await template.fork(request)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the template of workers did not fork (%r): starting a new process", error)
            await self._end(template)
            return None
        self._workers = [*self._running_workers(), forked]
        return forked

    def prepare(self) -> None:
        """Start the template if there is none."""
        self._wanted, self._used_at = True, loop_time()
        self._running()

    async def keep(self) -> None:
        """Start the template if it is wanted and has ended, and end it if it has been idle for long."""
        template = self._running() if self._wanted else None
        now = loop_time()
        if self._mode == "on" or template is None or self._running_workers():
            self._used_at = now
        elif now - self._used_at >= _IDLE_SECONDS:
            self._wanted = False
            await self._end(template)

    async def close(self) -> None:
        """End the template, and the workers that are left."""
        if self._template is not None:
            await self._template.close()
        workers = self._running_workers()
        for worker in workers:
            worker.kill()
        with suppress(asyncio.TimeoutError):
            await with_timeout(_FORK_SECONDS, asyncio.gather(*(worker.wait() for worker in workers)))

    def _running_workers(self) -> list[ForkedProcess]:
        return [worker for worker in self._workers if worker.returncode is None]

    def _running(self) -> _Template | None:
        """The template, which may still be starting, or None if there is none and none can be started now."""
        if self._template is not None and self._template.ended.is_set():
            self._template = None
        now = loop_time()
        can_fork = self._mode != "off" and hasattr(os, "pidfd_open")  # Linux 5.3 or later
        if self._template is None and can_fork and now >= self._next_start and self._has_room(_ROOM_BYTES):
            self._next_start = now + _RETRY_SECONDS
            self._template = _Template(self._library)
        return self._template

    async def _end(self, template: _Template) -> None:
        if self._template is template:
            self._template = None
        await template.close()


class _Template:
    """The daemon's end of one `agent.worker.fork_server` process, which starts at once."""

    def __init__(self, library: WorkerLibrary) -> None:
        self.ended = asyncio.Event()
        self._library = library
        self._channel: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()  # it can fork, or it has ended
        self._lock = asyncio.Lock()  # one fork at a time: answers have the order of requests
        self._forked: asyncio.Future[ForkedProcess] | None = None
        self._starting = asyncio.create_task(self._start())

    async def fork(self, request: ForkWorker) -> ForkedProcess:
        """Fork a worker, once the template has started. Raises OSError, asyncio.TimeoutError."""
        async with self._lock:
            await with_timeout(WORKER_LOAD_SECONDS, self._ready.wait())
            if self._channel is None or self.ended.is_set():
                raise OSError("the template has ended")
            forked = self._forked = asyncio.get_running_loop().create_future()
            self._channel.send(encode(request))
            try:
                return await with_timeout(_FORK_SECONDS, forked)
            except BaseException:
                if forked.done() and not forked.cancelled() and forked.exception() is None:
                    forked.result().kill()  # the caller was cancelled at this very moment
                raise
            finally:
                self._forked = None

    async def close(self) -> None:
        """End the process; its workers run on."""
        await cancel_all([self._starting])
        self._has_ended()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            with suppress(asyncio.TimeoutError):
                await with_timeout(_FORK_SECONDS, self._process.wait())

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel = ours
        # numpy's BLAS starts no threads, which a fork would lose. Workers do not compute with it.
        environment = worker_environment(os.environ) | {"OPENBLAS_NUM_THREADS": "1"}
        adopt_orphans(True)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agent.worker.fork_server", str(theirs.fileno()), log_level(), self._library,
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=environment,
            )  # fmt: skip
            asyncio.get_running_loop().add_reader(ours, self._receive)
        except OSError as error:
            log.warning("the template of workers did not start: %s", error)
            self._has_ended()
        finally:
            theirs.close()

    def _has_ended(self) -> None:
        """Fail the fork that is waited for, and all later ones."""
        self.ended.set()
        self._ready.set()
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._forked is not None and not self._forked.done():
            self._forked.set_exception(OSError("the template has ended"))

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            log.warning("the template of workers has ended")
            self._has_ended()
            return
        match decode(data):
            case Done():
                self._ready.set()
            case WorkerForked(pid=pid):
                worker = ForkedProcess(pid)
                if self._forked is not None and not self._forked.done():
                    self._forked.set_result(worker)
                else:
                    worker.kill()  # nobody waits for it any more


class ForkedProcess:
    """A worker that a template has forked, and this process has adopted."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._process_ended)

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def _process_ended(self) -> None:
        """The kernel reports the end: reap the process."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._code.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    def send_signal(self, number: int, /) -> None:
        if not self._code.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def log_level() -> str:
    """The level of this process's log, for its children."""
    return str(logging.getLevelName(logging.getLogger().getEffectiveLevel()))


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: without the daemon's settings, in particular where the home key is."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("HEARTH_") and name not in ("CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "WATCHDOG_USEC")
    }
