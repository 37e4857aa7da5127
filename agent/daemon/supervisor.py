"""Starts and watches the worker process of the deployed plan; its death is an answer, never the daemon's end."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import zmq
import zmq.asyncio

from hearth.errors import DeadlineExceeded, HearthError, WorkerDied
from hearth.platform.asyncio_tools import within
from hearth.platform.child import cause_of_death, run_module
from hearth.wire.messages import (
    Abort,
    Cancel,
    ConnectPeers,
    Failed,
    GenerateTokens,
    GenerationEnded,
    Message,
    Run,
    SegmentParts,
    Start,
    WorkerBound,
    WorkerState,
    decode,
    encode,
)
from hearth.wire.rpc import Reply

log = logging.getLogger(__name__)

# Importing torch takes 20 s on a Raspberry Pi's SD card; reading a large shard comes on top.
LOAD_SECONDS = 300.0
_STOP_SECONDS = 2.0
# Between two tokens of a generation: steps of others lie between them, and a long prompt is one of many steps.
_TOKEN_SECONDS = 120.0

_Answer: TypeAlias = "tuple[Message, list[bytes]] | HearthError"


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
        self._pending: dict[bytes, asyncio.Queue[_Answer]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_id = 0
        self._stopping = False

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

    async def start(self, request: Start) -> WorkerBound:
        """Start the process and load the shard or the segments. Raises WorkerDied, or what the worker raised."""
        self.epoch = request.load.plan.epoch
        self.state = "loading"
        module = (
            "agent.worker.graph.process"
            if isinstance(request.load.parts, SegmentParts)
            else "agent.worker.transformer.process"
        )
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, self._address, level, stdin=asyncio.subprocess.DEVNULL
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
        request_id, answers = self._ask(message, payload)
        try:
            return _raised(await within(timeout_seconds, answers.get()))
        except asyncio.TimeoutError:
            raise self._too_late(message, timeout_seconds) from None
        finally:
            del self._pending[request_id]

    async def run(self, request: Run, payload: Sequence[Any]) -> tuple[Message, list[bytes]]:
        # The worker's own waits are bounded by the request; this bounds a worker that hangs in a GEMM.
        return await self.call(request, payload, 3 * request.timeout_seconds + 30.0)

    async def stream(self, request: GenerateTokens, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        """Everything that the worker answers, up to GenerationEnded. Raises as `call` does.

        Closed before its end, it has the worker forget the sequence. The first token may take as long as the requests
        before it do: there, the patience of whoever asks counts.
        """
        request_id, answers = self._ask(request, payload)
        timeout_seconds: float | None = None
        ended = False
        try:
            while not ended:
                try:
                    answer = await within(timeout_seconds, answers.get())
                except asyncio.TimeoutError:
                    raise self._too_late(request, _TOKEN_SECONDS) from None
                ended = isinstance(answer, HearthError) or isinstance(answer[0], GenerationEnded | Failed)
                timeout_seconds = _TOKEN_SECONDS
                yield Reply(*_raised(answer))
        finally:
            del self._pending[request_id]
            if not ended:
                self._tell(Cancel(request=request_id))

    async def abort(self, request: Abort) -> None:
        """Make what runs fail now; the worker answers it with the reason. Raises what the worker died of."""
        if self.failure is not None:
            raise self.failure
        self._tell(request)

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

    def _ask(self, message: Message, payload: Sequence[Any]) -> tuple[bytes, asyncio.Queue[_Answer]]:
        """Send a request; its answers come into the queue, and so does what ends the worker. Raises WorkerDied."""
        if self.failure is not None and (self._process is None or self._process.returncode is not None):
            raise self.failure
        self._last_id += 1
        request_id = self._last_id.to_bytes(8, "little")
        self._send([request_id, encode(message), *payload])
        self._pending[request_id] = asyncio.Queue()
        return request_id, self._pending[request_id]

    def _tell(self, message: Message) -> None:
        """Send what is not answered, to a worker that runs."""
        if self.state == "ready":
            self._send([bytes(8), encode(message)])

    def _send(self, frames: Sequence[Any]) -> None:
        """Not waited for: that a worker has not connected yet, or died first, is seen in the wait for its answer."""
        sending = asyncio.ensure_future(self._socket.send_multipart(frames, copy=False))
        sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())

    def _too_late(self, message: Message, timeout_seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(action=f"{type(message).__name__} on {self._device}", seconds=timeout_seconds)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if not self._stopping:
            self._fail(WorkerDied(device=self._device, reason=cause_of_death(code)))

    async def _receive(self) -> None:
        while True:
            request_id, body, *frames = await self._socket.recv_multipart()
            answers = self._pending.get(request_id)
            if answers is None:
                continue  # its caller has given up
            try:
                answers.put_nowait((decode(body), frames))
            except HearthError as error:
                answers.put_nowait(error)

    def _fail(self, error: HearthError) -> None:
        log.warning("%s", error)
        self.failure = error
        self.state = "failed"
        self._fail_pending(error)

    def _fail_pending(self, error: HearthError) -> None:
        for answers in self._pending.values():
            answers.put_nowait(error)


def _raised(answer: _Answer) -> tuple[Message, list[bytes]]:
    """The answer, unless it is an error, which is raised."""
    if isinstance(answer, HearthError):
        raise answer
    if isinstance(answer[0], Failed):
        raise answer[0].error()
    return answer


async def run_child(module: str, request: Message, timeout_seconds: float, device: str) -> Message:
    """Run a short-lived `python -m MODULE`: one message in, one out. Raises what it raised, WorkerDied, DeadlineExceeded."""
    try:
        ended = await run_module(module, encode(request), timeout_seconds)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(action=f"{module} on {device}", seconds=timeout_seconds) from None
    if ended.code != 0:
        raise WorkerDied(device=device, reason=f"{module} {ended.cause}")
    return _raised((decode(ended.output), []))[0]
