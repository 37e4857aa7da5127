"""The agent daemon: one control socket, one store, one lease, and a worker for each deployment.

Imports neither torch nor numpy.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq.asyncio

import hearth
from agent.daemon.config import AgentSettings
from agent.daemon.configuration import STORE_SECONDS, StoredConfiguration
from agent.daemon.identity import Identity
from agent.daemon.lease import Lease, acquire_lease, keeps_worker, require_lease
from agent.daemon.links import LinkServer, fetch_chunks, measure_link
from agent.daemon.spawner import Spawner
from agent.daemon.store import ShardStore
from agent.daemon.supervisor import WorkerProcess, run_child
from agent.daemon.telemetry import TelemetryReader
from hearth import errors
from hearth.plan.plan import plan_hash
from hearth.platform.asyncio_tools import Signal, cancel_all, loop_time, start_in
from hearth.platform.disk import FILE_SECONDS, hung_paths, on_disk, read_seconds
from hearth.platform.machine import give_back_freed_buffers
from hearth.protocol import (
    CLOSED_LEASE_SECONDS,
    LEASE_CHECK_SECONDS,
    PROTOCOL_VERSION,
    WATCH_SECONDS,
    WORKER_RELOAD_SECONDS,
)
from hearth.transport.base import Buffer
from hearth.wire import messages as wire
from hearth.wire.rpc import Caller, Reply, Response

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Of the free memory, for chunks that are read into the page cache ahead: the rest is left to files that are in use.
_READ_AHEAD_SHARE = 0.5
# For what a device can do without, such as reading how full its disk is: a coordinator waits for 3 s for telemetry.
_BRIEF_SECONDS = 2.0
# Interval at which a closed connection is looked at: short against the time it must be closed.
_CLOSED_POLL_SECONDS = 0.05
_CONTROL_TYPES = (
    wire.Hello, wire.GetTelemetry, wire.OpenLinkProbe, wire.MeasureLink, wire.Profile, wire.AcquireLease, wire.Command,
)  # fmt: skip
CONTROL_MESSAGES = {tag: kind for tag, kind in wire.MESSAGE_TYPES.items() if issubclass(kind, _CONTROL_TYPES)}


class AgentDaemon:
    """Handles requests of this home's coordinators. Admins may only read telemetry."""

    def __init__(
        self,
        settings: AgentSettings,
        identity: Identity,
        store: ShardStore,
        configuration: StoredConfiguration,
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
        self._configuration = configuration
        self._lease: Lease | None = None
        self._renewed_by: Caller | None = None  # who renewed the lease last
        self._workers: dict[str, WorkerProcess] = {}  # keyed by deployment, like the following
        self._last_epochs: dict[str, int] = {}
        self._requested_epochs: dict[str, int] = {}  # of the newest plan, which may still wait for an older one to load
        self._unloaded_epochs: dict[str, int] = {}  # of the newest plan that was unloaded, perhaps while it loaded
        self.spawner = Spawner(settings.spare_worker, telemetry.has_room)
        self._closing = False
        self._watchers: set[Signal] = set()  # set when a worker's state changes: one for each `WatchWorkers`
        self._stopping: set[asyncio.Task[None]] = set()  # each ends one worker that has left `_workers`
        self._num_abandoned = 0  # workers that did not end when they were killed
        self._running: dict[str, wire.RunningWorker] = {}  # what another coordinator needs to take a worker over
        self._streams_end = asyncio.Event()  # of the streams of tokens of the present lease
        self._load_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._measurement_lock = asyncio.Lock()  # one measurement at a time: they disturb each other

    @property
    def name(self) -> str:
        return self._settings.name

    def status_line(self) -> str:
        holder = self._lease.holder_name if self._lease is not None and self._lease.is_live(loop_time()) else ""
        workers = (f"{deployment} {worker.state}" for deployment, worker in sorted(self._workers.items()))
        return f"works for {holder or 'no coordinator'}; workers: {', '.join(workers) or 'none'}"

    def authorise(self, public_key: str, kind: type[wire.Message]) -> None:
        """Raise NotAuthorised unless this key may send messages of this type: an administrator may only read."""
        if public_key != self._coordinator_public_key and not issubclass(kind, wire.Hello | wire.GetTelemetry):
            raise errors.NotAuthorised(role="admin", action=f"send {kind.__name__} to an agent")

    async def handle(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        """Handle one request. A HearthError that it raises is sent to the caller."""
        if isinstance(message, wire.Hello):
            return self._hello(message)
        if isinstance(message, wire.GetTelemetry):
            return await self._read_telemetry()
        if isinstance(message, wire.Command) and not isinstance(message, wire.Heartbeat):
            self._require_lease(message)
        return await self._execute(caller, message, payload)

    async def _execute(self, caller: Caller, message: wire.Message, payload: Sequence[Any]) -> Response:
        """Execute a request of the coordinator."""
        match message:
            case wire.AcquireLease():
                return await self._acquire_lease(caller, message)
            case wire.ReleaseLease():
                if message.keep_workers:
                    self._release_lease()
                else:
                    await self._end_lease()
            case wire.StoreConfiguration():
                await self._configuration.store(message.configuration)
            case wire.Heartbeat():
                return self._heartbeat(caller, message)
            case wire.WatchWorkers():
                return self._watch_workers(message)
            case wire.OpenLinkProbe():
                self._links.open(message)
            case wire.MeasureLink():
                async with self._measurement_lock:
                    return await measure_link(message, self._identity.keypair)
            case wire.Profile():
                return await self._profile(message, payload)
            case wire.FindMissing():
                return await self._find_missing(message)
            case wire.PutChunk():
                if len(payload) != 1:
                    raise errors.BadRequest(reason=f"a chunk is one frame, not {len(payload)}")
                await self._store_chunk(message.hash, payload[0])
            case wire.FetchChunks():
                return wire.ChunksFetched(
                    missing=await fetch_chunks(message, self._identity.keypair, self._store_chunk)
                )
            case wire.Load():
                return await self._load(message)
            case wire.ConnectPeers():
                await self._worker_of(message).connect(message)
            case wire.Run():
                self._record_step(message)
                return await self._worker_of(message).run(message, payload)
            case wire.GenerateTokens():
                return self._stream(self._worker_of(message), message, payload)
            case wire.Abort():
                await self._worker_of(message).abort(message)
            case wire.Unload():
                self._unloaded_epochs[message.deployment] = max(
                    message.epoch, self._unloaded_epochs.get(message.deployment, 0)
                )
                worker = self._workers.get(message.deployment)
                if worker is not None and worker.epoch == message.epoch:
                    await self._stop_worker(message.deployment)
            case _:
                raise errors.BadRequest(reason=f"an agent does not accept {type(message).__name__}")
        return wire.Done()

    async def watch_leases(self) -> None:
        """End the streams of an expired lease, and stop workers that no coordinator takes over, until cancelled.

        A configuration of voters that could not be written is tried again.
        """
        while True:
            await asyncio.sleep(LEASE_CHECK_SECONDS)
            self._configuration.writing.retry()
            if self._lease is not None and self._lease.is_abandoned(loop_time()):
                log.info("no coordinator has taken over the workers of %s", self._lease.holder_name)
                await self._end_lease()
            elif self._lease is not None and not self._lease.is_live(loop_time()):
                self._end_streams()

    async def close(self) -> None:
        """Stop all workers; none starts any more, also for a request that is being handled."""
        self._closing = True
        self._configuration.writing.retry()
        await asyncio.gather(*map(self._stop_worker, list(self._workers)), *self._stopping)
        await self._configuration.writing.settled(STORE_SECONDS)
        await self.spawner.close()

    def _hello(self, message: wire.Hello) -> wire.Message:
        if message.protocol != PROTOCOL_VERSION:
            raise errors.ProtocolMismatch(peer=message.name, ours=PROTOCOL_VERSION, theirs=message.protocol)
        return wire.AgentWelcome(
            version=hearth.__version__,
            device_id=self._identity.device_id,
            boot_id=self.boot_id,
            name=self.name,
            device_public_key=self._identity.keypair.public,
            link_port=self._links.port,
            data_ports=self._settings.data_ports,
        )

    # ---- leases ---------------------------------------------------------------------------------------------------

    async def _acquire_lease(self, caller: Caller, message: wire.AcquireLease) -> wire.Message:
        has_ended = message.ended is not None and await self._holder_has_ended(message.ended)
        previous = self._lease
        self._lease = acquire_lease(
            previous, self.name, message.holder, message.holder_name, message.seconds, loop_time(), has_ended
        )
        self._renewed_by = caller
        if previous is None or previous.holder != message.holder or not previous.is_live(loop_time()):
            self._end_streams()
        if stopped := [
            deployment for deployment, worker in self._workers.items()
            if not keeps_worker(previous, message.holder, message.adopt, deployment, worker.epoch)
        ]:  # fmt: skip
            await asyncio.gather(*map(self._stop_worker, stopped))
            require_lease(self._lease, self.name, message.holder, loop_time())  # that took seconds
        return wire.LeaseGranted(
            last_epoch=max(self._last_epochs.values(), default=0),
            workers=tuple(self._running[each] for each, worker in self._workers.items() if worker.state == "ready"),
            configuration=self._configuration.current,
        )

    async def _holder_has_ended(self, name: str) -> bool:
        """Whether the coordinator `name` has the lease, and its connection is closed and stays closed for a while."""
        lease, renewed_by = self._lease, self._renewed_by
        if lease is None or renewed_by is None or lease.holder_name != name:
            return False
        deadline = loop_time() + CLOSED_LEASE_SECONDS
        while lease.is_live(loop_time()) and self._renewed_by is renewed_by and not renewed_by.is_connected():
            if loop_time() >= deadline:
                log.info("%s has ended: its connection is closed", name)
                return True
            await asyncio.sleep(_CLOSED_POLL_SECONDS)
        return False

    def _require_lease(self, message: wire.Command) -> Lease:
        """The lease. Raises LeaseLost unless the sender of this command holds it."""
        return require_lease(self._lease, self.name, message.holder, loop_time())

    def _release_lease(self) -> None:
        """End the lease now, and leave the workers to the next coordinator."""
        self._end_streams()
        self._lease = self._lease.released(loop_time()) if self._lease is not None else None

    async def _end_lease(self) -> None:
        self._end_streams()
        self._lease = self._renewed_by = None
        await asyncio.gather(*map(self._stop_worker, list(self._workers)))

    def _end_streams(self) -> None:
        """End all streams of tokens, whose sequences then leave the workers' KV caches."""
        self._streams_end.set()
        self._streams_end = asyncio.Event()

    async def _stream(
        self, worker: WorkerProcess, message: wire.GenerateTokens, payload: Sequence[Any]
    ) -> AsyncGenerator[Reply, None]:
        """A worker's stream of tokens. Raises LeaseLost when the lease ends."""
        ending = asyncio.ensure_future(self._streams_end.wait())
        try:
            async with aclosing(worker.stream(message, payload)) as replies:
                while True:
                    following = asyncio.ensure_future(anext(replies))
                    try:
                        await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
                        if not following.done():
                            raise errors.LeaseLost(device=self.name)
                        reply = following.result()
                    except StopAsyncIteration:
                        return
                    finally:
                        await cancel_all([following])
                    yield reply
        finally:
            await cancel_all([ending])

    def _heartbeat(self, caller: Caller, message: wire.Heartbeat) -> wire.Message:
        """Renew the lease, also one that has ended since, as long as no other coordinator has taken it."""
        if self._lease is None or self._lease.holder != message.holder:
            raise errors.LeaseLost(device=self.name)
        self._lease, self._renewed_by = self._lease.renewed(loop_time()), caller
        return self._state()

    async def _watch_workers(self, message: wire.WatchWorkers) -> AsyncGenerator[wire.Message, None]:
        """Report the workers' states at every change. Raises LeaseLost when this holder has no lease."""
        changed = Signal()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                self._require_lease(message)
                yield self._state()
                await changed.wait(WATCH_SECONDS)
        finally:
            self._watchers.discard(changed)

    def _workers_changed(self) -> None:
        for changed in self._watchers:
            changed.set()

    def _state(self) -> wire.AgentState:
        return wire.AgentState(
            boot_id=self.boot_id,
            workers=tuple(worker.status(deployment) for deployment, worker in self._workers.items()),
            num_abandoned=self._num_abandoned,
            num_hung=len(hung_paths()),
        )

    async def _read_telemetry(self) -> wire.Telemetry:
        room_bytes: int | None = None
        with suppress(OSError, errors.StoreFailed):  # the disk fails: the next access to a chunk says so
            await self._on_disk(_BRIEF_SECONDS, self._telemetry.read_disk)
            room_bytes = await self._on_disk(_BRIEF_SECONDS, self._store.room_bytes)
        telemetry = self._telemetry.read(time.time(), idle=not self._workers and not self._stopping)
        if telemetry.compute_device == "cpu" and not self._telemetry.budget_is_limit:
            held = {deployment: worker.resident_bytes for deployment, worker in self._workers.items()}
            telemetry = telemetry.model_copy(update={"memory_held_bytes": held})
        return telemetry.model_copy(update={"store_room_bytes": room_bytes})

    async def _find_missing(self, message: wire.FindMissing) -> wire.ChunksMissing:
        if message.prepare_worker is not None:
            self.spawner.prepare(message.prepare_worker)
        missing = await self._on_disk(FILE_SECONDS, self._store.missing, message.hashes)
        if message.verify:
            present = set(message.hashes).difference(missing)
            missing += await self._verify(present)
        if not message.read_ahead:
            return wire.ChunksMissing(hashes=missing)
        stored_bytes = self._store.num_bytes(set(message.hashes))
        max_bytes = int(_READ_AHEAD_SHARE * self._telemetry.free_memory_bytes())
        read_ahead_bytes = await self._on_disk(
            read_seconds(min(stored_bytes, max_bytes)), self._store.read_ahead, dict.fromkeys(message.hashes), max_bytes
        )
        return wire.ChunksMissing(hashes=missing, stored_bytes=stored_bytes, read_ahead_bytes=read_ahead_bytes)

    async def _store_chunk(self, chunk: str, data: Buffer) -> None:
        await self._on_disk(FILE_SECONDS, self._store.put, chunk, data)

    async def _verify(self, hashes: Collection[str]) -> tuple[str, ...]:
        return await self._on_disk(read_seconds(self._store.num_bytes(hashes)), self._store.verify, hashes)

    async def _on_disk(self, seconds: float, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function of the store in a thread. Raises StoreFailed if the disk does not answer."""
        try:
            return await on_disk(self._store.path, seconds, function, *args)
        except errors.DiskHung as error:
            reason = f"the disk that holds {error.path} has not answered for {error.seconds:g} s"
            raise errors.StoreFailed(device=self.name, reason=reason) from None

    # ---- measurements ---------------------------------------------------------------------------------------------

    async def _profile(self, message: wire.Profile, payload: Sequence[Any]) -> wire.Message:
        of_blocks = isinstance(message.subject, wire.BlocksOf)
        if not (of_blocks or payload):
            raise errors.BadRequest(reason="the graph to be profiled is missing")
        device = self._telemetry.read(time.time())
        async with AsyncExitStack() as stack:
            scratch = await self._on_disk(FILE_SECONDS, self._store.scratch_folder)
            stack.push_async_callback(self._on_disk, FILE_SECONDS, scratch.cleanup)
            await self._on_disk(FILE_SECONDS, (Path(scratch.name) / "graph.onnx").write_bytes, b"".join(payload))
            start = wire.StartProfile(
                profile=message,
                device=self.name,
                folder=scratch.name,
                num_threads=device.num_threads,
                compute_device=device.compute_device,
            )
            module = "agent.worker.transformer.profiler" if of_blocks else "agent.worker.graph.profiler"
            async with self._measurement_lock:
                return await run_child(module, start, message.timeout_seconds, device=self.name)

    # ---- the workers -----------------------------------------------------------------------------------------------

    async def _load(self, message: wire.Load) -> wire.Message:
        plan, deployment = message.plan, message.deployment
        self._check_load(message)
        if message.rank >= plan.num_ranks:
            raise errors.BadRequest(reason=f"rank {message.rank} is not in a plan of {plan.num_ranks} devices")
        device = self._telemetry.read(time.time())
        start = wire.Start(
            load=message,
            store_path=str(self._store.path),
            bind_host=self._settings.bind_host,
            ports=self._settings.data_ports,
            num_threads=device.num_threads,
            compute_device=device.compute_device,
        )
        self._requested_epochs[deployment] = max(plan.epoch, self._requested_epochs.get(deployment, 0))
        worker = self._workers.get(deployment)
        is_loading = worker is not None and worker.state in ("starting", "loading")
        if worker is not None and is_loading and not worker.give_up_load(start):
            await self._stop_worker(deployment)  # do not wait for it: its plan has been replaced
        async with self._load_locks[deployment]:
            self._check_load(message)
            self._last_epochs[deployment] = plan.epoch
            try:
                return await self._reload_worker(start) or await self._start_worker(start)
            finally:
                give_back_freed_buffers()  # of the chunks that were received and hashed

    async def _reload_worker(self, start: wire.Start) -> wire.WorkerBound | None:
        """Load the plan in the worker that runs, if there is one that can. None if a new process has to."""
        deployment = start.load.deployment
        worker = self._workers.get(deployment)
        if worker is None or not worker.can_reload(start):
            return None
        await self._pin(start.load)
        await self._verify_chunks(worker.added_chunks(start))
        self._check_still_wanted(start.load)
        if self._workers.get(deployment) is not worker or not worker.can_reload(start):
            return None  # it ended meanwhile
        self._record_running(start)
        num_bytes = self._store.num_bytes(start.load.parts.hashes)
        try:
            return await worker.reload(start, read_seconds(num_bytes, WORKER_RELOAD_SECONDS))
        except errors.HearthError as error:
            if worker.state == "stopped":
                raise  # the lease has ended
            self._check_still_wanted(start.load)
            log.warning("a new worker process starts, because the one that runs did not take the new plan: %s", error)
            return None

    async def _pin(self, load: wire.Load) -> None:
        """Protect the chunks of a plan from eviction, and note their use; a disk that hangs delays that only briefly."""
        self._store.pin(load.deployment, load.parts.hashes)
        with suppress(errors.StoreFailed):
            await self._on_disk(_BRIEF_SECONDS, self._store.note_use, load.parts.hashes)

    async def _start_worker(self, start: wire.Start) -> wire.WorkerBound:
        deployment = start.load.deployment
        await self._stop_worker(deployment)
        await self._pin(start.load)
        await self._verify_chunks(start.load.parts.hashes)
        self._check_still_wanted(start.load)
        self._record_running(start)
        worker = self._workers[deployment] = WorkerProcess(
            self._context, self.name, self.spawner, self._workers_changed
        )
        return await worker.start(start)

    def _record_running(self, start: wire.Start) -> None:
        """Keep what a coordinator must know to adopt the worker."""
        load = start.load
        self._running[load.deployment] = wire.RunningWorker(
            deployment=load.deployment,
            epoch=load.plan.epoch,
            plan_hash=plan_hash(load.plan),
            rank=load.rank,
            last_step=0,
        )

    async def _verify_chunks(self, hashes: Sequence[str]) -> None:
        """Raise ChunkCorrupt or ChunkMissing unless these chunks are as they were stored."""
        if damaged := await self._verify(hashes):
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise errors.ChunkCorrupt(chunk=f"{damaged[0][:12]}{more}", where=f"the disk of {self.name}")

    def _check_load(self, message: wire.Load) -> None:
        """Raise LeaseLost or BadRequest if the lease has ended, or if a newer plan has come, while this one waited."""
        self._require_lease(message)
        last_epoch = self._last_epochs.get(message.deployment, 0)
        if message.plan.epoch <= last_epoch:
            raise errors.BadRequest(reason=f"epoch {message.plan.epoch} is not newer than {last_epoch}")

    def _check_still_wanted(self, message: wire.Load) -> None:
        """As `_check_load`, after the chunks were hashed, which takes seconds: nobody would stop this plan's worker."""
        if self._closing:
            raise errors.LeaseLost(device=self.name)
        self._require_lease(message)
        if (newest := self._requested_epochs[message.deployment]) > message.plan.epoch:
            reason = f"the plan of epoch {message.plan.epoch} has been replaced by that of epoch {newest}"
            raise errors.BadRequest(reason=reason)
        if message.plan.epoch <= self._unloaded_epochs.get(message.deployment, 0):
            raise errors.BadRequest(reason=f"the plan of epoch {message.plan.epoch} was unloaded before it had loaded")

    def _worker_of(self, message: wire.PlanCommand) -> WorkerProcess:
        worker = self._workers.get(message.deployment)
        if worker is None or worker.epoch != message.epoch:
            raise errors.StepFailed(device=self.name, reason=f"the plan of epoch {message.epoch} is not loaded here")
        return worker

    def _record_step(self, message: wire.Run) -> None:
        running = self._running.get(message.deployment)
        if running is not None and running.epoch == message.epoch and running.last_step < message.step:
            self._running[message.deployment] = running.model_copy(update={"last_step": message.step})

    async def _stop_worker(self, deployment: str) -> None:
        """Stop the worker, if there is one. If the caller is cancelled, that goes on; `close` waits for it."""
        worker = self._workers.pop(deployment, None)
        self._running.pop(deployment, None)
        self._store.unpin(deployment)
        if worker is not None:
            await asyncio.shield(start_in(self._stopping, self._end(worker)))

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.stop()
        self._num_abandoned += worker.abandoned
