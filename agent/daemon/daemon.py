"""The agent daemon: one control socket, one lease, one worker, one store. Loads neither torch nor numpy."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq.asyncio

import hearth
from agent.daemon.config import AgentSettings
from agent.daemon.identity import Identity
from agent.daemon.lease import Lease, acquire, require
from agent.daemon.links import LinkServer, fetch_chunks, measure_link
from agent.daemon.store import ShardStore
from agent.daemon.supervisor import WorkerProcess, run_child
from agent.daemon.telemetry import TelemetryReader
from hearth.errors import BadRequest, HearthError, NotAuthorised, ProtocolMismatch, StepFailed, WorkerDied
from hearth.plan.profile import BlockProfile
from hearth.protocol import PROTOCOL_VERSION
from hearth.wire.messages import (
    AbortGraph,
    AbortStep,
    AcquireLease,
    AgentState,
    AgentWelcome,
    BlocksProfiled,
    ChunksFetched,
    ChunksMissing,
    ConnectPeers,
    Done,
    Failed,
    FetchChunks,
    FindMissing,
    GenerateTokens,
    GetTelemetry,
    GraphProfiled,
    Heartbeat,
    Hello,
    LeaseGranted,
    LinkMeasured,
    LoadGraph,
    LoadShard,
    MeasureLink,
    Message,
    OpenLinkProbe,
    ProfileBlocks,
    ProfileGraph,
    PutChunk,
    ReleaseLease,
    RunGraph,
    RunStep,
    StartGraphWorker,
    StartWorker,
    Unload,
)
from hearth.wire.rpc import Caller, Reply, Response

log = logging.getLogger(__name__)

_LEASE_CHECK_SECONDS = 1.0
_PROFILE_SECONDS = 120.0  # torch's import and 20 measured points on the slowest board

Handler = Callable[[Any, Sequence[Any]], Awaitable[Response]]


class AgentDaemon:
    """Answers requests of this home's coordinators; reads are open to its admins too."""

    def __init__(
        self,
        settings: AgentSettings,
        identity: Identity,
        store: ShardStore,
        telemetry: TelemetryReader,
        links: LinkServer,
        context: zmq.asyncio.Context,
        coordinator_public_key: str,
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self._settings = settings
        self._identity = identity
        self._store = store
        self._telemetry = telemetry
        self._links = links
        self._context = context
        self._coordinator_public_key = coordinator_public_key
        self._bind_host = settings.bind_host
        self._lease: Lease | None = None
        self._worker: WorkerProcess | None = None
        self._last_epoch = 0
        self._loading = asyncio.Lock()
        self._busy_measuring = asyncio.Lock()  # one measurement at a time, or they would measure each other
        self._reads: Mapping[type[Any], Handler] = {Hello: self._hello, GetTelemetry: self._get_telemetry}
        self._commands: Mapping[type[Any], Handler] = {
            AcquireLease: self._acquire_lease,
            ReleaseLease: self._release_lease,
            Heartbeat: self._heartbeat,
            OpenLinkProbe: self._open_link_probe,
            MeasureLink: self._measure_link,
            ProfileBlocks: self._profile_blocks,
            ProfileGraph: self._profile_graph,
            FindMissing: self._find_missing,
            PutChunk: self._put_chunk,
            FetchChunks: self._fetch_chunks,
            LoadShard: self._load_shard,
            LoadGraph: self._load_graph,
            ConnectPeers: self._connect_peers,
            RunStep: self._run_step,
            RunGraph: self._run_graph,
            GenerateTokens: self._generate_tokens,
            AbortStep: self._abort_step,
            AbortGraph: self._abort_step,
            Unload: self._unload,
        }

    @property
    def name(self) -> str:
        return self._settings.name

    def status_line(self) -> str:
        holder = self._lease.holder_name if self._lease and self._lease_is_live() else "no coordinator"
        worker = self._worker.state if self._worker else "none"
        return f"works for {holder}; worker: {worker}"

    async def handle(self, caller: Caller, message: Message, payload: Sequence[Any]) -> Response:
        """Answer one request. Raises HearthError, which goes back to the caller."""
        if handler := self._reads.get(type(message)):
            return await handler(message, payload)
        if handler := self._commands.get(type(message)):
            if caller.public_key != self._coordinator_public_key:
                raise NotAuthorised(role="admin", action=f"send {type(message).__name__} to an agent")
            return await handler(message, payload)
        raise BadRequest(reason=f"an agent does not take {type(message).__name__}")

    async def watch_lease(self) -> None:
        """Free the worker's memory when its coordinator has gone. Runs until cancelled."""
        while True:
            await asyncio.sleep(_LEASE_CHECK_SECONDS)
            if self._lease is not None and not self._lease_is_live():
                log.info("the lease of %s has expired", self._lease.holder_name)
                self._lease = None
                await self._stop_worker()

    async def close(self) -> None:
        await self._stop_worker()

    # ---- reads ----------------------------------------------------------------------------------------------------

    async def _hello(self, message: Hello, _: Sequence[Any]) -> Message:
        if message.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(peer=message.name, ours=PROTOCOL_VERSION, theirs=message.protocol)
        return AgentWelcome(
            version=hearth.__version__,
            device_id=self._identity.device_id,
            boot_id=self.boot_id,
            name=self.name,
            device_public_key=self._identity.keypair.public,
            link_port=self._links.port,
        )

    async def _get_telemetry(self, _message: GetTelemetry, _: Sequence[Any]) -> Message:
        return self._telemetry.read(time.time())

    # ---- lease ----------------------------------------------------------------------------------------------------

    def _lease_is_live(self) -> bool:
        return self._lease is not None and time.monotonic() < self._lease.expires

    def _require_lease(self, holder: str) -> None:
        require(self._lease, self.name, holder, time.monotonic())

    async def _acquire_lease(self, message: AcquireLease, _: Sequence[Any]) -> Message:
        previous = self._lease
        self._lease = acquire(
            self._lease, self.name, message.holder, message.holder_name, message.seconds, time.monotonic()
        )
        if previous is not None and previous.holder != message.holder:
            await self._stop_worker()
        return LeaseGranted(last_epoch=self._last_epoch)

    async def _release_lease(self, message: ReleaseLease, _: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        self._lease = None
        await self._stop_worker()
        return Done()

    async def _heartbeat(self, message: Heartbeat, _: Sequence[Any]) -> Message:
        lease = require(self._lease, self.name, message.holder, time.monotonic())
        self._lease = lease.renewed(time.monotonic())
        worker = self._worker
        return AgentState(
            boot_id=self.boot_id,
            worker=worker.state if worker else "none",
            epoch=worker.epoch if worker else 0,
            failure=_why(worker.failure) if worker and worker.failure else "",
            worker_peak_bytes=worker.peak_bytes if worker else 0,
        )

    # ---- measurements ---------------------------------------------------------------------------------------------

    async def _open_link_probe(self, message: OpenLinkProbe, _: Sequence[Any]) -> Message:
        self._links.open(message)
        return Done()

    async def _measure_link(self, message: MeasureLink, _: Sequence[Any]) -> LinkMeasured:
        async with self._busy_measuring:
            return await measure_link(message, self._identity.keypair)

    async def _profile_blocks(self, message: ProfileBlocks, _: Sequence[Any]) -> Message:
        device = self._telemetry.read(time.time())
        request = {
            "model": message.model.model_dump(),
            "seq_len": message.seq_len,
            "num_threads": device.num_threads,
            "compute_device": device.compute_device,
        }
        async with self._busy_measuring:
            output = await run_child(
                "agent.worker.transformer.profiler", json.dumps(request), _PROFILE_SECONDS, device=self.name
            )
        return BlocksProfiled(blocks=BlockProfile.model_validate_json(output))

    async def _profile_graph(self, message: ProfileGraph, payload: Sequence[Any]) -> GraphProfiled:
        if not payload:
            raise BadRequest(reason="the graph to be profiled is missing")
        device = self._telemetry.read(time.time())
        with self._store.scratch_folder() as folder:
            path = Path(folder) / "graph.onnx"
            await asyncio.to_thread(path.write_bytes, b"".join(payload))
            request = {
                "model_path": str(path),
                "folder": folder,
                "device": self.name,
                "num_threads": device.num_threads,
                "compute_device": device.compute_device,
            }
            async with self._busy_measuring:
                output = await run_child(
                    "agent.worker.graph.profiler", json.dumps(request), message.timeout_seconds, device=self.name
                )
        if json.loads(output)["t"] == "failed":
            raise Failed.model_validate_json(output).error()
        return GraphProfiled.model_validate_json(output)

    # ---- chunks ---------------------------------------------------------------------------------------------------

    async def _find_missing(self, message: FindMissing, _: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        return ChunksMissing(hashes=self._store.missing(message.hashes))

    async def _put_chunk(self, message: PutChunk, payload: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        if len(payload) != 1:
            raise BadRequest(reason=f"a chunk is one frame, not {len(payload)}")
        await asyncio.to_thread(self._store.put, message.hash, payload[0])
        return Done()

    async def _fetch_chunks(self, message: FetchChunks, _: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        return ChunksFetched(missing=await fetch_chunks(message, self._identity.keypair, self._store.put))

    # ---- the worker -----------------------------------------------------------------------------------------------

    async def _load_shard(self, message: LoadShard, _: Sequence[Any]) -> Message:
        device = self._telemetry.read(time.time())
        start = StartWorker(
            load=message,
            store_path=str(self._store.path),
            bind_host=self._bind_host,
            ports=self._settings.data_ports,
            num_threads=device.num_threads,
            compute_device=device.compute_device,
        )
        return await self._start_worker(start, tuple(chunk.hash for chunk in message.chunks))

    async def _load_graph(self, message: LoadGraph, _: Sequence[Any]) -> Message:
        device = self._telemetry.read(time.time())
        start = StartGraphWorker(
            load=message,
            store_path=str(self._store.path),
            bind_host=self._bind_host,
            ports=self._settings.data_ports,
            num_threads=device.num_threads,
            compute_device=device.compute_device,
        )
        return await self._start_worker(start, message.hashes)

    async def _start_worker(self, start: StartWorker | StartGraphWorker, hashes: tuple[str, ...]) -> Message:
        load = start.load
        self._require_lease(load.holder)
        if load.plan.epoch <= self._last_epoch:
            raise BadRequest(reason=f"epoch {load.plan.epoch} is not newer than {self._last_epoch}")
        if load.rank >= load.plan.num_ranks:
            raise BadRequest(reason=f"rank {load.rank} is not in a plan of {load.plan.num_ranks} devices")
        async with self._loading:
            await self._stop_worker()
            self._last_epoch = load.plan.epoch
            self._store.pin(hashes)
            for chunk in hashes:
                await asyncio.to_thread(self._store.verify, chunk)
            self._worker = WorkerProcess(self._context, self.name)
            return await self._worker.start(start)

    async def _connect_peers(self, message: ConnectPeers, _: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        await self._current_worker(message.epoch).connect(message)
        return Done()

    async def _run_step(self, message: RunStep, payload: Sequence[Any]) -> Reply:
        self._require_lease(message.holder)
        reply, frames = await self._current_worker(message.epoch).run(message, payload)
        return Reply(reply, frames)

    async def _run_graph(self, message: RunGraph, payload: Sequence[Any]) -> Reply:
        self._require_lease(message.holder)
        reply, frames = await self._current_worker(message.epoch).run_graph(message, payload)
        return Reply(reply, frames)

    async def _generate_tokens(self, message: GenerateTokens, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        self._require_lease(message.holder)
        return self._current_worker(message.epoch).stream(message, payload)

    async def _abort_step(self, message: AbortStep | AbortGraph, _: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        await self._current_worker(message.epoch).abort(message)
        return Done()

    async def _unload(self, message: Unload, _: Sequence[Any]) -> Message:
        self._require_lease(message.holder)
        if self._worker is not None and self._worker.epoch == message.epoch:
            await self._stop_worker()
        return Done()

    def _current_worker(self, epoch: int) -> WorkerProcess:
        worker = self._worker
        if worker is None or worker.epoch != epoch:
            raise StepFailed(device=self.name, reason=f"the plan of epoch {epoch} is not loaded here")
        return worker

    async def _stop_worker(self) -> None:
        worker, self._worker = self._worker, None
        self._store.unpin_all()
        if worker is not None:
            await worker.stop()


def _why(failure: HearthError) -> str:
    """What the coordinator says after "the worker died"."""
    return failure.reason if isinstance(failure, WorkerDied) else failure.explanation()
