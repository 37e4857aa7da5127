"""Starts and watches the worker process of the deployed plan; its death is an answer, never the daemon's end."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from hearth.errors import DeadlineExceeded, HearthError, WorkerDied
from hearth.messages import (
    AbortStep,
    ConnectPeers,
    Failed,
    Message,
    RunStep,
    StartWorker,
    WorkerBound,
    WorkerState,
    decode,
    encode,
)

log = logging.getLogger(__name__)

# Importing torch takes 20 s on a Raspberry Pi's SD card; reading a large shard comes on top.
LOAD_SECONDS = 300.0
_STOP_SECONDS = 2.0


class WorkerProcess:
    """One worker. After it has died, `failure` says why and every call raises WorkerDied."""

    def __init__(self, context: zmq.asyncio.Context, device: str) -> None:
        self.state: WorkerState = "none"
        self.epoch = 0
        self.failure: HearthError | None = None
        self._device = device
        self._context = context
        self._folder = tempfile.TemporaryDirectory(prefix="hearth-worker-")  # mode 0700: only we can reach the socket
        self._socket = context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._address = f"ipc://{Path(self._folder.name) / 'worker'}"
        self._socket.bind(self._address)
        self._pending: dict[bytes, asyncio.Future[tuple[Message, list[bytes]]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_id = 0
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, request: StartWorker) -> WorkerBound:
        """Start the process and load the shard. Raises WorkerDied, or what the worker raised."""
        self.epoch = request.load.plan.epoch
        self.state = "loading"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agent.worker.process", self._address, stdin=asyncio.subprocess.DEVNULL
        )
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._receive())]
        try:
            bound, _ = await self.call(request, (), LOAD_SECONDS)
        except HearthError as error:
            self._fail(error)
            raise
        assert isinstance(bound, WorkerBound)
        self.state = "bound"
        return bound

    async def connect(self, request: ConnectPeers) -> None:
        await self.call(request, (), 30.0)
        self.state = "ready"

    async def call(
        self, message: Message, payload: Sequence[Any], timeout_seconds: float
    ) -> tuple[Message, list[bytes]]:
        """Ask the worker. Raises its typed error, WorkerDied when it dies, DeadlineExceeded."""
        if self.failure is not None and (self._process is None or self._process.returncode is not None):
            raise self.failure
        self._last_id += 1
        request_id = self._last_id.to_bytes(8, "little")
        answer: asyncio.Future[tuple[Message, list[bytes]]] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = answer
        try:
            await self._socket.send_multipart([request_id, encode(message), *payload], copy=False)
            reply, frames = await asyncio.wait_for(answer, timeout_seconds)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                action=f"{type(message).__name__} on {self._device}", seconds=timeout_seconds
            ) from None
        finally:
            self._pending.pop(request_id, None)
        if isinstance(reply, Failed):
            raise reply.error()
        return reply, frames

    async def run(self, request: RunStep, payload: Sequence[Any]) -> tuple[Message, list[bytes]]:
        # The worker's own waits are bounded by the request; this bounds a worker that hangs in a GEMM.
        return await self.call(request, payload, 3 * request.timeout_seconds + 30.0)

    async def abort(self, request: AbortStep) -> None:
        """Make the running step fail now; the worker answers its RunStep with the reason."""
        if self.state == "ready":
            await self._socket.send_multipart([bytes(8), encode(request)])

    async def stop(self) -> None:
        """End the process and free what belongs to it."""
        self._stopping = True
        self.state = "none"
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_pending(WorkerDied(device=self._device, reason="it was stopped"))
        self._socket.close()
        self._folder.cleanup()

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if not self._stopping:
            self._fail(WorkerDied(device=self._device, reason=_cause_of_death(code)))

    async def _receive(self) -> None:
        while True:
            request_id, body, *frames = await self._socket.recv_multipart()
            answer = self._pending.get(request_id)
            if answer is not None and not answer.done():
                answer.set_result((decode(body), frames))

    def _fail(self, error: HearthError) -> None:
        log.warning("%s", error)
        self.failure = error
        self.state = "failed"
        self._fail_pending(error)

    def _fail_pending(self, error: HearthError) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)


def _cause_of_death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), often by the kernel because memory ran out"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


async def run_child(module: str, request_json: str, timeout_seconds: float, device: str) -> str:
    """Run a short-lived `python -m MODULE`, one JSON line in, one out. Raises WorkerDied or DeadlineExceeded."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    began = time.monotonic()
    try:
        output, _ = await asyncio.wait_for(process.communicate(request_json.encode() + b"\n"), timeout_seconds)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action=f"{module} on {device}", seconds=time.monotonic() - began) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise WorkerDied(device=device, reason=f"{module} {_cause_of_death(process.returncode or 1)}")
    return output.decode()
