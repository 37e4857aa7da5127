"""KV caches that outlive a plan: which rank holds which part, and the transfers that bring a new plan's ranks theirs. Pure.

A rank's KV cache covers its layers, its KV heads and all rows of a sequence, whatever the strategy. With `kv_copies`, each rank
also keeps a copy of the previous rank's cache, so that the ranks left after a loss hold the caches of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hearth.plan.geometry import Span
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS, TransformerBody


class CacheBlock(NamedTuple):
    """Some layers and KV heads of a KV cache."""

    layers: Span
    heads: Span

    @property
    def size(self) -> int:
        """Number of pairs of a layer and a KV head."""
        return self.layers.size * self.heads.size

    def covers(self, other: CacheBlock) -> bool:
        """Whether all of `other` lies in this block."""
        return all(own.start <= part.start and part.stop <= own.stop for own, part in zip(self, other, strict=True))

    def num_bytes(self, spec: ModelSpec, num_rows: int = 1) -> int:
        """Bytes of the keys and values of `num_rows` tokens."""
        return 2 * self.size * spec.kv_row_bytes * num_rows


class HeldBlock(NamedTuple):
    """The first `num_rows` rows of a block, on a rank of the new plan."""

    rank: int
    block: CacheBlock
    num_rows: int


class CacheTransfer(NamedTuple):
    """A block that `source` sends to `target`; the same rank twice: it copies its own."""

    source: int
    target: int
    block: CacheBlock


def cached_block(spec: ModelSpec, body: TransformerBody, rank: int) -> CacheBlock:
    """The block of every sequence's KV cache that a rank computes."""
    heads, _ = body.decode_share(rank)
    group = spec.group_size
    return CacheBlock(body.layers_of(rank, spec.num_layers), Span(heads.start // group, heads.stop // group))


def keeper_of(rank: int, num_ranks: int) -> int:
    """The rank that keeps the copy of a rank's KV cache: the next one in the ring."""
    return (rank + 1) % num_ranks


def copied_block(spec: ModelSpec, body: TransformerBody, rank: int) -> CacheBlock | None:
    """The block of which a rank keeps a copy; None if the plan keeps no copies."""
    num_ranks = len(body.heads)
    if body.generation is None or not body.generation.kv_copies or num_ranks == 1:
        return None
    return cached_block(spec, body, (rank - 1) % num_ranks)


def reserved_bytes(spec: ModelSpec, body: TransformerBody, rank: int) -> int:
    """Bytes that a plan reserves on a rank for keys and values, copies included."""
    if body.generation is None:
        return 0
    copied = copied_block(spec, body, rank)
    blocks = [cached_block(spec, body, rank), *([copied] if copied else [])]
    return sum(block.num_bytes(spec, body.generation.num_kv_blocks * KV_BLOCK_TOKENS) for block in blocks)


def covered_rows(spec: ModelSpec, held: Sequence[HeldBlock]) -> int:
    """Length of the longest prefix of a sequence whose rows are held for all layers and heads."""
    whole = CacheBlock(Span(0, spec.num_layers), Span(0, spec.num_kv_heads))
    cells = _cells(whole, [each.block for each in held])
    return min(max((each.num_rows for each in held if each.block.covers(cell)), default=0) for cell in cells)


def plan_transfers(plan: TransformerPlan, held: Sequence[HeldBlock], num_rows: int) -> tuple[CacheTransfer, ...]:
    """Transfers after which every rank of the plan has its block of the first `num_rows` rows, which must be covered.

    A rank uses what it holds itself; else the block comes from the rank that has to send least so far.
    """
    held = [each for each in held if each.num_rows >= num_rows]
    sent = dict.fromkeys(range(plan.num_ranks), 0)
    transfers: list[CacheTransfer] = []
    for target in range(plan.num_ranks):
        for cell in _cells(cached_block(plan.model, plan.body, target), [each.block for each in held]):
            holders = {each.rank for each in held if each.block.covers(cell)}
            source = target if target in holders else min(holders, key=lambda rank: (sent[rank], rank))
            if source != target:
                sent[source] += cell.size
            transfers.append(CacheTransfer(source, target, cell))
    return tuple(transfers)


def _cells(block: CacheBlock, others: Sequence[CacheBlock]) -> Iterator[CacheBlock]:
    """Cut a block along the edges of others, so that each other covers a cell or has nothing of it."""
    for layers in _cut(block.layers, (other.layers for other in others)):
        for heads in _cut(block.heads, (other.heads for other in others)):
            yield CacheBlock(layers, heads)


def _cut(span: Span, others: Iterable[Span]) -> list[Span]:
    if not span.size:
        return []
    inner = {edge for other in others for edge in other if span.start < edge < span.stop}
    edges = [span.start, *sorted(inner), span.stop]
    return [Span(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]
