"""Bytes that travel between devices for given pieces, before any tile is placed. Pure.

Tiles are taken to lie on devices evenly and in order: tile t of n on device t * D / n. A device that reads a region fetches
the part of it that lies elsewhere, once. The planners place tiles freely afterwards; this only compares pieces.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from coordinator.models.onnx.tiling.space import IndexSpace, Operand, Pieces, Range, Region, volume

Array: TypeAlias = "np.ndarray[Any, Any]"


class Spread(NamedTuple):
    """Regions of one tensor and the device of each, each pair once."""

    regions: tuple[tuple[Region, int], ...]

    @staticmethod
    def of(operand: Operand, tiles: list[tuple[Range, ...]], devices: list[int]) -> Spread:
        pairs = ((operand.region(ranges), device) for ranges, device in zip(tiles, devices, strict=True))
        return Spread(tuple(dict.fromkeys(pairs)))

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Spread:
        """The whole tensor on the first device."""
        return Spread(((tuple((0, size) for size in shape), 0),))

    @property
    def elements(self) -> int:
        """Number of elements on all devices."""
        return sum(volume(region) for region, _ in self.regions)


class TiledOperator:
    """What an operator cut into pieces reads and writes where, and the traffic within it."""

    def __init__(self, space: IndexSpace, pieces: Pieces, num_devices: int) -> None:
        self._space, self._num_devices = space, num_devices
        self._tiles = list(space.tiles(pieces))
        self.num_tiles = len(self._tiles)
        self._has_sums = space.has_partial_sums(pieces)
        self._devices = [tile * num_devices // self.num_tiles for tile in range(self.num_tiles)]

    def reads(self, position: int) -> Spread:
        """What the tiles read of an input."""
        return Spread.of(self._space.inputs[position], self._tiles, self._devices)

    def writes(self, position: int) -> Spread:
        """Where the blocks of an output are; with partial sums, where they are formed."""
        output = self._space.outputs[position]
        if not self._has_sums:
            return Spread.of(output, self._tiles, self._devices)
        return Spread(tuple((region, device) for region, device in self._formed.items()))

    @property
    def num_operators(self) -> int:
        """Tiles and formations."""
        return self.num_tiles + (len(self._formed) if self._has_sums else 0)

    @property
    def summed_elements(self) -> int:
        """Elements of partial sums that are sent to the device that adds them."""
        if not self._has_sums:
            return 0
        output = self._space.outputs[0]
        regions = [output.region(ranges) for ranges in self._tiles]
        return sum(
            volume(region)
            for region, device in dict.fromkeys(zip(regions, self._devices, strict=True))
            if self._formed[region] != device
        )

    @cached_property
    def _formed(self) -> dict[Region, int]:
        """By output block, the device that forms it."""
        output = self._space.outputs[0]
        regions = sorted({output.region(ranges) for ranges in self._tiles})
        return {region: number * self._num_devices // len(regions) for number, region in enumerate(regions)}


class Traffic:
    """Counts the elements that readers fetch from other devices. Repeated layers of a network are counted once."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, int], int] = {}
        self._known: dict[Spread, int] = {}
        self._arrays: list[tuple[Array, Array]] = []

    def number(self, spread: Spread) -> int:
        """A number for a spread; equal spreads have the same."""
        if spread not in self._known:
            self._known[spread] = len(self._known)
            regions, devices = zip(*spread.regions, strict=True)
            rank = len(regions[0])
            self._arrays.append((np.array(regions, np.int64).reshape(len(regions), rank, 2), np.array(devices)))
        return self._known[spread]

    def elements(self, written: int, read: int) -> int:
        """Elements that travel from where the spread `written` lies to where `read` is wanted."""
        if (written, read) not in self._counted:
            (blocks_BA2, owners_B), (wanted_RA2, readers_R) = self._arrays[written], self._arrays[read]
            start = np.maximum(blocks_BA2[:, None, :, 0], wanted_RA2[None, :, :, 0])
            stop = np.minimum(blocks_BA2[:, None, :, 1], wanted_RA2[None, :, :, 1])
            common_BR = np.clip(stop - start, 0, None).prod(axis=2)
            self._counted[written, read] = int(common_BR[owners_B[:, None] != readers_R[None, :]].sum())
        return self._counted[written, read]
