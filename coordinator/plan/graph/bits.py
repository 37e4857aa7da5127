"""Sets of small numbers as the bits of an integer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def set_bits(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, in ascending order."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def reachable_sets(neighbours: Sequence[Iterable[int]], order: Iterable[int]) -> list[int]:
    """For each vertex, the set of vertices reachable from it. `order` lists every vertex after its neighbours."""
    reachable = [0] * len(neighbours)
    for vertex in order:
        for other in neighbours[vertex]:
            reachable[vertex] |= reachable[other] | 1 << other
    return reachable
