"""Spans, shares, rounding to whole grains, and rows of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.plan.geometry import (
    Span,
    grain_span,
    grains_of,
    grains_to_items,
    largest_remainder,
    num_grains,
    rows_per_rank,
    spans,
)

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda w: sum(w) > 0)


def test_spans_are_contiguous_and_may_be_empty() -> None:
    assert spans((2, 0, 3)) == (Span(0, 2), Span(2, 2), Span(2, 5))


def test_negative_shares_are_rejected() -> None:
    with pytest.raises(ValueError, match="negative"):
        spans((1, -1))


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ((1, 1, 1), 10, (4, 3, 3)),
        ((3, 1), 2, (2, 0)),
        ((0, 1), 5, (0, 5)),
        ((1, 1), 0, (0, 0)),
        ((0.5, 0.3, 0.2), 7, (4, 2, 1)),
    ],
)
def test_largest_remainder_table(shares: tuple[float, ...], total: int, expected: tuple[int, ...]) -> None:
    assert largest_remainder(shares, total) == expected


@given(weights, st.integers(0, 10_000))
def test_largest_remainder_preserves_sum_and_quota_bounds(shares: list[float], total: int) -> None:
    result = largest_remainder(shares, total)
    assert sum(result) == total
    for weight, share in zip(shares, result, strict=True):
        assert share >= 0
        assert weight > 0 or share == 0
        assert abs(share - weight / sum(shares) * total) <= 1 + 1e-6 * total


@pytest.mark.parametrize("bad", [(0.0, 0.0), (-1.0, 2.0), (float("nan"), 1.0), (float("inf"), 1.0), ()])
def test_invalid_weights_are_rejected(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights"):
        largest_remainder(bad, 3)


@given(st.integers(1, 5000), st.integers(1, 300), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_shares_are_multiples_of_the_grain(total: int, grain: int, extra: list[int]) -> None:
    count = num_grains(total, grain)
    shares = largest_remainder([value + 1 for value in extra], count)
    items = grains_to_items(shares, total, grain)
    assert sum(items) == total
    found = [index for span in spans(items) for index in grains_of(span, total, grain)]
    assert found == list(range(count))
    assert sum(grain_span(index, total, grain).size for index in found) == total


def test_span_inside_a_grain_is_rejected() -> None:
    with pytest.raises(ValueError, match="grains of 64"):
        grains_of(Span(0, 65), 128, 64)


@given(weights, st.integers(1, 600))
def test_row_spans_cover_every_step(row_weights: list[float], num_rows: int) -> None:
    assert sum(rows_per_rank(row_weights, num_rows)) == num_rows
