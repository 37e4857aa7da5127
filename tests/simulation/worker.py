"""A simulated worker process: it speaks the real messages, and computes a step only together with all ranks of its plan."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from simulation.clock import CURRENT_PROCESS, Process
from simulation.history import History, StepComputed
from simulation.model import checksum, hidden_rows, next_token
from simulation.network import Context, Network

from agent.daemon.liveness import ProcessSample
from hearth.errors import BadRequest, ChunkMissing, HearthError, StepFailed
from hearth.plan.geometry import rows_per_rank, spans
from hearth.protocol import hung_step_seconds, late_seconds
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, unpack_array, unpack_arrays

START_SECONDS = (0.2, 1.5)  # from the start of the process until it answers: it imports torch
END_SECONDS = 5.0  # for a step to end when another plan comes; then the process ends


@dataclass
class _Tiles:
    """The tiles of one step that have arrived, by rank. `waiter` is woken by another one, and by an abort."""

    by_rank: dict[int, tuple[int, Any]] = field(default_factory=dict)
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Worker:
    """The process that `python -m agent.worker.main` is."""

    def __init__(self, process: Process, history: History) -> None:
        self.process = process
        self.network: Network = process.host.variables["network"]
        self._history = history
        self._socket: Any = None
        self._start: wire.Start | None = None
        self._chunks: dict[str, bytes] = {}  # what it has loaded, by hash
        self._weights = 0  # their checksum
        self._peers: dict[int, tuple[str, int]] = {}
        self._tiles: dict[tuple[int, int], _Tiles] = {}  # by epoch and step
        self._aborted: asyncio.Future[HearthError] | None = None
        self._tasks: dict[bytes, asyncio.Task[None]] = {}  # by request
        self._following: set[asyncio.Task[None]] = set()
        self._stream_step = 0
        self.port = 0
        self.hangs = False  # whether its main thread computes without end
        self._step_seconds: float = process.host.variables["step seconds"]
        self._running: tuple[int, float, float] | None = None  # a step, when it began, and the timeout of its waits
        self._waiting: dict[tuple[int, int], tuple[float, float]] = {}  # by epoch and step: since when, and the timeout
        process.variables["worker"] = self

    @property
    def load(self) -> wire.Load:
        return self._start.load

    async def run(self, endpoint: str) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.network.random.uniform(*START_SECONDS))
        self._socket = Context().socket(zmq.DEALER)
        self._socket.bind(endpoint)
        self._aborted = loop.create_future()
        while True:
            request, body, *payload = await self._socket.recv_multipart()
            message = wire.decode(body)
            if isinstance(message, wire.Cancel):
                if (task := self._tasks.get(message.request)) is not None:
                    task.cancel()
                continue
            task = asyncio.create_task(self._handle(request, message, payload))
            self._tasks[request] = task
            task.add_done_callback(lambda _, request=request: self._tasks.pop(request, None))

    async def _handle(self, request: bytes, message: wire.Message, payload: Sequence[bytes]) -> None:
        try:
            await self._answer_request(request, message, payload)
        except HearthError as error:
            await self._answer(request, wire.Failed.of(error))

    async def _answer(self, request: bytes, message: wire.Message, payload: Sequence[Any] = ()) -> None:
        await self._socket.send_multipart([request, wire.encode(message), *payload])

    async def _answer_request(self, request: bytes, message: wire.Message, payload: Sequence[bytes]) -> None:
        match message:
            case wire.Start():
                await self._answer(request, await self._load(message))
            case wire.ConnectPeers():
                self._peers = {peer.rank: (peer.host, peer.port) for peer in message.peers}
                await self._answer(request, wire.Done())
            case wire.Run():
                done, rows = await self._run(message, payload)
                await self._answer(request, done, pack_array(rows))
            case wire.GenerateTokens():
                await self._generate(request, message, payload)
            case wire.Abort():
                if self._aborted is not None:
                    self._aborted.set_result(StepFailed(device=self._name, reason=message.reason))
                self._aborted = asyncio.get_running_loop().create_future()
                await self._answer(request, wire.Done())
            case wire.ReportProgress():
                while True:
                    await self._answer(request, self._progress())
                    await asyncio.sleep(message.interval_seconds)
            case _:
                raise BadRequest(reason=f"a worker does not accept {type(message).__name__}")

    @property
    def _name(self) -> str:
        return f"rank {self.load.rank}" if self._start is not None else self.process.name

    async def _load(self, start: wire.Start) -> wire.WorkerBound:
        """Load a plan: the first one, or another one instead of the running one."""
        if self._aborted is not None:
            self._aborted.set_result(StepFailed(device=self.process.name, reason="the plan was unloaded"))
        self._aborted = asyncio.get_running_loop().create_future()
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while self._running is not None:  # a step that computes ends before the next plan is loaded
            await asyncio.sleep(0.001)
            if asyncio.get_running_loop().time() > deadline:
                self.process.kill(1)
        self._peers, self._tiles = {}, {}
        self._start = start
        store = Path(start.store_path)
        before, self._chunks = self._chunks, {}
        for chunk in start.load.parts.hashes:  # those that it has loaded before stay in memory
            try:
                self._chunks[chunk] = before.get(chunk) or (store / chunk[:2] / chunk).read_bytes()
            except OSError:
                raise ChunkMissing(chunk=chunk[:12], device=self.process.host.name) from None
        self._weights = checksum(list(self._chunks.values()))
        self.port = self.port or self.network.choose_port()
        self.process.host.variables.setdefault("data ports", {})[self.port] = self
        await asyncio.sleep(self.network.random.uniform(0.02, 0.2))
        return wire.WorkerBound(
            port=self.port, public_key="0" * 40, num_bytes_loaded=sum(map(len, self._chunks.values()))
        )

    def _progress(self) -> wire.WorkerProgress:
        if self._running is None:
            return wire.WorkerProgress(late_rank=self._late_rank())
        step, began, timeout_seconds = self._running
        seconds = asyncio.get_running_loop().time() - began
        return wire.WorkerProgress(
            step=step, step_seconds=seconds, busy_seconds=seconds, limit_seconds=hung_step_seconds(timeout_seconds, 1)
        )

    def _late_rank(self) -> int | None:
        now = asyncio.get_running_loop().time()
        late = (key for key, (since, timeout) in self._waiting.items() if now - since >= late_seconds(timeout))
        missing = (set(self._peers) - self._tiles[key].by_rank.keys() for key in late if key in self._tiles)
        return next((min(ranks) for ranks in missing if ranks), None)

    # ---- steps ------------------------------------------------------------------------------------------------------

    async def _run(self, message: wire.Run, payload: Sequence[bytes]) -> tuple[wire.RunDone, np.ndarray[Any, Any]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        arrays = unpack_arrays(message.names, payload)
        token_ids = arrays["token_ids"].tolist()
        weights = await self._exchange(message.epoch, message.step, message.timeout_seconds, message.holder, began)
        rows = hidden_rows(token_ids, weights)
        own = spans(rows_per_rank(self.load.plan.body.row_weights, len(token_ids)))[self.load.rank]
        rows = rows[own.start : own.stop]
        if message.output == "mean":
            rows = rows.sum(axis=0, keepdims=True)
        return self._done(message.output, began), rows

    def _done(self, name: str, began: float) -> wire.RunDone:
        return wire.RunDone(
            names=(name,), began_seconds=began, ended_seconds=asyncio.get_running_loop().time(),
            compute_seconds=(self._step_seconds,), wire=wire.WireStats(), dropped_messages=0,
        )  # fmt: skip

    async def _exchange(self, epoch: int, step: int, timeout_seconds: float, holder: str, began: float) -> int:
        """Compute one step with all other ranks; returns the checksum of all weights. Raises StepFailed."""
        self._running = (step, began, timeout_seconds)
        leaders = self.process.host.variables["leaders"]()
        aborted = self._aborted
        await asyncio.sleep(self._step_seconds)
        while self.hangs:
            await asyncio.sleep(1.0)
        self._running = None
        if aborted is not None and aborted.done():
            raise aborted.result()
        ranks = self.load.plan.num_ranks
        for rank in self._peers:
            self._send_tile(rank, epoch, step, self._weights)
        tiles = self._tiles.setdefault((epoch, step), _Tiles())
        waits_since = asyncio.get_running_loop().time()
        self._waiting[epoch, step] = (waits_since, timeout_seconds)
        try:
            while len(tiles.by_rank) < ranks - 1:
                await self._wait(tiles, waits_since + timeout_seconds, ranks)
        finally:
            self._waiting.pop((epoch, step), None)
        del self._tiles[epoch, step]
        self._history.steps.append(
            StepComputed(
                self.load.deployment, self.load.plan_token, epoch, step, self.load.rank, ranks, holder, began,
                asyncio.get_running_loop().time(), self.process.host.name, leaders,
            )
        )  # fmt: skip
        return self._weights + sum(weights for weights, _ in tiles.by_rank.values())

    async def _wait(self, tiles: _Tiles, deadline: float, ranks: int) -> None:
        """Wait for a tile. Raises the reason of an abort, and StepFailed with the rank that is late."""
        aborted, loop = self._aborted, asyncio.get_running_loop()
        assert aborted is not None
        if not aborted.done():
            tiles.waiter = loop.create_future()
            timer = loop.call_at(deadline, tiles.wake)

            def wake(_: asyncio.Future[HearthError]) -> None:
                tiles.wake()

            aborted.add_done_callback(wake)
            try:
                await tiles.waiter
            finally:
                timer.cancel()
                aborted.remove_done_callback(wake)
        if aborted.done():
            raise aborted.result()
        if len(tiles.by_rank) < ranks - 1 and loop.time() >= deadline:
            late = min(set(range(ranks)) - {self.load.rank} - tiles.by_rank.keys())
            reason = f"no tile of rank {late} arrived in time"
            raise StepFailed(device=self._name, reason=reason, peer=f"rank {late}")

    def _send_tile(self, rank: int, epoch: int, step: int, content: Any) -> None:
        host, port = self._peers[rank]
        peer: Worker | None = self.network.hosts[host].variables.get("data ports", {}).get(port)
        if peer is not None and peer.process.alive:
            self.network.send_datagram(
                self.process.host.name, peer.process, peer.tile_arrived, self.load.plan_token, epoch, step,
                self.load.rank, content,
            )  # fmt: skip

    def tile_arrived(self, token: bytes, epoch: int, step: int, rank: int, content: Any) -> None:
        """A tile of a peer. Those of another plan are dropped; an order of rank 0 begins a step of a generation."""
        if self._start is None or token != self.load.plan_token or epoch != self.load.plan.epoch:
            return
        if isinstance(content, _Order):
            following = asyncio.create_task(self._follow(content, epoch, step))
            self._following.add(following)
            following.add_done_callback(self._following.discard)
            return
        tiles = self._tiles.setdefault((epoch, step), _Tiles())
        tiles.by_rank[rank] = (content, None)
        tiles.wake()

    # ---- generation -------------------------------------------------------------------------------------------------

    async def _follow(self, order: _Order, epoch: int, step: int) -> None:
        try:
            await self._exchange(epoch, step, order.timeout_seconds, order.holder, asyncio.get_running_loop().time())
        except HearthError:
            pass  # rank 0 notices by its own timeout, or was aborted as well

    async def _generate(self, request: bytes, message: wire.GenerateTokens, payload: Sequence[bytes]) -> None:
        loop = asyncio.get_running_loop()
        tokens = unpack_array(payload).tolist()
        num_prompt, began = len(tokens), loop.time()
        timeout = self.load.plan.peer_timeout_seconds()
        for index in range(message.max_tokens):
            self._stream_step += 1
            step = self._stream_step
            for rank in self._peers:
                self._send_tile(rank, message.epoch, step, _Order(timeout, message.holder))
            weights = await self._exchange(message.epoch, step, timeout, message.holder, loop.time())
            tokens.append(next_token(tokens, message.sampling, message.first_index + index, weights))
            await self._answer(request, wire.TokensGenerated(token_ids=(tokens[-1],)))
        await self._answer(
            request,
            wire.GenerationEnded(
                reason="length", num_prompt_tokens=num_prompt, num_tokens=message.max_tokens, queued_seconds=0.0,
                prefill_seconds=0.0, decode_seconds=loop.time() - began,
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class _Order:
    """Rank 0's order to compute one step of a generation."""

    timeout_seconds: float
    holder: str


