"""The exchange of KV cache rows between ranks: copies while sequences run, and moves from the ranks of an earlier plan.

Each rank sends new rows to the rank that keeps the copy (`kept_caches.keeper_of`) at the end of a step, when it has a whole
piece of them, and no more than a small share of the link's capacity: activations are more urgent. The copy may lag behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agent.worker.transformer.comm.communicator import Communicator
from agent.worker.transformer.comm.staging import Staging
from agent.worker.transformer.kv_cache import CacheCopies, CopiedRows, KeptCaches, KeptStream
from agent.worker.transformer.paged_cache import PagedRows, SequenceCache, stored_row
from hearth.errors import BadMessage
from hearth.plan.geometry import Span
from hearth.plan.kept_caches import CacheTransfer, cached_block, copied_block, keeper_of
from hearth.plan.phases import Phase
from hearth.plan.plan import TransformerPlan
from hearth.wire.codec import Array
from hearth.wire.framing import TileKey
from hearth.wire.messages import AdoptedPrefixes, MovedCache, NewSequence, Sampling, StepOrder, split_keys

log = logging.getLogger("hearth.worker")

# Rows of a sequence that are copied together: fewer cost more messages, more are computed again after a loss.
_MAX_COPIED_ROWS = 16
_MAX_COPIED_BYTES = 256 << 10  # of one message: 16 ms on a link of 125 Mbit/s
_COPY_SHARE = 0.1  # of a link's capacity for copies, at most: so much do they delay steps while a long prompt is copied
_MAX_BURST_SECONDS = 0.02  # of a link's capacity at once, also after an idle time
_MOVED_BYTES = 1 << 20  # of one message: a block of many rows is sent in several, which bounds the memory of each
_TRANSFER_MARGIN = 5.0  # on the predicted time of a move, for links that are slower than measured


class _Transfer(NamedTuple):
    """A block of the first rows of what is kept, which a sequence's cache on the target gets."""

    transfer: CacheTransfer
    num_rows: int
    kept: KeptStream
    cache: SequenceCache


