"""What rank 0 derives from the logits of all ranks: log-probabilities, and errors against other logits. Pure.

For log-probabilities, each rank adds to its candidates what rank 0 needs: the logarithm of its sum of exponentials, its
candidates' logits as the model gives them, and its most likely tokens. Sums are in float64; a share is sent in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hearth.errors import BadMessage
from hearth.wire.codec import Array
from hearth.wire.messages import LogProb, TokenLogProbs

MAX_ERROR = 1e6  # stands for every larger one, and for logits that are not finite


def share(candidates_n2: Array, logits_V: Array, first_id: int, num_top: int) -> Array:
    """One rank's share [1 + n + k, 3]: the head, its candidates, and its `num_top` most likely tokens.

    The head is the number of candidates and the logarithm of the sum; the others are id, logit for sampling, and raw logit.
    """
    top = np.empty(0, np.int64)
    if count := min(num_top, len(logits_V)):
        top = np.flatnonzero(logits_V >= np.partition(logits_V, -count)[-count])  # a few more if there are ties
        top = top[np.argsort(-logits_V[top], kind="stable")][:count]
    largest = logits_V.max()
    total = largest + np.log(np.exp(logits_V.astype(np.float64) - largest).sum())
    own = candidates_n2[:, 0].astype(np.int64) - first_id
    rows = [np.array([[len(candidates_n2), total, 0.0]])]
    rows.append(np.column_stack([candidates_n2, logits_V[own]]))
    rows.append(np.column_stack([top + first_id, logits_V[top], logits_V[top]]))
    return np.concatenate(rows).astype(np.float32)


class MergedShares:
    """The shares of all ranks. Raises BadMessage for one of a wrong form."""

    def __init__(self, shares: Sequence[Array]) -> None:
        self.candidates: list[Array] = []
        rows, totals = [], []
        for each in shares:
            if each.ndim != 2 or each.shape[1] != 3 or not 0 <= (count := each[0, 0]) < len(each):
                raise BadMessage(reason=f"log-probabilities have the shape {each.shape}")
            self.candidates.append(each[1 : 1 + int(count), :2])
            rows.append(each[1:, [0, 2]])
            totals.append(float(each[0, 1]))
        largest = max(totals)
        self._total = largest + float(np.log(np.exp(np.array(totals) - largest).sum()))
        self._rows_n2 = np.concatenate(rows).astype(np.float64)

    def log_probs(self, token_id: int, num_top: int) -> TokenLogProbs:
        """Those of this candidate, and of the most likely tokens; ties go to the lowest id."""
        ids, first = np.unique(self._rows_n2[:, 0].astype(np.int64), return_index=True)
        logits = self._rows_n2[first, 1]
        values, order = logits - self._total, np.lexsort((ids, -logits))[:num_top]
        chosen = float(values[np.searchsorted(ids, token_id)])
        return TokenLogProbs(
            chosen=LogProb(token_id=token_id, value=chosen),
            top=tuple(LogProb(token_id=int(ids[n]), value=float(values[n])) for n in order),
        )


class LogitErrors:
    """Logits of one request that were kept, by the tokens before them, and errors of another request's against them."""

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