def sample(pid: int) -> ProcessSample | None:
    """Stands for what `agent.daemon.supervisor` reads of a process in /proc."""
    parent = CURRENT_PROCESS.get()
    process = next((each for each in parent.host.processes if each.pid == pid), None)
    if process is None:
        return None
    return ProcessSample(cpu_seconds=0.0, waits_for_processor=False, stopped=process.stopped)


class WorkerProcess:
    """Stands for `asyncio.subprocess.Process`: a child of the current process on the same host."""

    def __init__(self, endpoint: str, history: History) -> None:
        parent = CURRENT_PROCESS.get()
        network: Network = parent.host.variables["network"]
        self._loop = network.loop
        self._ended = self._loop.create_future()
        self._process = network.start_process(parent.host, "worker")
        self._process.at_exit.append(self._tell_parent)
        self._parent = parent
        self._process.run(Worker(self._process, history).run(endpoint))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def terminate(self) -> None:
        self._loop.call_in(None, 0.01, self._terminate)

    def _terminate(self) -> None:
        if not self._process.stopped:  # SIGTERM waits until a stopped process continues
            self._process.kill(-15)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def _tell_parent(self) -> None:
        if self._parent.alive:
            code = self._process.exit_code
            self._loop.call_in(self._parent, 0.001, lambda: self._ended.done() or self._ended.set_result(code))
