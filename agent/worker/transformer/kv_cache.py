"""KV caches on one rank that outlive sequences: copies of another rank's, and those kept of earlier plans, in host memory.

Rows of some layers and KV heads (`CacheBlock`) have the shape [layers, 2, kv heads, rows, d], keys before values, in the format
of the cache (`paged_cache.to_format`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer.paged_cache import PagedRows, part_of, stored_row
from hearth.errors import BadMessage, StepFailed
from hearth.plan.geometry import Span
from hearth.plan.kept_caches import CacheBlock
from hearth.plan.model_spec import ModelSpec
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.codec import Array
from hearth.wire.messages import MAX_KEPT_TOKENS, HeldCache, HeldPrefixes, HeldRows

log = logging.getLogger("hearth.worker")


class CachedRows(Protocol):
    """The first `num_rows` rows of a block."""

    block: CacheBlock
    num_rows: int

    def rows(self, block: CacheBlock, rows: Span) -> Tensor:
        """Some rows of a part of the block."""


class CopiedRows:
    """The copy of a block's rows of one sequence, in the pieces in which they arrived.

    `num_rows` are there without a gap, of `num_held`. A gap is left by messages that were lost with a connection, until they
    are sent again.
    """

    def __init__(self, block: CacheBlock) -> None:
        self.block = block
        self.num_rows = self.num_held = 0
        self._pieces: list[Array] = []  # read-only, each with its own memory
        self._later: dict[int, Array] = {}  # pieces after a gap, by their first row

    def add(self, first_row: int, piece: Array) -> None:
        """Add rows; those that came before are ignored. Raises BadMessage if only some of them did."""
        if first_row in self._later or first_row + piece.shape[3] <= self.num_rows:  # sent again, over a new connection
            return
        if first_row < self.num_rows:
            raise BadMessage(reason=f"rows of a KV cache from {first_row} on, of which {self.num_rows} are there")
        self._later[first_row] = piece
        self.num_held += piece.shape[3]
        while (following := self._later.pop(self.num_rows, None)) is not None:
            self._pieces.append(following)
            self.num_rows += following.shape[3]

    def rows(self, block: CacheBlock, rows: Span) -> Tensor:
        """Some rows of a part of the block, copied."""
        wanted, first = [], 0
        for piece in self._pieces:
            start, stop = max(rows.start - first, 0), min(rows.stop - first, piece.shape[3])
            if start < stop:
                wanted.append(piece[part_of(self.block, block)][:, :, :, start:stop])
            first += piece.shape[3]
        return torch.from_numpy(np.concatenate(wanted, axis=3))


class CacheCopies:
    """Copies of another rank's KV caches, `block` of each sequence, in host memory. Thread-safe.

    Rows of a sequence arrive from its first step on that other rank, which may be before this rank begins it, until this rank
    has freed it. Sequences begin in the order of their numbers.
    """

    def __init__(self, spec: ModelSpec, block: CacheBlock, max_tokens: int) -> None:
        """`max_tokens` is the memory that the plan reserves, in tokens of all sequences together."""
        width, dtype = stored_row(spec)
        self._dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._shape = (block.layers.size, 2, block.heads.size, width)
        self._block = block
        self._max_tokens = max_tokens
        self._copies: dict[int, CopiedRows] = {}
        self._running: set[int] = set()
        self._newest = 0
        self._lock = threading.Lock()

    def accept(self, sequence: int, first_row: int, piece: Array) -> None:
        """Take rows of a sequence; those of one that has ended are ignored. Raises BadMessage."""
        if (
            piece.dtype != self._dtype
            or piece.ndim != 5
            or not piece.size
            or (*piece.shape[:3], piece.shape[4]) != self._shape
        ):
            raise BadMessage(reason=f"rows of a KV cache have the shape {piece.shape}")
        with self._lock:
            if sequence <= self._newest and sequence not in self._running:
                return
            if sum(copy.num_held for copy in self._copies.values()) + piece.shape[3] > self._max_tokens:
                raise BadMessage(reason="more rows of KV caches than the plan has room for")
            self._copies.setdefault(sequence, CopiedRows(self._block)).add(first_row, piece)

    def begin(self, sequence: int) -> None:
        """This rank begins the sequence."""
        with self._lock:
            self._newest = max(self._newest, sequence)
            self._running.add(sequence)

    def free(self, sequence: int) -> None:
        """Drop what there is of a sequence that has ended."""
        with self._lock:
            self._running.discard(sequence)
            self._copies.pop(sequence, None)

    def take(self, sequence: int) -> CopiedRows | None:
        """Hand over the copy of a sequence."""
        with self._lock:
            return self._copies.pop(sequence, None)


@dataclass
class KeptStream:
    """All that a worker has of the KV cache of one stream, for the prompt and answer `tokens`."""

    tokens: list[int]
    parts: list[CachedRows] = field(default_factory=list)

    def num_bytes(self, spec: ModelSpec) -> int:
        """Bytes of all rows."""
        return sum(part.block.num_bytes(spec, part.num_rows) for part in self.parts)

    def holds(self, block: CacheBlock, num_rows: int) -> bool:
        """Whether one part has these rows of the block."""
        return any(part.num_rows >= num_rows and part.block.covers(block) for part in self.parts)

    def rows(self, block: CacheBlock, rows: Span) -> Tensor:
        """Some rows of a block. Raises StepFailed if no part has them."""
        for part in self.parts:
            if part.num_rows >= rows.stop and part.block.covers(block):
                return part.rows(block, rows)
        raise StepFailed(device="this device", reason=f"it has not kept the rows {rows} of the KV cache's {block}")


class KeptPrefixes:
    """Blocks of an earlier plan's prefix cache by key, least recently used first, copied out of the plan's memory."""

    def __init__(self, memory: PagedRows, blocks: Sequence[tuple[bytes, int]]) -> None:
        self.block = memory.part
        self.keys = [key for key, _ in blocks]
        index = _rows_of([block for _, block in blocks]).to(memory.values.device)
        self._rows = memory.values.index_select(3, index).cpu()

    def shrink(self, num_blocks: int) -> None:
        """Keep the `num_blocks` most recently used blocks."""
        dropped = max(len(self.keys) - num_blocks, 0)
        if dropped:
            self.keys, self._rows = self.keys[dropped:], self._rows[:, :, :, dropped * KV_BLOCK_TOKENS :].clone()

    def pick(self, keys: Sequence[bytes]) -> PickedPrefixes:
        """The blocks with these keys, in this order. Raises KeyError."""
        places = {key: place for place, key in enumerate(self.keys)}
        return PickedPrefixes(self.block, self._rows, _rows_of([places[key] for key in keys]))


class PickedPrefixes:
    """Kept blocks one after the other, a `kv_cache.CachedRows`."""

    def __init__(self, block: CacheBlock, rows: Tensor, index: Tensor) -> None:
        self.block = block
        self.num_rows = len(index)
        self._rows = rows
        self._index = index

    def rows(self, block: CacheBlock, rows: Span) -> Tensor:
        """Some rows of a part of the block, copied."""
        return self._rows[part_of(self.block, block)].index_select(3, self._index[slice(*rows)])


def _rows_of(blocks: Sequence[int]) -> Tensor:
    """The rows of these blocks."""
    starts = torch.tensor(blocks, dtype=torch.int64) * KV_BLOCK_TOKENS
    return (starts[:, None] + torch.arange(KV_BLOCK_TOKENS)).flatten()


class KeptCaches:
    """The KV caches that a worker keeps over a change of plan, by stream, until the next plan has taken or dropped them."""

    def __init__(self) -> None:
        self._streams: dict[str, KeptStream] = {}
        self.prefixes: KeptPrefixes | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: str, tokens: list[int], parts: Iterable[CachedRows]) -> None:
        """Keep these parts of a stream's KV cache, instead of older ones."""
        if parts := [part for part in parts if part.num_rows and part.block.size]:
            self._streams[stream] = KeptStream(tokens, parts)

    def take(self, stream: str) -> KeptStream:
        """Hand over a stream's parts; there may be none."""
        return self._streams.pop(stream, KeptStream([]))

    def drop(self, streams: Iterable[str]) -> None:
        """Free what is kept of these streams."""
        for stream in streams:
            self._streams.pop(stream, None)

    def keep_only(self, streams: Iterable[str]) -> None:
        """Free what is kept of all other streams."""
        self.drop(self._streams.keys() - set(streams))

    def take_prefixes(self, keys: Sequence[bytes]) -> list[CachedRows]:
        """Hand over the blocks of the prefix cache with these keys, and free the others. Raises StepFailed."""
        prefixes, self.prefixes = self.prefixes, None
        try:
            return [prefixes.pick(keys)] if prefixes is not None and keys else []
        except KeyError:
            raise StepFailed(device="this device", reason="it has not kept a block of the prefix cache") from None

    def shrink(self, spec: ModelSpec, max_bytes: int) -> None:
        """Drop the longest streams until the rest takes at most `max_bytes`, and can be reported.

        What they leave is for the prefix cache.
        """
        by_length = sorted(self._streams.items(), key=lambda item: len(item[1].tokens))
        num_tokens = num_bytes = 0
        for stream, kept in by_length:
            num_tokens += len(kept.tokens)
            num_bytes += kept.num_bytes(spec)
            if num_tokens > MAX_KEPT_TOKENS or num_bytes > max_bytes:
                log.info("the KV cache of a stream of %d tokens has no room in the next plan", len(kept.tokens))
                self.drop([stream])
        if self.prefixes is not None:
            left = max_bytes - sum(kept.num_bytes(spec) for kept in self._streams.values())
            self.prefixes.shrink(left // self.prefixes.block.num_bytes(spec, KV_BLOCK_TOKENS))

    def report(self) -> tuple[HeldCache, ...]:
        """What is kept, for the coordinator."""
        return tuple(
            HeldCache(
                stream=stream,
                token_ids=np.asarray(kept.tokens, "<i4").tobytes(),
                parts=tuple(HeldRows(block=part.block, num_rows=part.num_rows) for part in kept.parts),
            )
            for stream, kept in self._streams.items()
        )

    def report_prefixes(self) -> HeldPrefixes | None:
        """What is kept of the prefix cache, for the coordinator."""
        if self.prefixes is None or not self.prefixes.keys:
            return None
        return HeldPrefixes(block=self.prefixes.block, keys=b"".join(self.prefixes.keys))
