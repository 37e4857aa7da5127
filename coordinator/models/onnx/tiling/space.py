"""The index space of an operator, and the regions of its tensors that one tile reads and writes. Pure geometry.

An operator computes over an index space: a matrix product over rows i, columns j and the summed axis k. `pieces` cut each
index axis into nearly equal ranges; a tile is one combination of ranges. If a summed axis is cut, the tiles of one output
block are partial sums (joins), and a formation operator adds them (Doppler, arXiv 2505.23131; einsummable).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

Range = tuple[int, int]  # from, up to but without
Region = tuple[Range, ...]  # a range per axis of a tensor
Shape = tuple[int, ...]
Pieces = tuple[int, ...]  # of each index axis


class CannotCut(Exception):
    """The operator must stay whole. The message completes the sentence "it stays whole because ..."."""


class Along(NamedTuple):
    """A tensor axis that follows an index axis: `scale` elements per index."""

    index_axis: int
    scale: int = 1

    def range_of(self, ranges: Sequence[Range], size: int) -> Range:
        start, stop = ranges[self.index_axis]
        return start * self.scale, stop * self.scale


class Window(NamedTuple):
    """The rows that a sliding window reads: index r covers `reach` rows from r * stride - pad. With halo, tiles overlap."""

    index_axis: int
    stride: int
    reach: int
    pad: int

    def unclipped(self, ranges: Sequence[Range]) -> Range:
        start, stop = ranges[self.index_axis]
        return start * self.stride - self.pad, (stop - 1) * self.stride - self.pad + self.reach

    def range_of(self, ranges: Sequence[Range], size: int) -> Range:
        start, stop = self.unclipped(ranges)
        return max(start, 0), min(stop, size)

    def padding(self, ranges: Sequence[Range], size: int) -> tuple[int, int]:
        """Rows of padding before and after the rows that the tile reads."""
        start, stop = self.unclipped(ranges)
        return max(-start, 0), max(stop - size, 0)


Axis: TypeAlias = "Along | Window | None"  # None: every tile has the whole axis


class Operand(NamedTuple):
    """A tensor of an operator, and how each of its axes follows the index space. An omitted one has no name."""

    name: str
    shape: Shape
    axes: tuple[Axis, ...]

    def region(self, ranges: Sequence[Range]) -> Region:
        return tuple(
            (0, size) if axis is None else axis.range_of(ranges, size)
            for axis, size in zip(self.axes, self.shape, strict=True)
        )


def whole(name: str, shape: Shape | None) -> Operand:
    """An operand that every tile has whole."""
    shape = shape or ()
    return Operand(name, shape, (None,) * len(shape))


@dataclass(frozen=True)
class IndexSpace:
    """`sizes` of the index axes, those that are summed away, and the operands in the node's order.

    `added_once`: the number of an input that partial sums leave out and their formation adds, such as a bias.
    """

    sizes: Shape
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    summed: tuple[int, ...] = ()
    added_once: int | None = None

    @property
    def uncut(self) -> Pieces:
        """The pieces of an operator that stays whole."""
        return (1,) * len(self.sizes)

    def has_partial_sums(self, pieces: Pieces) -> bool:
        return any(pieces[axis] > 1 for axis in self.summed)

    def tiles(self, pieces: Pieces) -> Iterator[tuple[Range, ...]]:
        """The ranges of each tile, in lexicographic order. Raises ValueError for pieces that do not fit the index space."""
        if len(pieces) != len(self.sizes) or not all(
            1 <= count <= max(size, 1) for count, size in zip(pieces, self.sizes, strict=True)
        ):
            raise ValueError(f"pieces {pieces} do not fit an index space of {self.sizes}")
        return product(*(cut_evenly(size, count) for size, count in zip(self.sizes, pieces, strict=True)))


def cut_evenly(size: int, count: int) -> list[Range]:
    """`count` ranges whose sizes differ by at most 1."""
    return [(size * piece // count, size * (piece + 1) // count) for piece in range(count)]


def overlap(one: Region, other: Region) -> Region | None:
    """The region that both contain; None if that is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shape_of(region: Region) -> Shape:
    """The shape of a region."""
    return tuple(stop - start for start, stop in region)


def volume(region: Region) -> int:
    """Number of elements."""
    return math.prod(shape_of(region))
