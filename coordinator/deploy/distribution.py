"""Brings every device the chunks that its shard needs and that it lacks: from devices that have them, else from here.

Each chunk leaves the coordinator at most once, and is passed on as soon as a device has it (`spread` decides). Nothing is
sent that a store already has, so that an interrupted push goes on where it was.
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

Progress = Callable[[str, int, int], None]  # device name, bytes that came, bytes to come in all

# On their way from here: enough per device to hide the round trip and the writing on its disk, and a bound in all on
# what the coordinator holds of a model. A device to which nothing is on its way always gets a chunk.
_DEVICE_WINDOW_BYTES = 8 << 20
_WINDOW_BYTES = 32 << 20
_CHUNK_SECONDS = 120.0
# What a device fetches from another before it reports: some seconds' worth, so that a slow one is noticed in time.
_LEAST_BATCH_BYTES = 4 << 20
_MOST_BATCH_BYTES = 32 << 20
_BATCH_AIM_SECONDS = 3.0
_BATCH_SECONDS = 55.0  # for one batch; what has not come by then comes from elsewhere


class Distribution:
    """The chunks of one plan. `sent_bytes` left the coordinator, `passed_bytes` went from device to device."""

    def __init__(self, fleet: Fleet, progress: Progress) -> None:
        self.sent_bytes = 0
        self.passed_bytes = 0
        self._fleet = fleet
        self._progress = progress
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = defaultdict(int)
        self._in_flight: dict[str, int] = defaultdict(int)  # bytes on their way from here, by device
        self._spread = Spread({}, {})
        self._changed = asyncio.Event()  # replaced at every change

    async def run(self, needed: Mapping[str, Sequence[Chunk]]) -> None:
        """Bring each device, named by its id, the chunks that it needs and does not have.

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
        """Which of these every device of the home has; one that does not answer has none."""
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
        """Wake all that wait for something to do."""
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

    # ---- from here --------------------------------------------------------------------------------------------------

    async def _send_to(self, target: str) -> None:
        """Whatever has to come from here, until `target` has all."""
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
        """Have `target` fetch what `source` has, batch by batch, as long as there may be any."""
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
        """The hashes that did not come: the source is slow, or gone, or its chunk is damaged."""
        hashes = tuple(chunk.hash for chunk in batch)
        request = partial(FetchChunks, holder=self._fleet.holder, hashes=hashes, seconds=_BATCH_SECONDS)
        there, here = self._fleet.devices[source], self._fleet.devices[target]
        try:
            fetched = await ask_across(self._fleet, here, there, request, ChunksFetched, _BATCH_SECONDS)
        except HearthError:
            return await self._missing(target, hashes)
        return set(fetched.missing)
