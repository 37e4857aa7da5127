"""Statistics of repeated measurements: paired ratios, confidence intervals, percentiles. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
T = TypeVar("T")
_RESAMPLES = 2000  # of the bootstrap
_CONFIDENCE = 0.95  # of intervals
_SEED = 20240229  # fixed, so that the same rounds always give the same interval


class Ratio(NamedTuple):
    """Median of paired ratios with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} {self.interval}"

    @property
    def interval(self) -> str:
        return f"[{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio of two series measured in the same rounds; a disturbance of a round affects both and cancels out.

    Raises ValueError if there are no rounds or the numbers of rounds differ.
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(statistics.median(ratios), *bootstrap_interval(ratios))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, by percentile bootstrap."""
    chance = random.Random(_SEED)
    medians = [statistics.median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    tail = (1 - _CONFIDENCE) / 2
    return percentile(medians, tail), percentile(medians, 1 - tail)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Percentile with linear interpolation between ranks. Raises IndexError for no values."""
    return float(np.percentile(values, 100 * fraction))


def largest_difference(found: Array, reference: Array) -> float:
    """The largest difference of two arrays of one shape, relative to the largest value of the reference."""
    return float(np.abs(found - reference).max() / max(float(np.abs(reference).max()), 1e-30))


def rotated(names: Sequence[T], round_index: int) -> list[T]:
    """The order of one round, rotated by one per round, so that every item is first equally often."""
    start = round_index % len(names) if names else 0
    return [*names[start:], *names[:start]]
