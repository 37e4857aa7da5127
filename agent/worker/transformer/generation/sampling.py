"""Sampling of the next token: each owner of vocabulary rows selects candidates, and rank 0 chooses among them.

The Gumbel-max method is used: it chooses the token with the largest logit / temperature + g, where the noise g is computed
from a hash of seed, index of the token in the answer, and token id. So a seed gives the same text on any number of devices,
also after the loss of a device, and without top-k, top-p and min-p each owner sends only one candidate.

A drafted token (speculative decoding) is accepted if it is the token that is sampled in its place. For a draft that is certain
of one token this is speculative sampling (Leviathan et al., ICML 2023, algorithm 1): it is accepted with the probability that
the model gives it, and else replaced by a sample of the others. As the noise does not depend on the drafts, a seed gives the
same text with and without them.

Order and meaning of the settings are those of `transformers`' logits processors; those of the presence and the frequency
penalty, which it lacks, are those of OpenAI's API.

For log-probabilities, each rank adds to its candidates what rank 0 needs: the logarithm of its sum of exponentials, its
candidates' logits as the model gives them, and its most likely tokens. Sums are in float64; a share is sent in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from hearth.errors import BadMessage
from hearth.wire.codec import Array
from hearth.wire.messages import LogProb, Sampling, TokenLogProbs


def select_candidates(
    logits_V: Array,
    first_id: int,
    sampling: Sampling,
    tokens: Sequence[int],
    index: int,
    allowed_V: Array | None = None,
) -> Array:
    """Select the candidates of one rank's share of the vocabulary: token ids and logits [n,2], float32.

    `tokens` are the prompt and the answer so far; `index` is the number of tokens in the answer so far. Only the tokens of
    `allowed_V` may be chosen (None: all). Ids are exact in float32, since a vocabulary has at most 2^24 tokens.
    """
    logits = apply_repetition_penalty(logits_V, first_id, sampling.repetition_penalty, tokens)
    logits = apply_answer_penalties(logits, first_id, sampling, tokens, index)
    if sampling.temperature == 0 and allowed_V is None and len(logits):  # without the ids of a whole vocabulary
        best = int(logits.argmax())
        return np.array([[first_id + best, logits[best]]], np.float32)
    ids = np.arange(first_id, first_id + len(logits))
    if allowed_V is not None:
        ids, logits = ids[allowed_V], logits[allowed_V]
    if not len(logits):
        return np.empty((0, 2), np.float32)
    if sampling.temperature == 0:
        chosen = np.array([logits.argmax()])
    elif sampling.top_k:
        count = min(sampling.top_k, len(logits))
        chosen = np.argpartition(-logits, count - 1)[:count]
    elif sampling.top_p < 1 or sampling.min_p > 0:
        chosen = np.arange(len(logits))
    else:
        noisy = logits.astype(np.float64) / sampling.temperature + gumbel_noise(sampling.seed, index, ids)
        chosen = np.array([noisy.argmax()])
    return np.stack([ids[chosen], logits[chosen]], axis=1).astype(np.float32)


def apply_repetition_penalty(logits_V: Array, first_id: int, penalty: float, tokens: Sequence[int]) -> Array:
    """Apply CTRL's repetition penalty (arXiv 1909.05858) to all tokens that are in the context."""
    if penalty == 1.0:
        return logits_V
    context_ids = np.unique(np.asarray(tokens, dtype=np.int64)) - first_id
    context_ids = context_ids[(context_ids >= 0) & (context_ids < len(logits_V))]
    logits: Array = logits_V.copy()
    logits[context_ids] = np.where(
        logits[context_ids] < 0, logits[context_ids] * penalty, logits[context_ids] / penalty
    )
    return logits


def apply_answer_penalties(
    logits_V: Array, first_id: int, sampling: Sampling, tokens: Sequence[int], num_answer_tokens: int
) -> Array:
    """Subtract the presence penalty from all tokens of the answer, and the frequency penalty as often as each occurs.

    `tokens` are the prompt and the answer.
    """
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if not (presence or frequency) or not num_answer_tokens:
        return logits_V
    answer = tokens[len(tokens) - num_answer_tokens :]
    ids, counts = np.unique(np.asarray(answer, dtype=np.int64) - first_id, return_counts=True)
    here = (ids >= 0) & (ids < len(logits_V))
    logits: Array = logits_V.copy()
    logits[ids[here]] -= (presence + frequency * counts[here]).astype(np.float32)
    return logits


def sample_token(candidates_n2: Array, sampling: Sampling, index: int) -> int:
    """Choose the next token among all ranks' candidates; ties go to the lowest id."""
    order = np.lexsort((candidates_n2[:, 0], -candidates_n2[:, 1]))
    ids, logits = candidates_n2[order, 0].astype(np.int64), candidates_n2[order, 1].astype(np.float64)
    if sampling.temperature == 0:
        return int(ids[0])
    logits = logits / sampling.temperature
    if sampling.top_k:
        ids, logits = ids[: sampling.top_k], logits[: sampling.top_k]
    if sampling.top_p < 1:
        probabilities = _softmax(logits)
        num_kept = max(int((probabilities.cumsum() - probabilities < sampling.top_p).sum()), 1)
        ids, logits = ids[:num_kept], logits[:num_kept]
    if sampling.min_p > 0:
        probabilities = _softmax(logits)
        num_kept = max(int((probabilities >= sampling.min_p * probabilities[0]).sum()), 1)
        ids, logits = ids[:num_kept], logits[:num_kept]
    return int(ids[(logits + gumbel_noise(sampling.seed, index, ids)).argmax()])


def verify_drafts(drafted: Sequence[int], sample: Callable[[int], int | None]) -> list[int]:
    """The accepted ones of the drafted tokens, and the token after them, if there is one.

    `sample(i)` is the token that the model chooses after i drafted tokens; None: its grammar cannot be followed further.
    """
    tokens: list[int] = []
    for index in range(len(drafted) + 1):
        if (token := sample(index)) is None:
            break
        tokens.append(token)
        if index < len(drafted) and token != drafted[index]:
            break
    return tokens


def gumbel_noise(seed: int, index: int, ids: Array) -> Array:
    """Standard Gumbel noise for each token id, in float64."""
    with np.errstate(over="ignore"):
        state = _splitmix64(_splitmix64(np.uint64(seed)) ^ np.uint64(index)) ^ ids.astype(np.uint64)
        bits = _splitmix64(state) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    noise: Array = -np.log(-np.log(uniform))
    return noise


def _splitmix64(x: Any) -> Any:
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _softmax(logits: Array) -> Array:
    probabilities: Array = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    return probabilities


MAX_ERROR = 1e6  # stands for every larger one, and for logits that are not finite


def log_prob_share(candidates_n2: Array, logits_V: Array, first_id: int, num_top: int) -> Array:
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
