"""Starts and supervises worker processes. If one dies, its callers get an error and the daemon continues."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import zmq.asyncio

from agent.daemon.worker_state import WorkerEvent, WorkerStateMachine
from hearth.errors import DeadlineExceeded, HearthError, WorkerDied
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.child import describe_exit, run_module
from hearth.protocol import WORKER_CONNECT_SECONDS, WORKER_LOAD_SECONDS, agent_run_seconds
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, RpcClient

log = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0  # timeout of `Abort`, which the control thread answers at once, while others compute
_STOP_SECONDS = 2.0  # from SIGTERM to SIGKILL; a worker has nothing to save
# Timeout between two tokens of a sequence: steps of other sequences run between them, and a long prompt takes many steps.
_TOKEN_SECONDS = 120.0


class WorkerProcess:
    """One worker process. After it has died, `failure` is the cause, and every call raises it."""

    def __init__(self, context: zmq.asyncio.Context, device: str) -> None:
        self.epoch = 0
        self.failure: HearthError | None = None
        self._device = device
        self._state_machine = WorkerStateMachine()
        self._folder = tempfile.TemporaryDirectory(prefix="hearth-worker-")  # mode 0700: only this user has access
        self._client = RpcClient(
            context, f"ipc://{Path(self._folder.name) / 'worker'}", None, f"the worker on {device}"
        )
        self._process: asyncio.subprocess.Process | None = None
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def state(self) -> wire.WorkerState:
        return self._state_machine.state

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of the process; 0 if the kernel does not report it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0
        match = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return int(match[1]) << 10 if match else 0

    async def start(self, request: wire.Start) -> wire.WorkerBound:
        """Start the process and load the shard or the segments. Raises WorkerDied, DeadlineExceeded, or the worker's error."""
        self.epoch = request.load.plan.epoch
        self._transition("start_requested")
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agent.worker.main", self._client.endpoint, level, stdin=asyncio.subprocess.DEVNULL
        )
        self._transition("spawned")
        self._watch_task = asyncio.create_task(self._watch(self._process))
        try:
            reply = await self._client.call(request, timeout_seconds=WORKER_LOAD_SECONDS)
            bound = wire.expect_message(reply.message, wire.WorkerBound, "a worker")
        except HearthError as error:
            self._fail(error)
            raise
        self._transition("loaded")
        return bound

    async def connect(self, request: wire.ConnectPeers) -> None:
        await self._client.call(request, timeout_seconds=WORKER_CONNECT_SECONDS)
        self._transition("connected")

    async def run(self, request: wire.Run, payload: Sequence[Any]) -> Reply:
        """Run one request. Raises the worker's error, WorkerDied if it dies, DeadlineExceeded."""
        timeout_seconds = agent_run_seconds(request.timeout_seconds)
        return await self._client.call(request, payload, timeout_seconds=timeout_seconds)

    def stream(self, request: wire.GenerateTokens, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        """Stream the answers up to GenerationEnded. Closing the generator early cancels the sequence. Raises as `run` does.

        The first token has the request's timeout, because earlier requests may have to finish before it.
        """
        return self._client.stream(
            request,
            payload,
            timeout_seconds=request.timeout_seconds,
            next_timeout_seconds=_TOKEN_SECONDS,
            last=wire.GenerationEnded,
        )

    async def abort(self, request: wire.Abort) -> None:
        """Abort one request, or all; the worker answers them with the reason. Raises `failure` if the worker has died."""
        await self._client.call(request, timeout_seconds=_ABORT_SECONDS)

    async def stop(self) -> None:
        """Stop the process and release its socket and folder."""
        self._transition("stopped")
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
        if self._watch_task is not None:
            await cancel_all([self._watch_task])
        self._client.fail(WorkerDied(device=self._device, reason="it was stopped"))
        await self._client.close()
        self._folder.cleanup()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self.state != "stopped":
            self._fail(WorkerDied(device=self._device, reason=describe_exit(code)))

    def _fail(self, error: HearthError) -> None:
        if self.state in ("failed", "stopped"):
            return  # the first failure is the cause of later ones
        log.warning("%s", error)
        self.failure = error
        self._transition("failed")
        self._client.fail(error)

    def _transition(self, event: WorkerEvent) -> None:
        self._state_machine = self._state_machine.after(event)


async def run_child(module: str, request: wire.Message, timeout_seconds: float, device: str) -> wire.Message:
    """Run `python -m MODULE` with one message as input, and return its one answer.

    Raises the child's error, WorkerDied, DeadlineExceeded.
    """
    try:
        ended = await run_module(module, wire.encode(request), timeout_seconds)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action=f"{module} on {device}", seconds=timeout_seconds) from None
    if ended.code != 0:
        raise WorkerDied(device=device, reason=f"{module} {ended.cause}")
    answer = wire.decode(ended.output)
    if isinstance(answer, wire.Failed):
        raise answer.error()
    return answer
