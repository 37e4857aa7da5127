"""Blocks of a paged KV cache: their allocation on rank 0, the prefix cache, and its index on every rank. Pure.

Paged KV cache: vLLM (Kwon et al., SOSP 2023, section 4). A full block is found again by the hash of its tokens and of all those
before them. Once no sequence uses it, it stays until its memory is needed; the least recently used block goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.messages import PREFIX_KEY_BYTES

PrefixKey = bytes  # of a full block: a hash of the scope, and of all tokens up to the block's last one


def num_blocks_for(num_tokens: int) -> int:
    """The number of blocks that hold so many tokens."""
    return -(-num_tokens // KV_BLOCK_TOKENS)


def prefix_keys(scope: str, token_ids: Sequence[int], parent: PrefixKey | None = None) -> Iterator[PrefixKey]:
    """The key of each full block of these tokens, which follow the block `parent`. Scopes have no key in common."""
    key = parent or hashlib.blake2b(scope.encode(), digest_size=PREFIX_KEY_BYTES).digest()
    for start in range(0, len(token_ids) - KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS):
        tokens = np.asarray(token_ids[start : start + KV_BLOCK_TOKENS], "<i4").tobytes()
        key = hashlib.blake2b(key + tokens, digest_size=PREFIX_KEY_BYTES).digest()
        yield key


class BlockPool:
    """The blocks of a plan's KV cache, with the number of sequences that use each.

    Blocks are placed so that those of a sequence tend to be adjacent: attention then reads them without a copy.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_users = np.zeros(num_blocks, np.int32)
        self._vacant = np.ones(num_blocks, bool)  # neither used nor cached
        self._cached: dict[PrefixKey, int] = {}  # the block of each key, in use or not
        self._keys: dict[int, PrefixKey] = {}  # the inverse
        self._unused: dict[int, None] = {}  # cached blocks without users, least recently used first

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated; unused cached blocks are among them."""
        return int(self._vacant.sum()) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Number of blocks that a prefix can be found in."""
        return len(self._cached)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, next to the block `after` if possible. At least as many must be free."""
        missing = count - int(self._vacant.sum())
        for _ in range(missing):
            self._evict(next(iter(self._unused)))
        blocks: list[int] = []
        while len(blocks) < count:
            wanted = count - len(blocks)
            start, size = self._place(wanted, after)
            taken = range(start, start + min(size, wanted))
            self._vacant[taken.start : taken.stop] = False
            self._num_users[taken.start : taken.stop] = 1
            blocks += taken
            after = blocks[-1]
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """End one sequence's use of its blocks, which are given in the order of its tokens."""
        for block in reversed(blocks):  # a block is of no use without those before it, so it is evicted before them
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._keys:
                    self._unused[block] = None
                else:
                    self._vacant[block] = True

    def publish(self, block: int, key: PrefixKey) -> bool:
        """Let sequences find a full block, unless an equal one is there. Returns whether they find this one."""
        if key not in self._cached:
            self._cached[key] = block
            self._keys[block] = key
        return self._cached[key] == block

    def adopt(self, keys: Sequence[PrefixKey]) -> list[int]:
        """Vacant blocks for cached prefixes that no sequence uses, least recently used first."""
        blocks = self.allocate(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            self.publish(block, key)
            self.release([block])
        return blocks

    def is_cached(self, block: int, key: PrefixKey) -> bool:
        """Whether a prefix with this key is found in this block."""
        return self._keys.get(block) == key

    def take_prefix(self, keys: Sequence[PrefixKey]) -> list[int]:
        """Use the cached blocks of the longest prefix of `keys`."""
        found: list[int] = []
        for key in keys:
            if (block := self._cached.get(key)) is None:
                break
            self._num_users[block] += 1
            self._unused.pop(block, None)
            found.append(block)
        return found

    def _evict(self, block: int) -> None:
        del self._unused[block]
        del self._cached[self._keys.pop(block)]
        self._vacant[block] = True

    def _place(self, count: int, after: int | None) -> tuple[int, int]:
        """A range of vacant blocks: behind `after`, else in the middle of the longest one, so that its neighbours can grow.

        Returns its start and size.
        """
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._vacant, [False])).astype(np.int8)))
        starts, stops = edges[::2], edges[1::2]
        if after is not None and after + 1 < len(self._vacant) and self._vacant[after + 1]:
            return after + 1, int(stops[np.searchsorted(stops, after + 1, "right")]) - after - 1
        longest = int(np.argmax(stops - starts))
        start, stop = int(starts[longest]), int(stops[longest])
        if start > 0:
            start += max(stop - start - count, 0) // 2
        return start, stop - start


class PrefixBlocks:
    """Index of the prefix cache on one rank: the block of its KV cache for each prefix key, least recently used first.

    Rank 0 decides, and names full blocks that may be found again in step orders. All ranks take note, so that they can say what
    they have when the plan ends.
    """

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