class CacheExchange:
    """One rank's part in the exchange. `kept` are the KV caches of earlier plans that this rank has."""

    def __init__(
        self, plan: TransformerPlan, rank: int, communicator: Communicator, staging: Staging, kept: KeptCaches
    ) -> None:
        self._spec = plan.model
        self._rank = rank
        self._communicator = communicator
        self._staging = staging
        self._kept = kept
        self._block = cached_block(plan.model, plan.body, rank)
        self._keeper = keeper_of(rank, plan.num_ranks)
        self._copies: CacheCopies | None = None
        self._sends_copies = False
        if (copied := copied_block(plan.model, plan.body, rank)) is not None:
            assert plan.body.generation is not None
            self._sends_copies = self._block.size > 0
            self._row_bytes = self._block.num_bytes(plan.model)
            self._rate = communicator.bytes_per_second_to(self._keeper)
            self._credit_bytes, self._credit_at = 0.0, time.monotonic()
            self._copies = CacheCopies(plan.model, copied, plan.body.generation.kv_tokens)
            communicator.keep_copies(self._copies.accept)

    def begin(self, sequence: int) -> None:
        """A sequence begins."""
        if self._copies is not None:
            self._copies.begin(sequence)

    def free(self, order: StepOrder) -> None:
        """Free what the order frees."""
        self._kept.drop(order.dropped_streams)
        if self._copies is not None:
            for sequence in order.freed:
                self._copies.free(sequence)

    def keep(self, caches: Mapping[int, SequenceCache]) -> KeptCaches:
        """All that this rank has of the KV caches of named streams, copied out of the plan's memory. Ends the exchange."""
        for sequence, cache in caches.items():
            if cache.stream:
                copy = self._copies.take(sequence) if self._copies is not None else None
                num_own = cache.num_settled_rows
                num_rows = max(num_own, copy.num_rows if copy is not None else 0)
                own = CopiedRows(cache.block)
                if num_own and self._block.size:
                    own.add(0, cache.rows(cache.block, Span(0, num_own)).to("cpu", copy=True).numpy())
                self._kept.add(
                    cache.stream, cache.settled_tokens[:num_rows], [own, *([copy] if copy is not None else [])]
                )
        return self._kept

    # ---- copies ---------------------------------------------------------------------------------------------------

    def send_copies(self, caches: Mapping[int, SequenceCache]) -> None:
        """Send new rows of the sequences to the rank that keeps the copy. Call it after each step."""
        if not self._sends_copies:
            return
        count = min(max(_MAX_COPIED_BYTES // self._row_bytes, 1), _MAX_COPIED_ROWS)
        num_bytes = count * self._row_bytes
        now = time.monotonic()
        earned = (now - self._credit_at) * _COPY_SHARE * self._rate
        self._credit_bytes = min(self._credit_bytes + earned, max(_MAX_BURST_SECONDS * self._rate, num_bytes))
        self._credit_at = now
        for sequence, cache in sorted(caches.items(), key=lambda item: item[1].num_settled_rows - item[1].num_copied):
            while cache.num_settled_rows - cache.num_copied >= count and self._credit_bytes >= num_bytes:
                rows = Span(cache.num_copied, cache.num_copied + count)
                key = self._communicator.key(0, Phase.CACHE_COPY, sequence, self._rank, rows.start)
                self._send(self._keeper, key, cache.rows(self._block, rows))
                cache.num_copied = rows.stop
                self._credit_bytes -= num_bytes

    def _send(self, target: int, key: TileKey, rows: Tensor) -> None:
        def send(tile: Array) -> None:
            self._communicator.send(target, key, tile)

        self._communicator.when_ready(self._staging.to_wire(rows), send)

    # ---- moves ----------------------------------------------------------------------------------------------------

    def move(self, moves: Sequence[tuple[MovedCache, SequenceCache]]) -> None:
        """Fill the first rows of these sequences on all ranks. Raises StepFailed."""
        seconds = sum(moved.transfer_seconds for moved, _ in moves)
        self._communicator.extend_timeout(_TRANSFER_MARGIN * seconds)
        # A stream's parts are given up even if the move fails, so that it is not tried again on the next plan.
        all_kept = [self._kept.take(moved.stream) for moved, _ in moves]
        self._transfer(
            _Transfer(transfer, len(moved.token_ids), kept, cache)
            for (moved, cache), kept in zip(moves, all_kept, strict=True)
            for transfer in moved.transfers
        )
        for moved, cache in moves:
            cache.extend(moved.token_ids)
            cache.advance()
            log.info("a stream continues with %d rows of its KV cache", cache.num_rows)

    def adopt(self, adopted: AdoptedPrefixes, memory: PagedRows) -> None:
        """Fill blocks of the memory with what the ranks have kept of the prefix cache. Raises StepFailed."""
        self._communicator.extend_timeout(_TRANSFER_MARGIN * adopted.kept.transfer_seconds)
        kept = KeptStream([], self._kept.take_prefixes(split_keys(adopted.kept.keys)))
        if not adopted.blocks:
            return
        cache = SequenceCache(memory, NewSequence(blocks=adopted.blocks, num_prompt_tokens=1, sampling=Sampling()))
        self._transfer(_Transfer(each, cache.capacity, kept, cache) for each in adopted.kept.transfers)
        log.info("%d blocks of the prefix cache are kept", len(adopted.blocks))

    def _transfer(self, transfers: Iterable[_Transfer]) -> None:
        """Send, receive and copy, all ranks at once."""
        numbered = list(enumerate(transfers))
        for number, (transfer, num_rows, kept, _) in numbered:
            if transfer.source == self._rank != transfer.target:
                for key, rows in self._pieces(number, transfer, num_rows):  # in host memory, so without staging
                    self._communicator.send(transfer.target, key, kept.rows(transfer.block, rows).numpy())
        for number, (transfer, num_rows, kept, cache) in numbered:
            if transfer.target == self._rank:
                self._fill(number, transfer, num_rows, kept, cache)

    def _fill(
        self, number: int, transfer: CacheTransfer, num_rows: int, kept: KeptStream, cache: SequenceCache
    ) -> None:
        """Copy or receive the rows of one block into the sequence's cache."""
        for key, rows in self._pieces(number, transfer, num_rows):
            if transfer.source == self._rank:
                cache.fill(transfer.block, rows, kept.rows(transfer.block, rows))
                continue
            (tile,) = self._communicator.receive([key])
            width, dtype = stored_row(self._spec)
            shape = (transfer.block.layers.size, 2, transfer.block.heads.size, rows.size, width)
            received = torch.empty(shape, dtype=dtype, device=self._staging.device)
            if tile.shape != shape or tile.itemsize != received.itemsize:
                raise BadMessage(reason=f"rows of a KV cache have the shape {tile.shape}")
            self._staging.from_wire(tile, received)
            cache.fill(transfer.block, rows, received)

    def _pieces(self, number: int, transfer: CacheTransfer, num_rows: int) -> list[tuple[TileKey, Span]]:
        """The messages of a transfer: their keys and rows."""
        at_once = max(_MOVED_BYTES // transfer.block.num_bytes(self._spec), 1)
        starts = range(0, num_rows, at_once)
        return [
            (
                self._communicator.key(number, Phase.CACHE_MOVE, transfer.target, transfer.source, index),
                Span(start, min(start + at_once, num_rows)),
            )
            for index, start in enumerate(starts)
        ]
