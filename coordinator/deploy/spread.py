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
    """Part of a model's weights, named by the SHA-256 of its bytes. `read` returns the bytes; any thread may call it."""

    hash: str
    num_bytes: int
    read: Callable[[], bytes | memoryview]


class Spread:
    """The chunks that each device has, lacks and is receiving. Devices are named by their ids."""

    def __init__(self, lacking: Mapping[str, Sequence[Chunk]], held: Mapping[str, Collection[str]]) -> None:
        """`lacking`: chunks that each device needs and does not have; `held`: hashes that each device has."""
        wanting = Counter(chunk.hash for chunks in lacking.values() for chunk in chunks)
        self._wanted: dict[str, dict[str, Chunk]] = {  # not present and not in flight; most-needed first
            target: {chunk.hash: chunk for chunk in sorted(chunks, key=lambda chunk: -wanting[chunk.hash])}
            for target, chunks in lacking.items()
        }
        self._on_way: Counter[str] = Counter()  # number of chunks in flight, by target
        self._on_way_from_here: Counter[str] = Counter()  # of them, from the coordinator
        self._coming: dict[str, str] = {}  # hash: device to which the coordinator is sending it
        self._holders: dict[str, set[str]] = defaultdict(set)
        # Queues of candidate hashes. Entries that are no longer needed, or that another source sends, are dropped when taken.
        self._for_here = {target: deque(wanted) for target, wanted in self._wanted.items()}
        self._offers: dict[tuple[str, str], deque[str]] = defaultdict(deque)  # by (source, target)
        self._refused: set[tuple[str, str]] = set()  # pairs (source, target) given up
        self._refused_chunks: set[tuple[str, str, str]] = set()  # (source, target, hash)
        for device, hashes in held.items():
            for each in hashes:
                self._holders[each].add(device)
        for target in self._wanted:
            self._offer_all(target)

    def complete(self, target: str) -> bool:
        """Whether `target` has everything it needs."""
        return not self._wanted[target] and not self._on_way[target]

    def gives_up(self, source: str, target: str) -> bool:
        """Whether `source` will send nothing more to `target`."""
        return self.complete(target) or (source, target) in self._refused

    # ---- next transfers --------------------------------------------------------------------------------------------

    def from_here(self, target: str) -> Chunk | None:
        """The next chunk for the coordinator to send to `target`, marked as in flight; None if there is none now."""
        queue, wanted = self._for_here[target], self._wanted[target]
        while queue:
            each = queue.popleft()
            if each not in wanted or self._comes_otherwise(each, target):
                continue
            self._coming[each] = target
            self._on_way[target] += 1
            self._on_way_from_here[target] += 1
            return wanted.pop(each)
        return None

    def from_device(self, source: str, target: str, least_bytes: int, most_bytes: int) -> list[Chunk]:
        """The next chunks for `source` to send to `target`, marked as in flight; empty if there are none now.

        While `source` still receives chunks from the coordinator, batches below `least_bytes` are held back.
        """
        offers, wanted = self._offers[source, target], self._wanted[target]
        taken: list[Chunk] = []
        num_bytes = 0
        while offers:
            chunk = wanted.get(offers[0])
            if taken and chunk is not None and num_bytes + chunk.num_bytes > most_bytes:
                break
            each = offers.popleft()
            if chunk is not None and self._may_give(source, target, each):
                taken.append(wanted.pop(each))
                num_bytes += chunk.num_bytes
        more_comes = bool(self._wanted.get(source) and self._for_here[source]) or self._on_way_from_here[source] > 0
        if num_bytes < least_bytes and more_comes:
            wanted.update((chunk.hash, chunk) for chunk in taken)
            offers.extendleft(chunk.hash for chunk in reversed(taken))
            return []
        self._on_way[target] += len(taken)
        return taken

    # ---- results ---------------------------------------------------------------------------------------------------

    def arrived(self, source: str | None, target: str, chunks: Iterable[Chunk]) -> None:
        """Record chunks that `target` received. `source` None: from the coordinator."""
        for chunk in chunks:
            self._on_way[target] -= 1
            if source is None:
                self._on_way_from_here[target] -= 1
                self._coming.pop(chunk.hash, None)
            self._has(target, chunk.hash)

    def missed(self, source: str, target: str, chunks: Sequence[Chunk], nothing_came: bool) -> None:
        """Record chunks that `source` did not deliver; other sources will. `nothing_came`: give the pair up."""
        if nothing_came:
            self._refused.add((source, target))
        for chunk in chunks:
            self._on_way[target] -= 1
            self._refused_chunks.add((source, target, chunk.hash))
            self._wanted[target][chunk.hash] = chunk
        self._offer_all(target)
        self._for_here[target] = deque(self._wanted[target])

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _offer_all(self, target: str) -> None:
        """Queue the chunks that `target` needs at every device that has them."""
        for each in self._wanted[target]:
            for holder in self._holders[each]:
                if holder != target and self._may_give(holder, target, each):
                    self._offers[holder, target].append(each)

    def _has(self, device: str, each: str) -> None:
        """Record that `device` has a chunk, and queue it for the devices that need it."""
        self._holders[each].add(device)
        for target, wanted in self._wanted.items():
            if each in wanted and self._may_give(device, target, each):
                self._offers[device, target].append(each)

    def _may_give(self, source: str, target: str, each: str) -> bool:
        return (source, target) not in self._refused and (source, target, each) not in self._refused_chunks

    def _comes_otherwise(self, each: str, target: str) -> bool:
        """Whether another device has the chunk or is receiving it, and may send it to `target`."""
        devices = set(self._holders[each])
        if each in self._coming:
            devices.add(self._coming[each])
        return any(device != target and self._may_give(device, target, each) for device in devices)
