"""Integer slices of a model: who holds which heads, columns, vocabulary and rows.

Pure. Every split is a tuple of non-negative shares, one per rank, whose sum is the whole; shares may be uneven or zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

# Plan-independent grains (DESIGN.md "Shards"): a re-plan moves whole grains and renames nothing.
COLUMN_GRAIN = 64
VOCABULARY_GRAIN = 1024
# Not a grain of shards: rows are cut anew in every step.
ROW_GRAIN = 4
_GRAINS_PER_RANK = 8  # fewer, and the coarser cut would cost more balance than it gains speed


class Span(NamedTuple):
    """The half-open range `start <= i < stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def spans(shares: Sequence[int]) -> tuple[Span, ...]:
    """Lay shares end to end: `(2, 0, 3)` becomes `[0,2) [2,2) [2,5)`."""
    result, start = [], 0
    for share in shares:
        if share < 0:
            raise ValueError(f"shares cannot be negative: {tuple(shares)}")
        result.append(Span(start, start + share))
        start += share
    return tuple(result)


def num_grains(total: int, grain: int) -> int:
    """How many grains `total` items make; the last grain is the remainder."""
    return -(-total // grain)


def grain_span(index: int, total: int, grain: int) -> Span:
    """The items of grain `index`; the last one may be shorter."""
    return Span(index * grain, min((index + 1) * grain, total))


def grains_to_items(grain_shares: Sequence[int], total: int, grain: int) -> tuple[int, ...]:
    """Shares counted in grains as shares counted in items; the sums agree with `total`."""
    return tuple(min(span.stop * grain, total) - min(span.start * grain, total) for span in spans(grain_shares))


def grains_of(span: Span, total: int, grain: int) -> range:
    """The grain indexes that make up `span`. Raises ValueError when `span` cuts through a grain."""
    if span.size == 0:
        return range(0)
    if span.start % grain or (span.stop % grain and span.stop != total):
        raise ValueError(f"items {span.start} to {span.stop} do not lie on grains of {grain}")
    return range(span.start // grain, num_grains(span.stop, grain))


def largest_remainder(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Share `total` items in proportion to `weights` (largest-remainder method; ties go to the lower rank).

    The sum is exactly `total`; a weight of zero gets nothing. Raises ValueError unless some weight is positive.
    """
    if any(weight < 0 or not math.isfinite(weight) for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"weights must be finite, non-negative and not all zero: {tuple(weights)}")
    # In rationals: a quota that float arithmetic rounds up to an integer would break the sum.
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * total / sum(exact) for weight in exact]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(
        (rank for rank, weight in enumerate(weights) if weight > 0),
        key=lambda rank: (shares[rank] - quotas[rank], rank),
    )
    for i in range(total - sum(shares)):
        shares[by_remainder[i % len(by_remainder)]] += 1
    return tuple(shares)


def rows_for(row_weights: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """The sequence rows of each rank for a step of `num_rows` packed tokens (Galaxy's S, made integer per step).

    In a long step shares are multiples of ROW_GRAIN (the last one takes the remainder): GEMM kernels handle rows in
    such groups, and odd ones left over cost several times their share.
    """
    if num_rows < _GRAINS_PER_RANK * ROW_GRAIN * len(row_weights):
        return largest_remainder(row_weights, num_rows)
    grains = largest_remainder(row_weights, num_grains(num_rows, ROW_GRAIN))
    return grains_to_items(grains, num_rows, ROW_GRAIN)
