"""Collectives over the rows of a step.

Ring AllGather and ReduceScatter with overlap by tiles (Galaxy, section III-D), and direct exchanges in one hop (all-to-all,
broadcast, one-shot AllReduce).

Shapes: T rows of the step, s rows of this rank, H hidden size. Tile k holds the rows of rank k; an empty tile is not sent. A
tile is sent in chunks of its rows (`tile_chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer.comm.communicator import Communicator
from agent.worker.transformer.comm.staging import CpuStaging, Staging, WireTile
from hearth.errors import BadMessage
from hearth.plan.geometry import Span
from hearth.plan.phases import Phase, forward_target, ring_all_gather, ring_reduce_scatter, tile_chunks
from hearth.wire.framing import TileKey


class Collectives:
    """The collectives of one step. `tiles[k]` are the rows of rank k; `step` is the step number (None: the running step)."""

    def __init__(
        self,
        communicator: Communicator,
        staging: Staging,
        tiles: Sequence[Span],
        overlap: bool,
        step: int | None = None,
    ) -> None:
        self.rank = communicator.rank
        self.num_ranks = communicator.num_ranks
        self.tiles = tuple(tiles)
        self._communicator = communicator
        self._staging = staging
        self._overlap = overlap
        self._step = step
        self._next = (self.rank + 1) % self.num_ranks
        self._previous = (self.rank - 1) % self.num_ranks

    @property
    def own_rows(self) -> Span:
        return self.tiles[self.rank]

    @property
    def num_rows(self) -> int:
        return self.tiles[-1].stop

    def all_gather(self, layer: int, phase: Phase, own_sH: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield `(tile index, rows)` of every non-empty tile: the own tile first, the others in order of arrival.

        Without overlap, the first tile is yielded when all have arrived.
        """
        gathered_TH = own_sH.new_empty(self.num_rows, *own_sH.shape[1:])
        if self.own_rows.size:
            target = forward_target(self.num_ranks, self.rank, self.rank)
            if target is not None:
                self._send(target, layer, phase, self.rank, own_sH)
        arrivals = self._arrivals(layer, phase, gathered_TH)
        if not self._overlap:
            arrivals = iter(list(arrivals))
        if self.own_rows.size:
            yield self.rank, own_sH
        yield from arrivals

    def all_gather_rows(self, layer: int, phase: Phase, own_sH: Tensor) -> Tensor:
        """AllGather: all rows [T, ...] in one tensor."""
        all_TH = own_sH.new_empty(self.num_rows, *own_sH.shape[1:])
        for tile, rows in self.all_gather(layer, phase, own_sH):
            all_TH[slice(*self.tiles[tile])] = rows
        return all_TH

    def reduce_scatter(self, layer: int, phase: Phase, partial_sum: Callable[[int], Tensor]) -> Tensor:
        """Sum `partial_sum(tile)` over all ranks, in ring order; return the own tile's sum [s,H].

        The communication thread adds and forwards the partial sums; only the own tile's sum is awaited.
        """
        steps = ring_reduce_scatter(self.num_ranks, self.rank)
        precomputed = (
            None if self._overlap else {s.compute: partial_sum(s.compute) for s in steps if self.tiles[s.compute].size}
        )
        own: Tensor | None = None
        for step in steps:
            tile = step.compute
            if not self.tiles[tile].size and tile != self.rank:
                continue
            own = precomputed[tile] if precomputed is not None and tile in precomputed else partial_sum(tile)
            if step.send is not None:
                if step.receive is None:
                    self._send(self._next, layer, phase, tile, own)
                else:
                    self._reduce(layer, phase, tile, own)
        assert own is not None  # the own tile is always the last step
        if self.num_ranks > 1 and self.own_rows.size:
            chunks = self._chunks(own)
            keys = self._keys(layer, phase, self.rank, self._previous, len(chunks))
            for chunk, received in zip(chunks, self._communicator.receive(keys), strict=True):
                self._write_tile(received, own[slice(*chunk)], add=True)
        return own

    def all_to_all_send(self, layer: int, phase: Phase, rows_for_target: Callable[[int], Tensor | None]) -> None:
        """Sending half of an all-to-all: send each peer its rows directly, as soon as `rows_for_target` returns them.

        If it returns None, nothing is sent; the peer must know that and not wait.
        """
        for target in self._targets:
            rows = rows_for_target(target)
            if rows is not None:
                self._send(target, layer, phase, target, rows)

    def send_rows(self, target: int, layer: int, phase: Phase, rows: Tensor) -> None:
        """Send rows to one peer, which gets them by `receive_rows`."""
        self._send(target, layer, phase, target, rows)

    def broadcast(self, layer: int, phase: Phase, rows: Tensor) -> None:
        """Send the same rows to every peer directly."""
        for index, chunk in enumerate(self._chunks(rows)):
            keys = {
                target: self._communicator.key(layer, phase, target, self.rank, index, self._step)
                for target in self._targets
            }
            staged = self._staging.to_wire(self._part(rows, chunk))
            self._communicator.when_ready(staged, partial(self._communicator.send_to_all, keys))

    def one_shot_all_reduce(
        self, layer: int, phase: Phase, own_BH: Tensor | None, sources: Sequence[int], like_BH: Tensor
    ) -> Tensor:
        """AllReduce in one hop: every rank of `sources` sends its partial sum to all ranks, and every rank adds them.

        For few rows, link latency dominates, so a ring would be slower. Partial sums are added in rank order, so that all
        ranks have identical results. `own_BH` is None if this rank is not a source; the result has the shape of `like_BH`. One
        rank alone gets its own rows back, not a copy.
        """
        if self.num_ranks == 1 and own_BH is not None:
            return own_BH
        if isinstance(self._staging, CpuStaging) and self._communicator.exchanges_inline(like_BH):
            return self._all_reduce_inline(layer, phase, own_BH, sources, like_BH)
        if own_BH is not None:
            self.broadcast(layer, phase, own_BH)
        total_BH = torch.empty_like(like_BH)
        for index, source in enumerate(sources):
            if source != self.rank:
                self.receive_rows(layer, phase, source, total_BH, add=index > 0)
            elif own_BH is not None:
                (total_BH.add_ if index else total_BH.copy_)(own_BH)
        return total_BH

    def _all_reduce_inline(
        self, layer: int, phase: Phase, own_BH: Tensor | None, sources: Sequence[int], like_BH: Tensor
    ) -> Tensor:
        """`one_shot_all_reduce` in this thread alone. Once the sums have arrived, they only have to be added."""
        key, rank = self._communicator.key, self.rank
        if own_BH is not None and not self._communicator.broadcast_inline(layer, phase, own_BH):
            self.broadcast(layer, phase, own_BH)
        awaited = {source: key(layer, phase, rank, source) for source in sources if source != rank}
        total_BH = torch.empty_like(like_BH)
        total, own = total_BH.numpy(), own_BH.numpy() if own_BH is not None else None
        terms = self._communicator.receive_inline(awaited, total.shape)
        for term in terms.values():
            _check_shape(term, total.shape)
        if own is not None:
            terms[rank] = own
        sums = terms[sources[0]]
        for source in sources[1:]:
            sums = np.add(sums, terms[source], out=total)
        if sums is not total:
            np.copyto(total, sums)
        return total_BH

    @property
    def _targets(self) -> list[int]:
        """The other ranks, in the order in which this rank sends to them."""
        return [(self.rank + offset) % self.num_ranks for offset in range(1, self.num_ranks)]

    @property
    def peers(self) -> list[int]:
        """The other ranks, in the order in which their `all_to_all_send` reaches this rank."""
        return [(self.rank - offset) % self.num_ranks for offset in range(1, self.num_ranks)]

    def receive_rows(self, layer: int, phase: Phase, source: int, into: Tensor, add: bool = False) -> None:
        """Wait for the rows that `source` has sent to this rank, and write them to `into`, or add them."""
        chunks = self._chunks(into)
        keys = self._keys(layer, phase, self.rank, source, len(chunks))
        for chunk, tile in zip(chunks, self._communicator.receive(keys), strict=True):
            self._write_tile(tile, self._part(into, chunk), add)

    def has_arrived(self, layer: int, phase: Phase, source: int, into: Tensor) -> bool:
        """Whether `receive_rows` would return without waiting."""
        keys = self._keys(layer, phase, self.rank, source, len(self._chunks(into)))
        return self._communicator.has_arrived(keys)

    def _send(self, target: int, layer: int, phase: Phase, tile: int, rows: Tensor) -> None:
        for index, chunk in enumerate(self._chunks(rows)):
            key = self._communicator.key(layer, phase, tile, self.rank, index, self._step)
            staged = self._staging.to_wire(self._part(rows, chunk))
            self._communicator.when_ready(staged, partial(self._communicator.send, target, key))

    def _reduce(self, layer: int, phase: Phase, tile: int, sums: Tensor) -> None:
        for index, chunk in enumerate(self._chunks(sums)):
            key = self._communicator.key(layer, phase, tile, self._previous, index, self._step)
            staged = self._staging.to_wire(sums[slice(*chunk)])
            self._communicator.when_ready(staged, partial(self._communicator.reduce, key))

    def _chunks(self, rows: Tensor) -> tuple[Span, ...]:
        return tile_chunks(rows.shape[0], rows.shape[1] * rows.element_size())

    def _part(self, rows: Tensor, chunk: Span) -> Tensor:
        # Slicing is not free: a decoding step sends few rows, many times.
        return rows if chunk.size == rows.shape[0] else rows[slice(*chunk)]

    def _keys(self, layer: int, phase: Phase, tile: int, source: int, num_chunks: int) -> list[TileKey]:
        return [self._communicator.key(layer, phase, tile, source, chunk, self._step) for chunk in range(num_chunks)]

    def _write_tile(self, tile: WireTile, into: Tensor, add: bool = False) -> None:
        _check_shape(tile, tuple(into.shape))
        (self._staging.add_from_wire if add else self._staging.from_wire)(tile, into)

    def _arrivals(self, layer: int, phase: Phase, gathered_TH: Tensor) -> Iterator[tuple[int, Tensor]]:
        order = [step.compute for step in ring_all_gather(self.num_ranks, self.rank)]
        waiting = [tile for tile in order if tile != self.rank and self.tiles[tile].size]
        rows = {tile: gathered_TH[slice(*self.tiles[tile])] for tile in waiting}
        chunks = {tile: self._chunks(rows[tile]) for tile in waiting}
        keys = {tile: self._keys(layer, phase, tile, tile, len(chunks[tile])) for tile in waiting}
        while waiting:
            index, arrived = self._communicator.receive_first([keys[tile] for tile in waiting])
            tile = waiting.pop(index)
            for chunk, array in zip(chunks[tile], arrived, strict=True):
                self._write_tile(array, rows[tile][slice(*chunk)])
            yield tile, rows[tile]


def _check_shape(tile: WireTile, shape: tuple[int, ...]) -> None:
    if tile.shape != shape:
        raise BadMessage(reason=f"a tile has the shape {tile.shape}, {shape} was expected")
