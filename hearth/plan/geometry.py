"""Integer shares of heads, MLP columns, vocabulary rows and sequence rows for each rank. Pure.

Every split is a tuple of non-negative shares, one per rank, that sum to the total; shares may be uneven or zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

# Grains of shards do not depend on the plan, so a new plan moves whole chunks. A larger grain makes fewer chunks, a smaller one
# balances devices better.
COLUMN_GRAIN = 64  # MLP columns; a multiple of the 32 inputs that share a scale in int4
VOCABULARY_GRAIN = 1024  # vocabulary rows; some dozens of chunks for a vocabulary of 32,000 tokens
# Sequence rows, which are split in every step and not stored; GEMM kernels process them in groups of this size.
ROW_GRAIN = 4
_GRAINS_PER_RANK = 8  # with fewer grains per rank, rounding to grains costs more balance than it gains speed


class Span(NamedTuple):
    """The half-open range `start <= i < stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices in the range."""
        return self.stop - self.start


def spans(shares: Sequence[int]) -> tuple[Span, ...]:
    """Convert shares to consecutive ranges: `(2, 0, 3)` becomes `[0,2) [2,2) [2,5)`."""
    result, start = [], 0
    for share in shares:
        if share < 0:
            raise ValueError(f"shares cannot be negative: {tuple(shares)}")
        result.append(Span(start, start + share))
        start += share
    return tuple(result)


def num_grains(total: int, grain: int) -> int:
    """The number of grains in `total` items; the last grain may be shorter."""
    return -(-total // grain)


def grain_span(index: int, total: int, grain: int) -> Span:
    """The items of grain `index`; the last one may be shorter."""
    return Span(index * grain, min((index + 1) * grain, total))


def grains_to_items(grain_shares: Sequence[int], total: int, grain: int) -> tuple[int, ...]:
    """Convert shares in grains to shares in items, which sum to `total`."""
    return tuple(min(span.stop * grain, total) - min(span.start * grain, total) for span in spans(grain_shares))


def grains_of(span: Span, total: int, grain: int) -> range:
    """The indexes of the grains in `span`. Raises ValueError if a border of `span` lies inside a grain."""
    if span.size == 0:
        return range(0)
    if span.start % grain or (span.stop % grain and span.stop != total):
        raise ValueError(f"items {span.start} to {span.stop} do not lie on grains of {grain}")
    return range(span.start // grain, num_grains(span.stop, grain))


def largest_remainder(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide `total` items in proportion to `weights` (largest-remainder method; ties go to the lower rank).

    The shares sum to exactly `total`; a weight of zero gets none. Raises ValueError for a negative or non-finite weight,
    and if all are zero.
    """
    if any(weight < 0 or not math.isfinite(weight) for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"weights must be finite, non-negative and not all zero: {tuple(weights)}")
    # Rational arithmetic: a quota that floats round up to an integer would make the sum exceed `total`.
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * total / sum(exact) for weight in exact]
    shares = [math.floor(quota) for quota in quotas]
    positive = [rank for rank, weight in enumerate(weights) if weight > 0]
    by_remainder = sorted(positive, key=lambda rank: (shares[rank] - quotas[rank], rank))
    for i in range(total - sum(shares)):
        shares[by_remainder[i % len(by_remainder)]] += 1
    return tuple(shares)


def rows_per_rank(row_weights: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """The number of sequence rows of each rank in a step of `num_rows` packed tokens (Galaxy's S, rounded for each step).

    In a long step, shares are multiples of ROW_GRAIN, except for the remainder in the last one: GEMM kernels process rows
    in groups of that size, and leftover rows cost several times as much each.
    """
    if num_rows < _GRAINS_PER_RANK * ROW_GRAIN * len(row_weights):
        return largest_remainder(row_weights, num_rows)
    grains = largest_remainder(row_weights, num_grains(num_rows, ROW_GRAIN))
    return grains_to_items(grains, num_rows, ROW_GRAIN)
