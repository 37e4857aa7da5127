"""How well predicted times agree with measured ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import StatisticsError, correlation
from typing import NamedTuple

_MIN_PAIRS = 3  # two points always lie on a line


class Agreement(NamedTuple):
    """Pearson's coefficient of predicted and measured seconds, and Spearman's: the same of their ranks."""

    pearson: float
    spearman: float


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> Agreement | None:
    """The coefficients of these pairs; None for fewer than three, or if all predicted or all measured values are equal."""
    if len(predicted) < _MIN_PAIRS:
        return None
    try:
        return Agreement(correlation(predicted, measured), rank_correlation(predicted, measured))
    except StatisticsError:
        return None


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's coefficient. Raises StatisticsError for fewer than two pairs, or if all values of a side are equal."""
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(ordered)))}
    last = {value: index for index, value in enumerate(ordered)}
    return [(first[value] + last[value]) / 2 for value in values]
