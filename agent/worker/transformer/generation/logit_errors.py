"""Errors of logits: those of one request against those of another one after the same tokens, as for a value format. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hearth.wire.codec import Array

MAX_ERROR = 1e6  # stands for every larger one, and for logits that are not finite


class LogitErrors:
    """Logits that were kept, by the tokens before them, and the largest error of those that were compared with them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Array] = {}
        self._largest: dict[int, float] = {}  # by sequence number

    def clear(self) -> None:
        """Forget all logits."""
        self._kept, self._largest = {}, {}

    def add(self, number: int, mode: Literal["keep", "compare"], tokens: Sequence[int], candidates_n2: Array) -> None:
        """Keep the logits of a sequence after `tokens`, or compare them with those kept after the same tokens, if any."""
        logits = candidates_n2[np.argsort(candidates_n2[:, 0]), 1]
        if mode == "keep":
            self._kept[tuple(tokens)] = logits
        elif (kept := self._kept.get(tuple(tokens))) is not None and kept.shape == logits.shape:
            self._largest[number] = max(relative_error(kept, logits), self._largest.get(number, 0.0))

    def largest(self, number: int) -> float | None:
        """The largest error of a sequence; None if none of its logits were compared."""
        return self._largest.get(number)


def relative_error(exact: Array, other: Array) -> float:
    """||other - exact|| / ||exact||, at most `MAX_ERROR`."""
    exact, other = exact.astype(np.float64), other.astype(np.float64)
    with np.errstate(all="ignore"):
        error = float(np.linalg.norm(other - exact) / np.linalg.norm(exact))
    return error if error <= MAX_ERROR else 0.0 if np.array_equal(exact, other) else MAX_ERROR
