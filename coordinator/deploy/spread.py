"""Which chunk comes to which device from where, decided step by step as chunks arrive. Pure.

A chunk that no device has leaves the coordinator once, for the first device that lacks it and has room. From then on the
devices pass it on, while the coordinator sends others: where all need everything, its uplink carries the model once,
and every device's link as much. A device that does not give what it has is asked no more, and another, or the
coordinator, takes its place.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Part of the weights of a model, named by the SHA-256 of its bytes. `read` returns them, from any thread."""

    hash: str
    num_bytes: int
    read: Callable[[], bytes | memoryview]


class Spread:
    """What is still lacking where, who has what, and what is on its way. Devices are named by their ids."""

    def __init__(self, lacking: Mapping[str, Sequence[Chunk]], held: Mapping[str, Collection[str]]) -> None:
        """`lacking` are the chunks that each device needs and has not; `held` the hashes that each device has."""
        wanting = Counter(chunk.hash for chunks in lacking.values() for chunk in chunks)
        self._wanted: dict[str, dict[str, Chunk]] = {  # neither there nor on their way; those that most want first
            target: {chunk.hash: chunk for chunk in sorted(chunks, key=lambda chunk: -wanting[chunk.hash])}
            for target, chunks in lacking.items()
        }
        self._on_way: Counter[str] = Counter()  # by target
        self._on_way_from_here: Counter[str] = Counter()
        self._coming: dict[str, str] = {}  # hash: where it goes from here just now
        self._holders: dict[str, set[str]] = defaultdict(set)
        # Candidates, in order. What is found to be no longer wanted, or to come otherwise, is dropped on the way.
        self._for_here = {target: deque(wanted) for target, wanted in self._wanted.items()}
        self._offers: dict[tuple[str, str], deque[str]] = defaultdict(deque)  # by (source, target)
        self._refused: set[tuple[str, str]] = set()  # pairs (source, target) that are asked no more
        self._refused_chunks: set[tuple[str, str, str]] = set()  # (source, target, hash)
        for device, hashes in held.items():
            for each in hashes:
                self._holders[each].add(device)
        for target in self._wanted:
            self._offer_all(target)

    def complete(self, target: str) -> bool:
        """Whether everything is there that `target` lacked."""
        return not self._wanted[target] and not self._on_way[target]

    def gives_up(self, source: str, target: str) -> bool:
        """Whether nothing will ever go from `source` to `target` again."""
        return self.complete(target) or (source, target) in self._refused

    # ---- what to move now ------------------------------------------------------------------------------------------

    def from_here(self, target: str) -> Chunk | None:
        """The next chunk for the coordinator to send to `target`; it counts as on its way. None: there is none now."""
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
        """Chunks that `source` passes on to `target` next; they count as on their way. Empty: there are none now.

        As long as `source` still gets chunks from the coordinator, it collects at least `least_bytes` first.
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

    # ---- what became of it -----------------------------------------------------------------------------------------

    def arrived(self, source: str | None, target: str, chunks: Iterable[Chunk]) -> None:
        """These are now at `target`. `source` None: they came from the coordinator."""
        for chunk in chunks:
            self._on_way[target] -= 1
            if source is None:
                self._on_way_from_here[target] -= 1
                self._coming.pop(chunk.hash, None)
            self._has(target, chunk.hash)

    def missed(self, source: str, target: str, chunks: Sequence[Chunk], nothing_came: bool) -> None:
        """These did not come from `source`: others bring them. Where nothing came at all, it is asked no more."""
        if nothing_came:
            self._refused.add((source, target))
        for chunk in chunks:
            self._on_way[target] -= 1
            self._refused_chunks.add((source, target, chunk.hash))
            self._wanted[target][chunk.hash] = chunk
        self._offer_all(target)
        self._for_here[target] = deque(self._wanted[target])

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _offer_all(self, target: str) -> None:
        """What `target` wants, from all that have it."""
        for each in self._wanted[target]:
            for holder in self._holders[each]:
                if holder != target and self._may_give(holder, target, each):
                    self._offers[holder, target].append(each)

    def _has(self, device: str, each: str) -> None:
        """From now on: whoever wants it may have it from there."""
        self._holders[each].add(device)
        for target, wanted in self._wanted.items():
            if each in wanted and self._may_give(device, target, each):
                self._offers[device, target].append(each)

    def _may_give(self, source: str, target: str, each: str) -> bool:
        return (source, target) not in self._refused and (source, target, each) not in self._refused_chunks

    def _comes_otherwise(self, each: str, target: str) -> bool:
        """Whether another device has it, or gets it just now, and may give it to `target`."""
        devices = set(self._holders[each])
        if each in self._coming:
            devices.add(self._coming[each])
        return any(device != target and self._may_give(device, target, each) for device in devices)
