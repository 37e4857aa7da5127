"""Chunk scheduler: decides which source sends which chunk to which device, as chunks arrive. Pure.

The coordinator sends a chunk that no device has once, to the first device that lacks it and has room. The devices then
forward it among themselves while the coordinator sends others. If all devices need the whole model, it crosses the
coordinator's uplink once and each device's downlink once. A source that delivers nothing is not asked again by that
target; another device or the coordinator replaces it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Part of a model's weights, named by the SHA-256 of its bytes.

    `read` returns the bytes, from files below `path`; any thread may call it.
    """

    hash: str
    num_bytes: int
    read: Callable[[], bytes | memoryview]
    path: str = ""


class ChunkScheduler:
    """The chunks that each device has, lacks and is receiving. Devices are named by their ids."""

    def __init__(self, lacking: Mapping[str, Sequence[Chunk]], held: Mapping[str, Collection[str]]) -> None:
        """`lacking`: chunks that each device needs and does not have; `held`: hashes that each device has."""
        demand = Counter(chunk.hash for chunks in lacking.values() for chunk in chunks)
        self._pending: dict[str, dict[str, Chunk]] = {  # not present and not in flight; most-needed first
            target: {chunk.hash: chunk for chunk in sorted(chunks, key=lambda chunk: -demand[chunk.hash])}
            for target, chunks in lacking.items()
        }
        self._num_in_flight: Counter[str] = Counter()  # number of chunks in flight, by target
        self._num_in_flight_from_coordinator: Counter[str] = Counter()  # of them, from the coordinator
        self._coordinator_target: dict[str, str] = {}  # by hash: the device to which the coordinator is sending it
        self._holders: dict[str, set[str]] = defaultdict(set)
        # Queues of candidate hashes. Entries that are no longer needed, or that another source sends, are dropped when taken.
        self._coordinator_queues = {target: deque(wanted) for target, wanted in self._pending.items()}
        self._device_queues: dict[tuple[str, str], deque[str]] = defaultdict(deque)  # by (source, target)
        self._failed_pairs: set[tuple[str, str]] = set()  # pairs (source, target) given up
        self._failed_transfers: set[tuple[str, str, str]] = set()  # (source, target, hash)
        for device, hashes in held.items():
            for chunk_hash in hashes:
                self._holders[chunk_hash].add(device)
        for target in self._pending:
            self._enqueue_pending(target)

    def is_complete(self, target: str) -> bool:
        """Whether `target` has everything it needs."""
        return not self._pending[target] and not self._num_in_flight[target]

    def pair_is_finished(self, source: str, target: str) -> bool:
        """Whether `source` will send nothing more to `target`."""
        return self.is_complete(target) or (source, target) in self._failed_pairs

    # ---- next transfers --------------------------------------------------------------------------------------------

    def next_from_coordinator(self, target: str) -> Chunk | None:
        """The next chunk for the coordinator to send to `target`, marked as in flight; None if there is none now."""
        queue, pending = self._coordinator_queues[target], self._pending[target]
        while queue:
            chunk_hash = queue.popleft()
            if chunk_hash not in pending or self._has_other_source(chunk_hash, target):
                continue
            self._coordinator_target[chunk_hash] = target
            self._num_in_flight[target] += 1
            self._num_in_flight_from_coordinator[target] += 1
            return pending.pop(chunk_hash)
        return None

    def next_from_device(self, source: str, target: str, min_bytes: int, max_bytes: int) -> list[Chunk]:
        """The next chunks for `source` to send to `target`, marked as in flight; empty if there are none now.

        While `source` still receives chunks from the coordinator, batches below `min_bytes` are held back.
        """
        queue, pending = self._device_queues[source, target], self._pending[target]
        batch: list[Chunk] = []
        num_bytes = 0
        while queue:
            chunk = pending.get(queue[0])
            if batch and chunk is not None and num_bytes + chunk.num_bytes > max_bytes:
                break
            chunk_hash = queue.popleft()
            if chunk is not None and self._may_send(source, target, chunk_hash):
                batch.append(pending.pop(chunk_hash))
                num_bytes += chunk.num_bytes
        receives = self._num_in_flight_from_coordinator[source] > 0
        expects_more = receives or bool(self._pending.get(source) and self._coordinator_queues[source])
        if num_bytes < min_bytes and expects_more:
            pending.update((chunk.hash, chunk) for chunk in batch)
            queue.extendleft(chunk.hash for chunk in reversed(batch))
            return []
        self._num_in_flight[target] += len(batch)
        return batch

    # ---- results ---------------------------------------------------------------------------------------------------

    def mark_received(self, source: str | None, target: str, chunks: Iterable[Chunk]) -> None:
        """Record chunks that `target` received. `source` None: from the coordinator."""
        for chunk in chunks:
            self._num_in_flight[target] -= 1
            if source is None:
                self._num_in_flight_from_coordinator[target] -= 1
                self._coordinator_target.pop(chunk.hash, None)
            self._add_holder(target, chunk.hash)

    def mark_missed(self, source: str, target: str, chunks: Sequence[Chunk], give_up_pair: bool) -> None:
        """Record chunks that `source` did not deliver; other sources will. `give_up_pair`: ask `source` for nothing more."""
        if give_up_pair:
            self._failed_pairs.add((source, target))
        for chunk in chunks:
            self._num_in_flight[target] -= 1
            self._failed_transfers.add((source, target, chunk.hash))
            self._pending[target][chunk.hash] = chunk
        self._enqueue_pending(target)
        self._coordinator_queues[target] = deque(self._pending[target])

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _enqueue_pending(self, target: str) -> None:
        """Queue the chunks that `target` needs at every device that has them."""
        for chunk_hash in self._pending[target]:
            for holder in self._holders[chunk_hash]:
                if holder != target and self._may_send(holder, target, chunk_hash):
                    self._device_queues[holder, target].append(chunk_hash)

    def _add_holder(self, device: str, chunk_hash: str) -> None:
        """Record that `device` has a chunk, and queue it for the devices that need it."""
        self._holders[chunk_hash].add(device)
        for target, pending in self._pending.items():
            if chunk_hash in pending and self._may_send(device, target, chunk_hash):
                self._device_queues[device, target].append(chunk_hash)

    def _may_send(self, source: str, target: str, chunk_hash: str) -> bool:
        return (source, target) not in self._failed_pairs and (source, target, chunk_hash) not in self._failed_transfers

    def _has_other_source(self, chunk_hash: str, target: str) -> bool:
        """Whether another device has the chunk or is receiving it, and may send it to `target`."""
        devices = set(self._holders[chunk_hash])
        if chunk_hash in self._coordinator_target:
            devices.add(self._coordinator_target[chunk_hash])
        return any(device != target and self._may_send(device, target, chunk_hash) for device in devices)
