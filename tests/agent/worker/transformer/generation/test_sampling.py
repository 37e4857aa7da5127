"""Sampling equals the logits processors of `transformers`, and is independent of how the vocabulary is sharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.worker.transformer.generation.sampling import (
    apply_answer_penalties,
    apply_repetition_penalty,
    gumbel_noise,
    sample_token,
    select_candidates,
)
from hearth.wire.messages import Sampling

V = 500

SETTINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.7),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, top_k=12, seed=2),
    Sampling(temperature=1.5, top_p=0.8, seed=3),
    Sampling(temperature=2.0, min_p=0.2, seed=4),
    Sampling(temperature=0.9, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.2, seed=5),
]


def logits_of(seed: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(V) * 3).astype(np.float32)


def draw(logits: np.ndarray[Any, Any], sampling: Sampling, cuts: list[int], index: int, tokens: list[int]) -> int:
    borders = [0, *cuts, V]
    parts = [
        select_candidates(logits[a:b], a, sampling, tokens, index) for a, b in zip(borders, borders[1:], strict=False)
    ]  # fmt: skip
    return sample_token(np.concatenate(parts), sampling, index)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_sampling_is_independent_of_vocabulary_shards(sampling: Sampling) -> None:
    for seed in range(30):
        logits, tokens = logits_of(seed), [3, 4, 77, 77]
        whole = draw(logits, sampling, [], seed, tokens)
        assert draw(logits, sampling, [100], seed, tokens) == whole
        assert draw(logits, sampling, [0, 3, 250, 250, 499], seed, tokens) == whole


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = np.zeros(V, np.float32)
    logits[[40, 90]] = 2.0
    assert draw(logits, Sampling(), [60], 0, []) == 40


@pytest.mark.parametrize("sampling", SETTINGS[2:], ids=str)
def test_sampling_frequencies_equal_transformers(sampling: Sampling) -> None:
    """Frequencies of many draws against the probabilities after the processors of `transformers`."""
    torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    transformers = pytest.importorskip("transformers")
    logits, tokens = logits_of(11), [3, 4, 77]
    processors = [
        transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        transformers.TemperatureLogitsWarper(sampling.temperature),
    ]
    if sampling.top_k:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(transformers.MinPLogitsWarper(sampling.min_p))
    scores = torch.from_numpy(logits.copy())[None]
    for processor in processors:
        scores = processor(torch.tensor([tokens]), scores)
    chances = scores.softmax(-1)[0].numpy()
    draws = 4000
    counts = np.zeros(V)
    for index in range(draws):
        counts[draw(logits, sampling, [200], index, tokens)] += 1
    assert not counts[chances == 0].any()
    likely = chances > 0.01
    spread = np.sqrt(chances[likely] * (1 - chances[likely]) / draws)
    assert (np.abs(counts[likely] / draws - chances[likely]) <= 5 * spread).all()


def test_repetition_penalty_equals_transformers() -> None:
    torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    transformers = pytest.importorskip("transformers")
    logits, tokens = logits_of(3), [0, 5, 5, V - 1]
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([tokens]), torch.tensor(logits)[None])[0]
    assert np.allclose(apply_repetition_penalty(logits, 0, 1.4, tokens), expected.numpy(), rtol=1e-6)
    assert np.allclose(apply_repetition_penalty(logits[100:], 100, 1.4, tokens), expected.numpy()[100:], rtol=1e-6)


def test_noise_is_gumbel_and_depends_on_seed_position_and_token() -> None:
    noise = gumbel_noise(1, 2, np.arange(200_000))
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.02
    assert not np.array_equal(noise[:100], gumbel_noise(1, 3, np.arange(100)))
    assert not np.array_equal(noise[:100], gumbel_noise(2, 2, np.arange(100)))
    assert np.array_equal(noise[50:100], gumbel_noise(1, 2, np.arange(50, 100)))


@given(st.lists(st.integers(0, 19), max_size=12), st.integers(0, 6), st.floats(-2, 2), st.floats(-2, 2))
def test_answer_penalties_are_those_of_openai(
    answer: list[int], prompt: int, presence: float, frequency: float
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with counts of the answer alone, on any share of the vocabulary."""
    logits = np.linspace(-3, 3, 20, dtype=np.float32)
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    expected = [
        logit - answer.count(token) * frequency - (token in answer) * presence for token, logit in enumerate(logits)
    ]
    tokens = [3] * prompt + answer
    whole = apply_answer_penalties(logits, 0, sampling, tokens, len(answer))
    assert np.allclose(whole, expected, atol=1e-5)
    assert np.array_equal(apply_answer_penalties(logits[7:], 7, sampling, tokens, len(answer)), whole[7:])
    chosen = select_candidates(logits, 0, sampling, tokens, len(answer))
    assert whole[int(chosen[0, 0])] == whole.max()
