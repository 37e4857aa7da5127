"""Ring AllGather and ReduceScatter over the rows of a step, with tile overlap (Galaxy, section III-D).

Shapes: T rows of the step in all, s rows of this rank, H hidden. Tile k is the rows of rank k; a tile may be empty, then
nothing travels for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from agent.worker.communicator import Communicator
from agent.worker.staging import Staging, WireTile
from hearth import schedules
from hearth.errors import BadMessage
from hearth.framing import Phase
from hearth.geometry import Span


class Collectives:
    """The collectives of one step. `tiles[k]` are the rows of rank k."""

    def __init__(self, communicator: Communicator, staging: Staging, tiles: Sequence[Span], overlap: bool) -> None:
        self.rank = communicator.rank
        self.num_ranks = communicator.num_ranks
        self.tiles = tuple(tiles)
        self._communicator = communicator
        self._staging = staging
        self._overlap = overlap
        self._next = (self.rank + 1) % self.num_ranks
        self._previous = (self.rank - 1) % self.num_ranks

    @property
    def own(self) -> Span:
        return self.tiles[self.rank]

    @property
    def num_rows(self) -> int:
        return self.tiles[-1].stop

    def all_gather(self, layer: int, phase: Phase, own_sH: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield `(tile index, rows)` of every non-empty tile: our own first, the others in the order of arrival.

        With overlap off, all tiles have arrived before the first is yielded.
        """
        gathered_TH = own_sH.new_empty(self.num_rows, *own_sH.shape[1:])
        if self.own.size:
            target = schedules.forwards_to(self.num_ranks, self.rank, self.rank)
            if target is not None:
                key = self._communicator.key(layer, phase, self.rank, self.rank)
                self._communicator.send_when_ready(target, key, self._staging.to_wire(own_sH))
        arrivals = self._arrivals(layer, phase, gathered_TH)
        if not self._overlap:
            arrivals = iter(list(arrivals))
        if self.own.size:
            yield self.rank, own_sH
        yield from arrivals

    def all_gather_rows(self, layer: int, phase: Phase, own_sH: Tensor) -> Tensor:
        """All rows [T, ...] at once."""
        all_TH = own_sH.new_empty(self.num_rows, *own_sH.shape[1:])
        for tile, rows in self.all_gather(layer, phase, own_sH):
            all_TH[slice(*self.tiles[tile])] = rows
        return all_TH

    def reduce_scatter(self, layer: int, phase: Phase, partial: Callable[[int], Tensor]) -> Tensor:
        """Sum `partial(tile)` over all ranks; return our own tile's sum [s,H]. Sums are added in ring order."""
        steps = schedules.ring_reduce_scatter(self.num_ranks, self.rank)
        ahead = None if self._overlap else {s.compute: partial(s.compute) for s in steps if self.tiles[s.compute].size}
        summed: Tensor | None = None
        for step in steps:
            tile = step.compute
            if not self.tiles[tile].size and tile != self.rank:
                continue
            summed = ahead[tile] if ahead is not None and tile in ahead else partial(tile)
            if step.receive is not None and self.tiles[tile].size:
                key = self._communicator.key(layer, phase, tile, self._previous)
                received = torch.empty_like(summed)
                self._copy(self._communicator.take(key), received)
                summed = received.add_(summed)
            if step.send is not None:
                key = self._communicator.key(layer, phase, tile, self.rank)
                self._communicator.send_when_ready(self._next, key, self._staging.to_wire(summed))
        assert summed is not None  # the own tile is always the last step
        return summed

    def scatter_rows(self, phase: Phase, rows_for_target: Callable[[int], Tensor | None]) -> None:
        """Send each peer its rows directly, in one hop (None: nothing for it)."""
        for offset in range(1, self.num_ranks):
            target = (self.rank + offset) % self.num_ranks
            rows = rows_for_target(target)
            if rows is not None:
                key = self._communicator.key(0, phase, target, self.rank)
                self._communicator.send_when_ready(target, key, self._staging.to_wire(rows))

    def collect_rows(self, phase: Phase, source: int, into: Tensor) -> None:
        """Wait for the rows that `source` sent us with `scatter_rows`, and write them to `into`."""
        key = self._communicator.key(0, phase, self.rank, source)
        self._copy(self._communicator.take(key), into)

    def _copy(self, tile: WireTile, into: Tensor) -> None:
        if tile.shape != tuple(into.shape):
            raise BadMessage(reason=f"a tile has the shape {tile.shape}, {tuple(into.shape)} was expected")
        self._staging.from_wire(tile, into)

    def _arrivals(self, layer: int, phase: Phase, gathered_TH: Tensor) -> Iterator[tuple[int, Tensor]]:
        order = [step.compute for step in schedules.ring_all_gather(self.num_ranks, self.rank)]
        waiting = [
            self._communicator.key(layer, phase, tile, tile)
            for tile in order
            if tile != self.rank and self.tiles[tile].size
        ]
        while waiting:
            key, tile = self._communicator.take_any(waiting)
            waiting.remove(key)
            rows = gathered_TH[slice(*self.tiles[key.tile])]
            self._copy(tile, rows)
            yield key.tile, rows
