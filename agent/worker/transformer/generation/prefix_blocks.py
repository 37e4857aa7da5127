"""Index of the prefix cache on one rank: the block of its KV cache for each prefix key. Pure.

Rank 0 decides (`block_pool`), and names full blocks that may be found again in step orders. All ranks take note, so that they
can say what they have when the plan ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixBlocks:
    """The blocks by key, least recently used first."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # the inverse

    def publish(self, block: int, key: bytes) -> None:
        """The block holds the rows of this key."""
        self.forget([block])
        if (other := self._blocks.get(key)) is not None:
            self.forget([other])
        self._blocks[key], self._keys[block] = block, key

    def use(self, blocks: Sequence[int]) -> None:
        """A sequence has used these blocks, in the order of its tokens; those before others are needed longest."""
        for block in reversed(blocks):
            if (key := self._keys.get(block)) is not None:
                self._blocks[key] = self._blocks.pop(key)

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks get other rows."""
        for block in blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._blocks[key]

    def newest(self, count: int) -> list[tuple[bytes, int]]:
        """Key and block of those that were used most recently, these last."""
        return list(self._blocks.items())[-count:]
