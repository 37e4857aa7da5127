"""Starts and supervises worker processes. If one dies or hangs, its callers get an error and the daemon continues.

The life cycle of a worker is a state machine: `TRANSITIONS` lists its moves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import zmq.asyncio

from agent.daemon.liveness import MAX_THREADS, TICK_SECONDS, Liveness, ProcessSample, parse_process
from agent.daemon.spawner import ChildProcess, Spawner, log_level
from agent.daemon.store import Scratch
from hearth.errors import DeadlineExceeded, DiskHung, HearthError, StepFailed, WorkerDied
from hearth.platform.asyncio_tools import cancel_all, loop_time, with_timeout
from hearth.platform.child import describe_exit, run_module
from hearth.platform.disk import on_disk
from hearth.platform.network import numeric_address
from hearth.platform.socket_folder import SocketFolder
from hearth.protocol import WORKER_CONNECT_SECONDS, WORKER_LOAD_SECONDS, WORKER_SIGN_SECONDS, agent_run_seconds
from hearth.wire import messages as wire
from hearth.wire.messages import WorkerState
from hearth.wire.rpc import Reply, RpcClient, caller_may_return

log = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0  # timeout of `Abort`, which the control thread answers at once, while others compute
_STOP_SECONDS = 2.0  # from SIGTERM to SIGKILL; a worker has nothing to save
# From SIGKILL until a worker is abandoned: freeing gigabytes takes under a second, and a process that is stuck in the kernel,
# on a dying disk for example, may stay for ever.
_KILL_SECONDS = 5.0
_SCRATCH_SECONDS = 5.0  # to make or remove a worker's folder, which most workers do without: a disk may hang
# Timeout between two tokens of a sequence: steps of other sequences run between them, and a long prompt takes many steps.
_TOKEN_SECONDS = 120.0
WorkerEvent: TypeAlias = Literal[
    "start_requested", "spawned", "loaded", "connected", "reload_requested", "failed", "stopped"
]

_ALIVE: tuple[WorkerState, ...] = ("starting", "loading", "bound", "ready")
TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    ("none", "start_requested"): "starting",
    ("starting", "spawned"): "loading",
    ("loading", "loaded"): "bound",
    ("bound", "connected"): "ready",
    ("loading", "reload_requested"): "loading",  # after that load was given up
    ("bound", "reload_requested"): "loading",
    ("ready", "reload_requested"): "loading",
    **{(state, "failed"): "failed" for state in _ALIVE},
    **{(state, "stopped"): "stopped" for state in ("none", *_ALIVE, "failed", "stopped")},
}


class IllegalWorkerTransition(Exception):
    """A programming error: an event that is not possible in the current state."""


@dataclass(frozen=True)
class WorkerStateMachine:
    """The current state of a worker process, and how it got there."""

    state: WorkerState = "none"
    history: tuple[str, ...] = ()  # all transitions so far

    def after(self, event: WorkerEvent) -> WorkerStateMachine:
        """Apply an event. Raises IllegalWorkerTransition, with the history."""
        next_state = TRANSITIONS.get((self.state, event))
        if next_state is None:
            raise IllegalWorkerTransition(
                f"a worker that is {self.state} cannot be {event}; so far: {', '.join(self.history)}"
            )
        return WorkerStateMachine(next_state, (*self.history, f"{self.state} -> {next_state} ({event})"))


class WorkerProcess:
    """One worker process. After it has died, `failure` is the cause, and every call raises it."""

    def __init__(
        self, context: zmq.asyncio.Context, device: str, spawner: Spawner, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare a process, without starting it. Raises WorkerDied if there is no room for its socket.

        `on_change` is called when the worker's state changes, and when it begins or ceases to wait for a late rank.
        """
        self.epoch = 0
        self.failure: HearthError | None = None
        self.abandoned = False  # the process did not end when it was killed
        self._device = device
        self._spawner = spawner
        self._on_change = on_change
        self._state_machine = WorkerStateMachine()
        try:
            self._folder = SocketFolder("hearth-agent-")
        except OSError as error:  # full or read-only disks
            raise WorkerDied(device=device, reason=f"it could not be started: {error}") from None
        self._client = RpcClient(context, f"ipc://{self._folder.path / 'worker'}", None, f"the worker on {device}")
        self._process: ChildProcess | None = None
        self._spawning: asyncio.Future[ChildProcess] | None = None
        self._scratch: Scratch | None = None
        self._loaded: wire.Start | None = None  # the newest request
        self._load_call: asyncio.Future[wire.WorkerBound] | None = None  # the newest one to the process
        self._gave_up_load = False  # whether that request was given up, and none followed yet
        self._liveness = Liveness()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> wire.WorkerState:
        return self._state_machine.state

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def status(self, deployment: str) -> wire.WorkerStatus:
        """The worker's state, for a heartbeat."""
        progress = self._liveness.progress
        return wire.WorkerStatus(
            deployment=deployment,
            state=self.state,
            epoch=self.epoch,
            failure=_failure_reason(self.failure) if self.failure else "",
            peak_bytes=self.peak_bytes,
            busy_seconds=self.busy_seconds,
            step=progress.step,
            step_seconds=progress.step_seconds,
            silent_seconds=self._liveness.silent_seconds,
            late_rank=progress.late_rank,
            sent_bytes=self._sent_bytes(),
        )

    def _sent_bytes(self) -> dict[str, int]:
        """What the worker has sent to those of other devices, by device id."""
        if self.state != "ready" or self._loaded is None:
            return {}
        sent = self._liveness.progress.sent_bytes
        own = self._loaded.load.rank
        devices = self._loaded.load.plan.devices
        sent_to = zip(devices, sent, strict=False)
        return {device.device_id: count for rank, (device, count) in enumerate(sent_to) if rank != own}

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of the process; 0 if the kernel does not report it."""
        return self._memory_bytes("VmHWM")

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process; 0 if the kernel does not report it."""
        return self._memory_bytes("VmRSS")

    def _memory_bytes(self, field: str) -> int:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0
        match = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
        return int(match[1]) << 10 if match else 0

    @property
    def busy_seconds(self) -> float:
        """Processor time of the process; 0 if the kernel does not report it."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0

    async def start(self, request: wire.Start) -> wire.WorkerBound:
        """Start the process and load the shard or the segments.

        Raises WorkerDied, DeadlineExceeded, the worker's error, or StepFailed if the load was given up.
        """
        self._loaded, self.epoch = request, request.load.plan.epoch
        self._transition("start_requested")
        spawning = self._spawning = asyncio.ensure_future(self._spawn(request))
        await asyncio.wait({spawning})  # if the caller is cancelled meanwhile, `stop` ends the process
        if spawning.cancelled() or self.state == "stopped":
            raise WorkerDied(device=self._device, reason="it was stopped")
        try:
            process = self._process = spawning.result()
        except OSError as error:
            failure = WorkerDied(device=self._device, reason=f"it could not be started: {error}")
            self._fail(failure)
            raise failure from None
        self._transition("spawned")
        self._tasks = [
            asyncio.create_task(each) for each in (self._watch_exit(process), self._listen(), self._watch_life(process))
        ]
        try:
            bound = await self._load(request, WORKER_LOAD_SECONDS)
        except HearthError as error:
            if not self._gave_up_load:
                self._fail(error)
            raise
        self._transition("loaded")
        return bound

    async def _spawn(self, request: wire.Start) -> ChildProcess:
        """Start the process, with a folder to write in. Raises OSError."""
        store = Path(request.store_path)
        try:
            self._scratch = await on_disk(store, _SCRATCH_SECONDS, Scratch, store)
        except (OSError, DiskHung) as error:  # most workers write nothing
            log.warning("the worker gets no folder in %s: %s", store, error)
        worker = wire.ForkWorker(
            endpoint=self._client.endpoint,
            log_level=log_level(),
            store=request.store_path,
            scratch=self._scratch.name if self._scratch is not None else str(self._folder.path),
            bind_ports=request.ports,
            connect_ports=request.load.data_ports,
            compute_device=request.compute_device,
        )
        library: wire.WorkerLibrary = "torch" if isinstance(request.load.parts, wire.ShardParts) else "onnxruntime"
        return await self._spawner.spawn(worker, library)

    async def _remove_scratch(self) -> None:
        if self._scratch is not None:
            with suppress(OSError, DiskHung):  # the agent's next start removes it
                await on_disk(Path(self._scratch.name), _SCRATCH_SECONDS, self._scratch.cleanup)

    def can_reload(self, request: wire.Start) -> bool:
        """Whether `reload` is possible: the process loads nothing, and the model and the settings are the same."""
        is_free = self.state in ("bound", "ready") or (self.state == "loading" and self._gave_up_load)
        return is_free and self._loaded is not None and _fits(self._loaded, request)

    def give_up_load(self, request: wire.Start) -> bool:
        """Make the load that runs fail, if `reload` is then possible with this request; returns whether it is."""
        if self.state != "loading" or self._loaded is None or not _fits(self._loaded, request):
            return False
        self._gave_up_load = True
        if self._load_call is not None:
            self._load_call.cancel()
        return True

    def added_chunks(self, request: wire.Start) -> list[str]:
        """The chunks that `reload` reads and that this process has not loaded, or not in this form."""
        assert self._loaded is not None
        before, after = self._loaded.load.parts, request.load.parts
        if isinstance(before, wire.SegmentParts) and isinstance(after, wire.SegmentParts):
            added = tuple(files for files in after.files if files not in before.files)
            return list(after.model_copy(update={"files": added}).hashes)
        return sorted(set(after.hashes) - set(before.hashes))

    async def reload(self, request: wire.Start, seconds: float) -> wire.WorkerBound:
        """Have the process end its plan and load another one, for which it keeps its socket and what it can of the weights.

        Raises as `start` does; the process is then of no use. One that takes longer than `seconds` logs where its threads are.
        """
        self._loaded, self.epoch, self._gave_up_load = request, request.load.plan.epoch, False
        self._transition("reload_requested")
        try:
            bound = await self._load(request, seconds)
        except DeadlineExceeded:
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(signal.SIGUSR1)
            raise
        self._transition("loaded")
        return bound

    async def _load(self, request: wire.Start, seconds: float) -> wire.WorkerBound:
        """Have the process load, until that is given up: then the process gets a message, and StepFailed is raised."""
        if self._scratch is not None:
            request = request.model_copy(update={"scratch_path": self._scratch.name})

        async def ask() -> wire.WorkerBound:
            stream = self._client.stream(request, timeout_seconds=seconds, last=wire.WorkerBound)
            async with aclosing(stream) as replies:
                reply = await anext(replies)
            return wire.expect_message(reply.message, wire.WorkerBound, "a worker")

        self._load_call = asyncio.ensure_future(ask())
        try:
            return await self._load_call
        except asyncio.CancelledError:
            if not self._gave_up_load:
                raise
            reason = f"the plan of epoch {request.load.plan.epoch} has been replaced while it was loaded"
            raise StepFailed(device=self._device, reason=reason) from None

    async def connect(self, request: wire.ConnectPeers) -> None:
        hosts = await asyncio.gather(*(numeric_address(peer.host) for peer in request.peers))
        peers = [peer.model_copy(update={"host": host}) for peer, host in zip(request.peers, hosts, strict=True)]
        request = request.model_copy(update={"peers": tuple(peers)})  # the worker cannot ask for names' addresses
        await self._client.call(request, timeout_seconds=WORKER_CONNECT_SECONDS)
        if self.epoch != request.epoch:
            raise StepFailed(device=self._device, reason=f"the plan of epoch {request.epoch} has been replaced")
        self._liveness = self._liveness.after_sign(wire.WorkerProgress())  # the last one may be of the plan before
        self._transition("connected")

    async def run(self, request: wire.Run, payload: Sequence[Any]) -> Reply:
        """Run one request. Raises the worker's error, WorkerDied if it dies, DeadlineExceeded."""
        timeout_seconds = agent_run_seconds(request.timeout_seconds)
        return await self._client.call(request, payload, timeout_seconds=timeout_seconds)

    def stream(self, request: wire.GenerateTokens, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        """Stream the answers up to GenerationEnded. Closing the generator early cancels the sequence. Raises as `run` does.

        Its KV cache is kept for a while, unless the coordinator has cancelled it for good.

        The first token has the request's timeout, because earlier requests may have to finish before it.
        """
        return self._client.stream(
            request,
            payload,
            timeout_seconds=request.timeout_seconds,
            next_timeout_seconds=_TOKEN_SECONDS,
            last=wire.GenerationEnded,
            may_return=caller_may_return,
        )

    async def abort(self, request: wire.Abort) -> None:
        """Abort one request, or all; the worker answers them with the reason. Raises `failure` if the worker has died."""
        await self._client.call(request, timeout_seconds=_ABORT_SECONDS)

    async def stop(self) -> None:
        """Stop the process and release its socket and folder."""
        has_failed = self.state == "failed"
        self._transition("stopped")
        self._client.fail(WorkerDied(device=self._device, reason="it was stopped"))
        if self._spawning is not None:
            await cancel_all([self._spawning])  # no effect if the process has been started
            if not self._spawning.cancelled() and self._spawning.exception() is None:
                await self._end(self._spawning.result(), kill_at_once=has_failed)
        await cancel_all(self._tasks)
        await self._remove_scratch()
        await self._client.close()
        self._folder.remove()

    async def _end(self, process: ChildProcess, kill_at_once: bool) -> None:
        """End the process. One that does not end is abandoned: it keeps its memory and its data port."""
        if process.returncode is None and not kill_at_once:
            process.terminate()
            with suppress(asyncio.TimeoutError):
                await with_timeout(_STOP_SECONDS, process.wait())
        if process.returncode is None:
            process.kill()
            try:
                await with_timeout(_KILL_SECONDS, process.wait())
            except asyncio.TimeoutError:
                self.abandoned = True
                log.error(
                    "the worker process %d did not end within %g s of being killed, and is left behind: it is stuck in the "
                    "kernel, and keeps its memory and its data port until then; check this device's disk with `dmesg`",
                    process.pid, _KILL_SECONDS,
                )  # fmt: skip

    async def _watch_exit(self, process: ChildProcess) -> None:
        code = await process.wait()
        if self.state != "stopped":
            self._fail(WorkerDied(device=self._device, reason=describe_exit(code)))
            await self._remove_scratch()

    async def _listen(self) -> None:
        """Take note of the worker's signs of life until it has failed."""
        request = wire.ReportProgress(interval_seconds=WORKER_SIGN_SECONDS)
        stream = self._client.stream(request, timeout_seconds=WORKER_LOAD_SECONDS, last=wire.Done)
        with suppress(HearthError):
            async with aclosing(stream):
                async for reply in stream:
                    sign = wire.expect_message(reply.message, wire.WorkerProgress, "a worker")
                    before, self._liveness = self._liveness, self._liveness.after_sign(sign)
                    if sign.late_rank != before.progress.late_rank:
                        self._on_change()

    async def _watch_life(self, process: ChildProcess) -> None:
        """Kill the process if it hangs."""
        ticked = loop_time()
        while self.state not in ("failed", "stopped"):
            await asyncio.sleep(TICK_SECONDS)
            now = loop_time()
            self._liveness = self._liveness.after_tick(now - ticked, _sample(process.pid))
            ticked = now
            loading = self.state in ("starting", "loading")
            if (reason := self._liveness.hang(loading)) is not None and self.state not in ("failed", "stopped"):
                self._fail(WorkerDied(device=self._device, reason=reason))
                if process.returncode is None:
                    process.kill()

    def _fail(self, error: HearthError) -> None:
        if self.state in ("failed", "stopped"):
            return  # the first failure is the cause of later ones
        log.warning("%s", error)
        self.failure = error
        self._transition("failed")
        self._client.fail(error)

    def _transition(self, event: WorkerEvent) -> None:
        self._state_machine = self._state_machine.after(event)
        self._on_change()


def _failure_reason(failure: HearthError) -> str:
    """The cause of a worker's failure, without the advice."""
    return failure.reason if isinstance(failure, WorkerDied) else failure.explanation()


def _fits(loaded: wire.Start, request: wire.Start) -> bool:
    """Whether a process that has loaded the one can load the other: it may connect to no further ports."""
    before, after = loaded.load.data_ports, request.load.data_ports
    may_connect = not before or (bool(after) and set(after) <= set(before))
    return may_connect and _fixed(loaded) == _fixed(request)


def _fixed(request: wire.Start) -> tuple[Any, ...]:
    """What cannot change while a worker process lives."""
    load = request.load
    of_process = (request.store_path, request.bind_host, request.ports, request.num_threads, request.compute_device)
    return (*of_process, load.encrypt_data_plane, load.parts.kind, load.plan.model)


def _sample(pid: int) -> ProcessSample | None:
    """The process as the kernel reports it; None if it does not, or if the process has ended."""
    folder = Path(f"/proc/{pid}")
    threads = []
    try:
        stat = (folder / "stat").read_text(errors="replace")
        for thread in islice(os.listdir(folder / "task"), MAX_THREADS):
            with suppress(OSError):  # this thread has ended meanwhile
                threads.append((folder / "task" / thread / "stat").read_text(errors="replace"))
        return parse_process(stat, threads, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


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
