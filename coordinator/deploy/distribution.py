"""Distributes weight chunks: every device gets those that it lacks, from other devices or from the coordinator.

Normally the coordinator sends each chunk at most once; a device that has it forwards it to the others (see `spread`).
Chunks that a device already stores are not sent again, so an interrupted push resumes.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coordinator.deploy.spread import Chunk, Spread
from coordinator.devices.fleet import Fleet, ask_across
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import all_or_first_error, cancel_all
from hearth.wire.messages import ChunksFetched, ChunksMissing, FetchChunks, FindMissing, PutChunk
from hearth.wire.rpc import RpcClient

Progress = Callable[[str, int, int], None]  # device name, bytes received, bytes needed in total

# Limits of the bytes in flight from the coordinator. Per device: enough to hide the round trip and its disk writes. In
# total: bounds the coordinator's memory. A device with nothing in flight always gets a chunk.
_DEVICE_WINDOW_BYTES = 8 << 20
_WINDOW_BYTES = 32 << 20
_CHUNK_SECONDS = 120.0  # timeout for sending one chunk
# Bytes that a device fetches from another in one request: about 3 s worth, so that a slow source is noticed in time.
_LEAST_BATCH_BYTES = 4 << 20
_MOST_BATCH_BYTES = 32 << 20
_BATCH_AIM_SECONDS = 3.0  # intended time of a batch, from the rate of the last one
_BATCH_SECONDS = 55.0  # timeout of one batch; chunks missing by then come from another source


class Distribution:
    """Distributes the chunks of one plan. `sent_bytes`: sent by the coordinator; `passed_bytes`: forwarded by devices."""

    def __init__(self, fleet: Fleet, progress: Progress) -> None:
        self.sent_bytes = 0
        self.passed_bytes = 0
        self._fleet = fleet
        self._progress = progress
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = defaultdict(int)
        self._in_flight: dict[str, int] = defaultdict(int)  # bytes in flight from the coordinator, by device
        self._spread = Spread({}, {})
        self._changed = asyncio.Event()  # set, then replaced, at every change

    async def run(self, needed: Mapping[str, Sequence[Chunk]]) -> None:
        """Send each device the chunks that it needs and lacks. `needed`: chunks by device id.

        Raises BadCheckpoint, StoreFull, DeviceLost, ...
        """
        found = await all_or_first_error(self._lacking(device, chunks) for device, chunks in needed.items())
        lacking = dict(zip(needed, found, strict=True))
        held = await self._held({chunk.hash for chunks in lacking.values() for chunk in chunks})
        for device, chunks in lacking.items():
            self._totals[device] = sum(chunk.num_bytes for chunk in chunks)
            self._report(device)
        self._spread = Spread(lacking, held)
        targets = [device for device, chunks in lacking.items() if chunks]
        await all_or_first_error(
            [
                *(self._send_to(target) for target in targets),
                *(self._pass_on(one, other) for one in {*held, *targets} for other in targets if one != other),
            ]
        )

    async def _lacking(self, device: str, chunks: Sequence[Chunk]) -> list[Chunk]:
        missing = await self._missing(device, [chunk.hash for chunk in chunks])
        return [chunk for chunk in chunks if chunk.hash in missing]

    async def _held(self, hashes: set[str]) -> dict[str, set[str]]:
        """Which of these hashes each usable device has. A device that does not answer is left out."""
        if not hashes:
            return {}

        async def of(device: str) -> set[str]:
            try:
                return hashes - await self._missing(device, sorted(hashes))
            except HearthError:
                return set()

        devices = [device.device_id for device in self._fleet.usable()]
        held = dict(zip(devices, await asyncio.gather(*map(of, devices)), strict=True))
        return {device: found for device, found in held.items() if found}

    async def _missing(self, device: str, hashes: Sequence[str]) -> set[str]:
        request = FindMissing(holder=self._fleet.holder, hashes=tuple(hashes))
        return set((await self._fleet.ask(device, request, ChunksMissing)).hashes)

    def _change(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _came(self, source: str | None, target: str, chunks: Sequence[Chunk]) -> None:
        self._spread.arrived(source, target, chunks)
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        if source is None:
            self.sent_bytes += num_bytes
        else:
            self.passed_bytes += num_bytes
        self._done[target] += num_bytes
        self._report(target)

    def _report(self, device: str) -> None:
        self._progress(self._fleet.devices[device].name, self._done[device], self._totals[device])

    # ---- from the coordinator ---------------------------------------------------------------------------------------

    async def _send_to(self, target: str) -> None:
        """Send `target` the chunks that must come from the coordinator, until it has all it needs."""
        puts: set[asyncio.Task[None]] = set()
        try:
            async with self._fleet.bulk(target) as connection:
                while not self._spread.complete(target):
                    while self._has_room(target) and (chunk := self._spread.from_here(target)) is not None:
                        self._in_flight[target] += chunk.num_bytes
                        puts.add(asyncio.ensure_future(self._put(connection, target, chunk)))
                    await self._changed.wait()
                    for put in [put for put in puts if put.done()]:
                        puts.remove(put)
                        put.result()
        finally:
            await cancel_all(puts)

    def _has_room(self, target: str) -> bool:
        own = self._in_flight[target]
        return own == 0 or (own < _DEVICE_WINDOW_BYTES and sum(self._in_flight.values()) < _WINDOW_BYTES)

    async def _put(self, connection: RpcClient, target: str, chunk: Chunk) -> None:
        try:
            data = await asyncio.to_thread(chunk.read)
            request = PutChunk(holder=self._fleet.holder, hash=chunk.hash)
            await connection.call(request, [data], timeout_seconds=_CHUNK_SECONDS)
            self._came(None, target, [chunk])
        finally:
            self._in_flight[target] -= chunk.num_bytes
            self._change()

    # ---- from device to device --------------------------------------------------------------------------------------

    async def _pass_on(self, source: str, target: str) -> None:
        """Have `target` fetch chunks from `source` in batches, until it needs no more or `source` has failed it."""
        most_bytes = _LEAST_BATCH_BYTES
        while not self._spread.gives_up(source, target):
            batch = self._spread.from_device(source, target, _LEAST_BATCH_BYTES, most_bytes)
            if not batch:
                await self._changed.wait()
                continue
            began = time.monotonic()
            missing = await self._fetch(source, target, batch)
            seconds = time.monotonic() - began
            came = [chunk for chunk in batch if chunk.hash not in missing]
            self._came(source, target, came)
            if missing:
                late = [chunk for chunk in batch if chunk.hash in missing]
                self._spread.missed(source, target, late, nothing_came=not came)
            rate = sum(chunk.num_bytes for chunk in came) / seconds
            most_bytes = int(min(max(rate * _BATCH_AIM_SECONDS, 1), _MOST_BATCH_BYTES))
            self._change()

    async def _fetch(self, source: str, target: str, batch: Sequence[Chunk]) -> set[str]:
        """Fetch a batch; returns the missing hashes: the source is slow or gone, or its chunk is damaged."""
        hashes = tuple(chunk.hash for chunk in batch)
        request = partial(FetchChunks, holder=self._fleet.holder, hashes=hashes, seconds=_BATCH_SECONDS)
        there, here = self._fleet.devices[source], self._fleet.devices[target]
        try:
            fetched = await ask_across(self._fleet, here, there, request, ChunksFetched, _BATCH_SECONDS)
        except HearthError:
            return await self._missing(target, hashes)
        return set(fetched.missing)
