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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hearth.wire.messages import Sampling

Array = np.ndarray[Any, Any]


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
