"""Brings every device the chunks that its shard needs and that it lacks: from devices that have them, else from here.

Each chunk leaves the coordinator at most once; who needs the same one gets it from the first device that has it. Nothing
is sent that a store already has, so that an interrupted push goes on where it was.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.fleet import Fleet
from hearth.errors import HearthError
from hearth.messages import (
    ChunkRef,
    ChunksFetched,
    ChunksMissing,
    Done,
    FetchChunks,
    FindMissing,
    OpenLinkProbe,
    PutChunk,
)
from hearth.model.checkpoint import Checkpoint
from hearth.model.sharding import cached_manifest, chunk_bytes, chunks_for_rank
from hearth.plan import Plan
from hearth.tasks import all_or_first_error

Progress = Callable[[str, int, int], None]  # device name, bytes that came, bytes to come in all

_CHUNKS_IN_FLIGHT = 4  # per device: hides the round trip, bounds the coordinator's memory
_CHUNK_SECONDS = 120.0
_BATCH_BYTES = 32 << 20  # that a device fetches from another before it reports
_BATCH_SECONDS = 55.0  # for one batch; what has not come by then comes from here


class Transfer(NamedTuple):
    """One chunk to one device. `source` is the device that sends it; None: the coordinator."""

    target: str
    source: str | None
    chunk: ChunkRef


def assign(
    lacking: Mapping[str, Sequence[ChunkRef]], held: Mapping[str, Collection[str]]
) -> tuple[list[Transfer], list[Transfer]]:
    """Who sends what: transfers that can begin at once, and those of chunks that these bring.

    `lacking` are the chunks that each device needs and has not, `held` the hashes that each device has. Of several that
    have a chunk, the one with the least to send sends it.
    """
    to_send: dict[str, int] = defaultdict(int)
    owners: dict[str, list[str]] = defaultdict(list)
    for device, hashes in held.items():
        for each in hashes:
            owners[each].append(device)
    first: list[Transfer] = []
    then: list[Transfer] = []
    brought: dict[str, list[str]] = defaultdict(list)
    for target, chunks in lacking.items():
        for chunk in chunks:
            having = [device for device in owners[chunk.hash] if device != target]
            following = not having and bool(brought[chunk.hash])
            candidates = having or brought[chunk.hash]
            source = min(candidates, key=lambda device: to_send[device]) if candidates else None
            if source is not None:
                to_send[source] += chunk.num_bytes
            if following:
                then.append(Transfer(target, source, chunk))
            else:
                first.append(Transfer(target, source, chunk))
                brought[chunk.hash].append(target)
    return first, then


class Distribution:
    """One plan's chunks. `sent_bytes` left the coordinator, `passed_bytes` went from device to device."""

    def __init__(self, fleet: Fleet, plan: Plan, progress: Progress) -> None:
        self.sent_bytes = 0
        self.passed_bytes = 0
        self._fleet = fleet
        self._plan = plan
        self._progress = progress
        self._names = {device.device_id: device.name for device in plan.devices}
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = defaultdict(int)

    async def run(self, model_dir: Path, cache_dir: Path) -> list[tuple[ChunkRef, ...]]:
        """Returns each rank's chunks, which its device now has. Raises BadCheckpoint, StoreFull, DeviceLost, ..."""
        plan = self._plan
        with Checkpoint(model_dir) as checkpoint:
            manifest = await asyncio.to_thread(cached_manifest, checkpoint, plan.model, cache_dir)
            per_rank = [chunks_for_rank(manifest, plan, rank) for rank in range(plan.num_ranks)]
            needed = {device.device_id: chunks for device, chunks in zip(plan.devices, per_rank, strict=True)}
            lacking = await self._lacking(needed)
            held = await self._held({chunk.hash for chunks in lacking.values() for chunk in chunks})
            for device, chunks in lacking.items():
                self._totals[device] = sum(chunk.num_bytes for chunk in chunks)
                self._progress(self._names[device], 0, self._totals[device])
            for transfers in assign(lacking, held):
                late = await self._fetch([each for each in transfers if each.source is not None], checkpoint, transfers)
                await self._send(late, checkpoint)
        return per_rank

    async def _lacking(self, needed: Mapping[str, Sequence[ChunkRef]]) -> dict[str, list[ChunkRef]]:
        missing = await all_or_first_error(
            self._missing(device, [chunk.hash for chunk in chunks]) for device, chunks in needed.items()
        )
        return {
            device: [chunk for chunk in chunks if chunk.hash in lacks]
            for (device, chunks), lacks in zip(needed.items(), missing, strict=True)
        }

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
        return dict(zip(devices, await asyncio.gather(*map(of, devices)), strict=True))

    async def _missing(self, device: str, hashes: Sequence[str]) -> set[str]:
        request = FindMissing(holder=self._fleet.holder, hashes=tuple(hashes))
        return set((await self._fleet.ask(device, request, ChunksMissing)).hashes)

    # ---- moving them ------------------------------------------------------------------------------------------------

    async def _fetch(
        self, transfers: Sequence[Transfer], checkpoint: Checkpoint, together: Sequence[Transfer]
    ) -> list[Transfer]:
        """Move what devices pass on, while the coordinator sends its own part of `together`; what did not come."""
        pairs: dict[tuple[str, str], list[Transfer]] = defaultdict(list)
        for each in transfers:
            assert each.source is not None
            pairs[each.source, each.target].append(each)
        own = [each for each in together if each.source is None]
        late: list[Transfer] = (await all_or_first_error([self._fetch_all(pairs), self._send(own, checkpoint)]))[0]
        return late

    async def _fetch_all(self, pairs: Mapping[tuple[str, str], Sequence[Transfer]]) -> list[Transfer]:
        found = await all_or_first_error(self._fetch_from(*pair, transfers) for pair, transfers in pairs.items())
        return [each for late in found for each in late]

    async def _fetch_from(self, source: str, target: str, transfers: Sequence[Transfer]) -> list[Transfer]:
        late: list[Transfer] = []
        for batch in _batches(transfers):
            missing = await self._fetch_batch(source, target, batch)
            late += [each for each in batch if each.chunk.hash in missing]
            came = sum(each.chunk.num_bytes for each in batch if each.chunk.hash not in missing)
            self.passed_bytes += came
            self._came(target, came)
        return late

    async def _fetch_batch(self, source: str, target: str, batch: Sequence[Transfer]) -> set[str]:
        """The hashes that did not come: the source is slow, or gone, or its chunk is damaged."""
        hashes = tuple(each.chunk.hash for each in batch)
        there, here = self._fleet.devices[source], self._fleet.devices[target]
        try:
            opened = OpenLinkProbe(peer_public_key=here.welcome.device_public_key, seconds=_BATCH_SECONDS + 5.0)
            await self._fleet.ask(source, opened, Done)
            request = FetchChunks(
                holder=self._fleet.holder,
                host=there.host,
                port=there.welcome.link_port,
                peer_public_key=there.welcome.device_public_key,
                hashes=hashes,
                seconds=_BATCH_SECONDS,
            )
            fetched = await self._fleet.ask(target, request, ChunksFetched, timeout_seconds=_BATCH_SECONDS + 10.0)
        except HearthError:
            return await self._missing(target, hashes)
        return set(fetched.missing)

    async def _send(self, transfers: Iterable[Transfer], checkpoint: Checkpoint) -> None:
        """From here, to all devices at once."""
        by_target: dict[str, list[ChunkRef]] = defaultdict(list)
        for each in transfers:
            by_target[each.target].append(each.chunk)
        await all_or_first_error(self._send_to(target, chunks, checkpoint) for target, chunks in by_target.items())

    async def _send_to(self, target: str, chunks: Sequence[ChunkRef], checkpoint: Checkpoint) -> None:
        spec, in_flight = self._plan.model, asyncio.Semaphore(_CHUNKS_IN_FLIGHT)

        async def put(chunk: ChunkRef) -> None:
            async with in_flight:
                data = await asyncio.to_thread(chunk_bytes, checkpoint, spec, chunk.kind, chunk.layer, chunk.grain)
                request = PutChunk(holder=self._fleet.holder, hash=chunk.hash)
                await self._fleet.call(target, request, [data], timeout_seconds=_CHUNK_SECONDS)
            self.sent_bytes += chunk.num_bytes
            self._came(target, chunk.num_bytes)

        await all_or_first_error(put(chunk) for chunk in chunks)

    def _came(self, target: str, num_bytes: int) -> None:
        self._done[target] += num_bytes
        self._progress(self._names[target], self._done[target], self._totals[target])


def _batches(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    batches: list[list[Transfer]] = []
    size = _BATCH_BYTES
    for each in transfers:
        if size + each.chunk.num_bytes > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(each)
        size += each.chunk.num_bytes
    return batches
