"""Starts and watches worker processes; the death of one is an answer, never the daemon's end."""

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

from agent.daemon.worker_state import WorkerEvent, WorkerLife
from hearth.errors import DeadlineExceeded, HearthError, WorkerDied
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.child import cause_of_death, run_module
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, RpcClient

log = logging.getLogger(__name__)

# Importing torch takes 20 s on a Raspberry Pi's SD card; reading a large shard comes on top.
LOAD_SECONDS = 300.0
_CONNECT_SECONDS = 30.0
_ABORT_SECONDS = 5.0
_STOP_SECONDS = 2.0
# Between two tokens of a generation: steps of others lie between them, and a long prompt is one of many steps.
_TOKEN_SECONDS = 120.0


class WorkerProcess:
    """One worker. After it has died, `failure` says why and every call raises it."""

    def __init__(self, context: zmq.asyncio.Context, device: str) -> None:
        self.epoch = 0
        self.failure: HearthError | None = None
        self._device = device
        self._life = WorkerLife()
        self._folder = tempfile.TemporaryDirectory(prefix="hearth-worker-")  # mode 0700: only we can reach the socket
        self._client = RpcClient(
            context, f"ipc://{Path(self._folder.name) / 'worker'}", None, f"the worker on {device}"
        )
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def state(self) -> wire.WorkerState:
        return self._life.state

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process had resident so far; 0 where the kernel does not say."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return int(found[1]) << 10 if found else 0

    async def start(self, request: wire.Start) -> wire.WorkerBound:
        """Start the process and load the shard or the segments. Raises WorkerDied, or what the worker raised."""
        self.epoch = request.load.plan.epoch
        self._move("start_requested")
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agent.worker.main", self._client.endpoint, level, stdin=asyncio.subprocess.DEVNULL
        )
        self._move("spawned")
        self._watching = asyncio.create_task(self._watch(self._process))
        try:
            reply = await self._client.call(request, timeout_seconds=LOAD_SECONDS)
            bound = wire.expected(reply.message, wire.WorkerBound, "a worker")
        except HearthError as error:
            self._fail(error)
            raise
        self._move("loaded")
        return bound

    async def connect(self, request: wire.ConnectPeers) -> None:
        await self._client.call(request, timeout_seconds=_CONNECT_SECONDS)
        self._move("connected")

    async def run(self, request: wire.Run, payload: Sequence[Any]) -> Reply:
        """Raises the worker's error, WorkerDied when it dies, DeadlineExceeded."""
        # The worker's own waits are bounded by the request; this bounds a worker that hangs in a GEMM.
        return await self._client.call(request, payload, timeout_seconds=3 * request.timeout_seconds + 30.0)

    def stream(self, request: wire.GenerateTokens, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        """All answers up to GenerationEnded. Raises as `run` does. Closed early, it has the worker forget the sequence.

        The first token may take as long as the requests before it do.
        """
        return self._client.stream(
            request,
            payload,
            timeout_seconds=request.timeout_seconds,
            next_seconds=_TOKEN_SECONDS,
            last=wire.GenerationEnded,
        )

    async def abort(self, request: wire.Abort) -> None:
        """Make a request fail now, or all; the worker answers them with the reason. Raises what the worker died of."""
        await self._client.call(request, timeout_seconds=_ABORT_SECONDS)

    async def stop(self) -> None:
        """End the process and free what belongs to it."""
        self._move("stopped")
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
        if self._watching is not None:
            await cancel_all([self._watching])
        self._client.fail(WorkerDied(device=self._device, reason="it was stopped"))
        await self._client.close()
        self._folder.cleanup()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self.state != "stopped":
            self._fail(WorkerDied(device=self._device, reason=cause_of_death(code)))

    def _fail(self, error: HearthError) -> None:
        if self.state in ("failed", "stopped"):
            return  # the first failure is the cause
        log.warning("%s", error)
        self.failure = error
        self._move("failed")
        self._client.fail(error)

    def _move(self, event: WorkerEvent) -> None:
        self._life = self._life.after(event)


async def run_child(module: str, request: wire.Message, timeout_seconds: float, device: str) -> wire.Message:
    """Run a short-lived `python -m MODULE`: one message in, one out. Raises what it raised, WorkerDied, DeadlineExceeded."""
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
