"""Distributes weight chunks: every device gets those that it lacks, from other devices or from the coordinator.

Normally the coordinator sends each chunk at most once; a device that has it forwards it to the others (see `chunk_scheduler`).
Chunks that a device already stores are not sent again, so an interrupted push resumes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import product, starmap
from pathlib import Path

from coordinator.deploy.chunk_scheduler import Chunk, ChunkScheduler
from coordinator.devices.fleet import Fleet, ask_with_listener
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import all_or_first_error, cancel_all, loop_time
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.machine import give_back_freed_buffers
from hearth.platform.units import format_bytes
from hearth.protocol import FETCH_SECONDS
from hearth.wire.messages import ChunksFetched, ChunksMissing, FetchChunks, FindMissing, PutChunk
from hearth.wire.rpc import RpcClient

PushProgress = Callable[[str, int, int], None]  # device name, bytes received, bytes needed in total
PushPause = Callable[[], Awaitable[None]]  # awaited before each chunk and each batch between devices


async def no_pause() -> None:
    """The pause of a push that is not to wait."""


# Limits of the bytes in flight from the coordinator. Per device: enough to hide the round trip and its disk writes. In
# total: bounds the coordinator's memory. A device with nothing in flight always gets a chunk.
_DEVICE_WINDOW_BYTES = 8 << 20
_TOTAL_WINDOW_BYTES = 32 << 20
_CHUNK_SECONDS = 120.0  # timeout for sending one chunk: the largest, 64 MiB, needs 5 Mbit/s
_FIND_SECONDS = 10.0  # timeout of asking which chunks a device lacks: longer than a busy agent takes to answer
_MIN_DISK_BYTES_PER_SECOND = 10e6  # added to that timeout, for hashing the chunks: a quarter of what an SD card reads
# Bytes that a device fetches from another in one request, computed from the rate of the last batch.
_MIN_BATCH_BYTES = 4 << 20
_MAX_BATCH_BYTES = 32 << 20
_TARGET_BATCH_SECONDS = 3.0  # intended time of a batch: hides the round trip, and a slow source is soon replaced


class NoRoomAhead(Exception):
    """Chunks are not sent ahead, because a device would have to store more than its share for them."""


class Distribution:
    """Distributes the chunks of one plan. `sent_bytes`: sent by the coordinator; `forwarded_bytes`: forwarded by devices.

    `room_bytes`: what each device may store, by its id, less what it receives here; None: no limit but the device's own.
    """

    def __init__(
        self,
        fleet: Fleet,
        progress: PushProgress,
        pause: PushPause = no_pause,
        room_bytes: dict[str, int] | None = None,
    ) -> None:
        self.sent_bytes = 0
        self.forwarded_bytes = 0
        self._fleet = fleet
        self._progress = progress
        self._pause = pause
        self._room_bytes = room_bytes
        self._needed_bytes: dict[str, int] = {}
        self._received_bytes: dict[str, int] = defaultdict(int)
        self._in_flight_bytes: dict[str, int] = defaultdict(int)  # bytes in flight from the coordinator, by device
        self._scheduler = ChunkScheduler({}, {})
        self._changed = asyncio.Event()  # set, then replaced, at every change

    async def run(self, needed_chunks: Mapping[str, Sequence[Chunk]]) -> None:
        """Send each device the chunks that it needs and lacks. `needed_chunks`: by device id.

        Raises BadCheckpoint, DiskHung, StoreFull, DeviceLost, NoRoomAhead, ...
        """
        per_device = await all_or_first_error(starmap(self._lacking_chunks, needed_chunks.items()))
        lacking = dict(zip(needed_chunks, per_device, strict=True))
        held = await self._held_hashes({chunk.hash for chunks in lacking.values() for chunk in chunks})
        for device, chunks in lacking.items():
            self._needed_bytes[device] = sum(chunk.num_bytes for chunk in chunks)
            self._check_room(device)
            self._report_progress(device)
        self._scheduler = ChunkScheduler(lacking, held)
        targets = [device for device, chunks in lacking.items() if chunks]
        if not targets:
            return
        pairs = [(source, target) for source, target in product({*held, *targets}, targets) if source != target]
        try:
            await all_or_first_error([*map(self._send_to, targets), *starmap(self._forward, pairs)])
        finally:
            give_back_freed_buffers()  # of the chunks that were read and sent

    def _check_room(self, device: str) -> None:
        """Raise NoRoomAhead if a device would have to store more than it may."""
        needed = self._needed_bytes[device]
        if self._room_bytes is not None and needed > (room := self._room_bytes.get(device, 0)):
            name = self._fleet.devices[device].name
            raise NoRoomAhead(
                f"{name} would have to store {format_bytes(needed)} ahead, and {format_bytes(room)} are allowed"
            )

    async def _lacking_chunks(self, device: str, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those that the device lacks, or holds damaged: they are found and replaced in one round."""
        seconds = _FIND_SECONDS + sum(chunk.num_bytes for chunk in chunks) / _MIN_DISK_BYTES_PER_SECOND
        missing = await self._missing_hashes(device, [chunk.hash for chunk in chunks], verify=True, seconds=seconds)
        return [chunk for chunk in chunks if chunk.hash in missing]

    async def _held_hashes(self, hashes: set[str]) -> dict[str, set[str]]:
        """Which of these hashes each usable device has. A device that does not answer is left out."""
        if not hashes:
            return {}

        async def held_by(device: str) -> set[str]:
            try:
                return hashes - await self._missing_hashes(device, sorted(hashes))
            except HearthError:
                return set()

        devices = [device.device_id for device in self._fleet.usable()]
        held = dict(zip(devices, await asyncio.gather(*map(held_by, devices)), strict=True))
        return {device: found_hashes for device, found_hashes in held.items() if found_hashes}

    async def _missing_hashes(
        self, device: str, hashes: Sequence[str], verify: bool = False, seconds: float = _FIND_SECONDS
    ) -> set[str]:
        request = FindMissing(holder=self._fleet.holder, hashes=tuple(hashes), verify=verify)
        return set((await self._fleet.ask(device, request, ChunksMissing, timeout_seconds=seconds)).hashes)

    def _notify_change(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _record_received(self, source: str | None, target: str, chunks: Sequence[Chunk]) -> None:
        self._scheduler.mark_received(source, target, chunks)
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        if source is None:
            self.sent_bytes += num_bytes
        else:
            self.forwarded_bytes += num_bytes
        self._received_bytes[target] += num_bytes
        if self._room_bytes is not None:
            self._room_bytes[target] -= num_bytes
        self._report_progress(target)

    def _report_progress(self, device: str) -> None:
        self._progress(self._fleet.devices[device].name, self._received_bytes[device], self._needed_bytes[device])

    # ---- from the coordinator ---------------------------------------------------------------------------------------

    async def _send_to(self, target: str) -> None:
        """Send `target` the chunks that must come from the coordinator, until it has all it needs."""
        puts: set[asyncio.Task[None]] = set()
        try:
            async with self._fleet.bulk_connection(target) as connection:
                while not self._scheduler.is_complete(target):
                    while (
                        self._has_room(target) and (chunk := self._scheduler.next_from_coordinator(target)) is not None
                    ):
                        self._in_flight_bytes[target] += chunk.num_bytes
                        puts.add(asyncio.ensure_future(self._put(connection, target, chunk)))
                    await self._changed.wait()
                    for put in [put for put in puts if put.done()]:
                        puts.remove(put)
                        put.result()
        finally:
            await cancel_all(puts)

    def _has_room(self, target: str) -> bool:
        in_flight = self._in_flight_bytes[target]
        return in_flight == 0 or (
            in_flight < _DEVICE_WINDOW_BYTES and sum(self._in_flight_bytes.values()) < _TOTAL_WINDOW_BYTES
        )

    async def _put(self, connection: RpcClient, target: str, chunk: Chunk) -> None:
        try:
            await self._pause()
            data = await on_disk(Path(chunk.path), FILE_SECONDS, chunk.read)
            request = PutChunk(holder=self._fleet.holder, hash=chunk.hash)
            await connection.call(request, [data], timeout_seconds=_CHUNK_SECONDS)
            self._record_received(None, target, [chunk])
        finally:
            self._in_flight_bytes[target] -= chunk.num_bytes
            self._notify_change()

    # ---- from device to device --------------------------------------------------------------------------------------

    async def _forward(self, source: str, target: str) -> None:
        """Have `target` fetch chunks from `source` in batches, until it needs no more or `source` has failed it."""
        max_bytes = _MIN_BATCH_BYTES
        while not self._scheduler.pair_is_finished(source, target):
            batch = self._scheduler.next_from_device(source, target, _MIN_BATCH_BYTES, max_bytes)
            if not batch:
                await self._changed.wait()
                continue
            await self._pause()
            began = loop_time()
            missing = await self._fetch(source, target, batch)
            seconds = loop_time() - began
            received = [chunk for chunk in batch if chunk.hash not in missing]
            self._record_received(source, target, received)
            if missing:
                missed = [chunk for chunk in batch if chunk.hash in missing]
                self._scheduler.mark_missed(source, target, missed, give_up_pair=not received)
            rate = sum(chunk.num_bytes for chunk in received) / seconds
            max_bytes = int(min(max(rate * _TARGET_BATCH_SECONDS, 1), _MAX_BATCH_BYTES))
            self._notify_change()

    async def _fetch(self, source: str, target: str, batch: Sequence[Chunk]) -> set[str]:
        """Fetch a batch; returns the missing hashes: the source is slow or gone, or its chunk is damaged."""
        hashes = tuple(chunk.hash for chunk in batch)
        request = partial(FetchChunks, holder=self._fleet.holder, hashes=hashes, seconds=FETCH_SECONDS)
        source_device, target_device = self._fleet.devices[source], self._fleet.devices[target]
        try:
            fetched = await ask_with_listener(
                self._fleet, target_device, source_device, request, ChunksFetched, FETCH_SECONDS
            )
        except HearthError:
            return await self._missing_hashes(target, hashes)
        return set(fetched.missing)
