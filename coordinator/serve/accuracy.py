"""Chooses how activations travel from a budget for the error: measured, not assumed. Knows no devices and no clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias, get_args

import numpy as np

from hearth.plan.value_formats import Values
from hearth.platform.units import format_seconds
from hearth.wire.codec import Array

FORMATS: tuple[Values, ...] = get_args(Values)

SAFETY_FACTOR = 2.0  # real inputs may err more than the few that were measured
MIN_GAIN = 0.05  # a lossy format must save this share of exact's time: less is within what steps vary by
_REPEATS = 3  # timed steps of each format, on the longest batch
_SEED = 20240525

# Runs one step in a format: token ids [T] to hidden states [T,H] and its seconds.
RunBatch: TypeAlias = Callable[[Values, Array], Awaitable[tuple[Array, float]]]


@dataclass(frozen=True)
class Measured:
    """One format: the worst relative error of any row, and the seconds of a step of full length."""

    values: Values
    error: float
    seconds: float


def relative_error(exact_TH: Array, other_TH: Array) -> float:
    """max over rows of ||other - exact|| / ||exact||. Infinite where that is no number, unless the rows are equal."""
    exact, other = exact_TH.astype(np.float64), other_TH.astype(np.float64)
    if exact.size == 0 or np.array_equal(exact, other):
        return 0.0
    with np.errstate(all="ignore"):
        away = np.linalg.norm(other - exact, axis=-1)
        ratios = np.where(away == 0, 0.0, away / np.linalg.norm(exact, axis=-1))
    return float(np.max(np.where(np.isnan(ratios), np.inf, ratios)))


def calibration_batches(vocab_size: int, seq_len: int) -> list[Array]:
    """Token ids of up to three sequences, the longest last: random, and the same every time."""
    random = np.random.default_rng(_SEED)
    lengths = sorted({max(seq_len // 8, 1), max(seq_len // 2, 1), seq_len})
    return [random.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


async def calibrate(run: RunBatch, vocab_size: int, seq_len: int) -> list[Measured]:
    """Measure every format. Raises what `run` raises."""
    errors: dict[Values, list[float]] = {values: [] for values in FORMATS}
    seconds: dict[Values, list[float]] = {values: [] for values in FORMATS}
    *short, longest = calibration_batches(vocab_size, seq_len)
    for ids in short:
        exact, _ = await run("exact", ids)
        for values in FORMATS[1:]:
            errors[values].append(relative_error(exact, (await run(values, ids))[0]))
    exact, _ = await run("exact", longest)  # the first step of this length warms up: it is not timed
    for _ in range(_REPEATS):  # the formats in turn, so that a busy moment falls on all of them
        for values in FORMATS:
            rows, taken = await run(values, longest)
            errors[values].append(relative_error(exact, rows))
            seconds[values].append(taken)
    return [Measured(values, max(errors[values]), median(seconds[values])) for values in FORMATS]


def choose(measured: Sequence[Measured], budget: float) -> Measured:
    """The fastest format whose error, times the safety factor, is within the budget, and that is worth its error.

    Exact, unless another one saves at least `MIN_GAIN` of its time.
    """
    exact = next(each for each in measured if each.values == "exact")
    enough = (1 - MIN_GAIN) * exact.seconds
    worth = [each for each in measured if each.error * SAFETY_FACTOR <= budget and each.seconds <= enough]
    return min(worth, key=lambda each: (each.seconds, each.error), default=exact)


def describe(measured: Sequence[Measured], chosen: Measured, budget: float) -> str:
    """One line for people."""
    parts = [
        f"{each.values} {format_seconds(each.seconds)}" + (f" error {each.error:.1e}" if each.values != "exact" else "")
        for each in measured
    ]
    return f"activations travel as {chosen.values} (accuracy budget {budget:g}: {', '.join(parts)})"
