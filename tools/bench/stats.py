"""What is said about repeated measurements: medians, paired ratios, confidence intervals. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 20240229  # the same rounds always give the same interval


class Ratio(NamedTuple):
    """The median of paired ratios, and the interval that it lies in with 95 % confidence."""

    median: float
    low: float
    high: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Both measured in the same rounds, in order: what slows a round down slows down both, and cancels out.

    Raises ValueError for no rounds, or not the same number of them.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} and {len(denominators)} rounds cannot be paired")
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(statistics.median(ratios), *bootstrap_interval(ratios))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap of the median, 95 %."""
    chance = random.Random(_SEED)
    medians = [statistics.median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    tail = (1 - _CONFIDENCE) / 2
    return percentile(medians, tail), percentile(medians, 1 - tail)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest ranks. Raises ValueError for no values."""
    if not values:
        raise ValueError("there is no percentile of nothing")
    ranked = sorted(values)
    position = fraction * (len(ranked) - 1)
    below = int(position)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (position - below)


def rotated(names: Sequence[T], round_index: int) -> list[T]:
    """The order of one round: each comes first as often as any other, so none always follows the same one."""
    start = round_index % len(names) if names else 0
    return [*names[start:], *names[:start]]
