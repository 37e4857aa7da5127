"""Chooses the activation format within an accuracy budget, by measuring error and time of every format. No I/O."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias, get_args

import numpy as np

from hearth.plan.common import ValueFormatName
from hearth.platform.units import format_seconds
from hearth.wire.codec import Array

FORMATS: tuple[ValueFormatName, ...] = get_args(ValueFormatName)

SAFETY_FACTOR = 2.0  # on the measured error: real inputs may cause a larger one than the few calibration inputs
MIN_TIME_SAVING = 0.05  # fraction of the exact format's time that a lossy one must save: step times vary by as much
_REPEATS = 3  # timed steps of each format, on the longest batch: the fewest with a median that ignores one outlier
_SEED = 20240525  # arbitrary; fixed, so that every run measures the same inputs

DECODED_PROMPT_TOKENS = 64  # at most; a prompt's rows and those of its answer cross the links in the same format
DECODED_TOKENS = 8  # of each answer: each one's logits are compared, and its time counts

# Runs one step with token ids [T] in a format, or generates `DECODED_TOKENS` after them. Returns the relative error of the
# hidden states or logits, and the seconds of the step or of a token. The second argument says whether these values are kept, as
# the exact ones with which others of the same length are compared.
RunBatch: TypeAlias = Callable[[ValueFormatName, bool, Array], Awaitable[tuple[float, float]]]


@dataclass(frozen=True)
class FormatMeasurement:
    """One format's worst relative error over all rows, and its median seconds for a full-length step or for a token."""

    values: ValueFormatName
    error: float
    seconds: float


def max_relative_error(exact_TH: Array, other_TH: Array) -> float:
    """Maximum over rows of ||other - exact|| / ||exact||. NaN counts as infinite; equal rows have error 0."""
    exact, other = exact_TH.astype(np.float64), other_TH.astype(np.float64)
    if exact.size == 0 or np.array_equal(exact, other):
        return 0.0
    with np.errstate(all="ignore"):
        distances = np.linalg.norm(other - exact, axis=-1)
        ratios = np.where(distances == 0, 0.0, distances / np.linalg.norm(exact, axis=-1))
    return float(np.max(np.where(np.isnan(ratios), np.inf, ratios)))


def calibration_batches(vocab_size: int, seq_len: int) -> list[Array]:
    """Token ids of up to three random sequences of different lengths, the longest last. Deterministic."""
    random = np.random.default_rng(_SEED)
    lengths = sorted({max(seq_len // 8, 1), max(seq_len // 2, 1), seq_len})
    return [random.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


async def calibrate(run: RunBatch, vocab_size: int, seq_len: int) -> list[FormatMeasurement]:
    """Measure every format. Raises the errors of `run`."""
    errors: dict[ValueFormatName, list[float]] = {values: [] for values in FORMATS}
    seconds: dict[ValueFormatName, list[float]] = {values: [] for values in FORMATS}
    *short, longest = calibration_batches(vocab_size, seq_len)
    for ids in (*short, longest):  # not timed: the first run of each length is a warm-up
        await run("exact", True, ids)
    for ids in short:
        for values in FORMATS[1:]:
            errors[values].append((await run(values, False, ids))[0])
    for _ in range(_REPEATS):  # formats interleaved, so that background load affects all of them
        for values in FORMATS:
            error, run_seconds = await run(values, False, longest)
            errors[values].append(error)
            seconds[values].append(run_seconds)
    return [FormatMeasurement(values, max(errors[values]), median(seconds[values])) for values in FORMATS]


def choose_format(measurements: Sequence[FormatMeasurement], budget: float) -> FormatMeasurement:
    """The fastest format whose error times `SAFETY_FACTOR` is within the budget.

    The exact format, unless another one saves at least `MIN_TIME_SAVING` of its time.
    """
    exact = next(each for each in measurements if each.values == "exact")
    max_seconds = (1 - MIN_TIME_SAVING) * exact.seconds
    acceptable = [each for each in measurements if each.error * SAFETY_FACTOR <= budget and each.seconds <= max_seconds]
    return min(acceptable, key=lambda each: (each.seconds, each.error), default=exact)


def describe_choice(measurements: Sequence[FormatMeasurement], chosen: FormatMeasurement, budget: float) -> str:
    """The measurements and the choice in one log line."""
    parts = [
        f"{each.values} {format_seconds(each.seconds)}" + (f" error {each.error:.1e}" if each.values != "exact" else "")
        for each in measurements
    ]
    return f"activations travel as {chosen.values} (accuracy budget {budget:g}: {', '.join(parts)})"
