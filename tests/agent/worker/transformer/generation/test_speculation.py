"""Guesses of tokens, their number, and their verification, which leaves the distribution of the answer as it is. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.proposers import Never

from agent.worker.transformer.generation.drafting import Drafter, NgramProposer
from agent.worker.transformer.generation.sampling import sample_token, select_candidates, verify_drafts
from agent.worker.transformer.generation.sequence import SequenceState
from agent.worker.transformer.generation.speculation import Speculation, StepTimes, draft_counts
from hearth.wire.messages import GenerateTokens, Sampling


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([5, 1, 2, 7, 8, 6, 1, 2, 9, 5, 1, 2], [7, 8, 6]),  # the longest match, though not the newest
        ([1, 2, 7, 1, 2, 8, 4, 1, 2], [8, 4, 1]),  # the newest of equal length
        ([4, 1, 2, 1, 2], [1, 2, 1]),  # a repetition goes on beyond the newest token
        ([3, 3, 3], [3, 3, 3]),
        ([1, 2, 3, 4], []),
        ([2, 1, 3, 1], []),  # one equal token is chance
        ([1], []),
    ],
)
def test_ngram_lookup(tokens: list[int], guess: list[int]) -> None:
    assert NgramProposer().propose(tokens, 3) == guess
    grown = NgramProposer()
    for count in range(1, len(tokens) + 1):
        found = grown.propose(tokens[:count], 3)
    assert found == guess


def expected_rate(counts: Sequence[int], rates: Sequence[float], seconds: Sequence[float]) -> float:
    tokens = sum(sum(rate**k for k in range(count + 1)) for count, rate in zip(counts, rates, strict=True))
    return tokens / seconds[sum(counts)]


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(0, 6),
    st.lists(st.floats(0.0, 2.0), min_size=10, max_size=10),
)
def test_draft_counts_have_the_highest_expected_rate(
    sequences: list[tuple[float, int]], room: int, increments: list[float]
) -> None:
    rates, most = [rate for rate, _ in sequences], [count for _, count in sequences]
    seconds = list(itertools.accumulate(increments, initial=1.0))
    counts = draft_counts(rates, most, room, lambda num_rows: seconds[num_rows - len(sequences)])
    possible = [each for each in itertools.product(*(range(n + 1) for n in most)) if sum(each) <= room]
    best = max(expected_rate(each, rates, seconds) for each in possible)
    assert tuple(counts) in possible
    assert math.isclose(expected_rate(counts, rates, seconds), best)


def test_step_times_are_medians_without_the_first_step() -> None:
    times = StepTimes()
    times.record(1, 9.0)
    assert not times.is_measured(1)
    assert times.seconds(1) == math.inf
    for seconds in (1.0, 1.2, 50.0):
        times.record(1, seconds)
    assert times.is_measured(1)
    assert [times.seconds(rows) for rows in (1, 2, 3)] == [1.2, 1.2, math.inf]
    times.record(5, 9.0)
    times.record(5, 3.2)
    assert [times.seconds(rows) for rows in (1, 3, 5, 10, 11)] == pytest.approx([1.2, 2.2, 3.2, 3.2, math.inf])


def test_disturbed_steps_of_a_draft_model_do_not_end_the_guessing() -> None:
    times, of_draft = StepTimes(), StepTimes(of_draft=True)
    for _ in range(20):
        times.record(1, 1.0)
        of_draft.record(1, 1.0)
    for _ in range(10):
        times.record(1, 5.0)
        of_draft.record(1, 5.0)
    assert (times.seconds(1), of_draft.seconds(1)) == (5.0, 1.0)


def test_more_rows_take_no_less_time() -> None:
    """Of seldom run numbers of rows, one disturbed step would be believed."""
    times = StepTimes()
    for rows, seconds in ((1, 1.0), (2, 5.0), (4, 1.2)):
        for _ in range(2):
            times.record(rows, seconds)
    assert times.seconds(2) == times.seconds(4) == 1.2


def test_old_step_times_are_measured_again() -> None:
    times = StepTimes()
    for rows in (2, 2, 1):
        times.record(rows, 5.0)
    for _ in range(600):
        times.record(1, 1.0)
    assert not times.is_measured(2)
    assert times.seconds(2) == 1.0
    times.record(2, 2.0)
    assert times.seconds(2) == 2.0


class Certain:
    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return [7] * count


class Model:
    """A draft model whose steps take so long, once one was measured, and which is behind by so many seconds."""

    def __init__(self, seconds: float, behind: float = 0.0) -> None:
        self.seconds_of_step = seconds
        self.behind = behind
        self.num_tokens = 0

    def seconds(self, num_sequences: int) -> float:
        return self.seconds_of_step if self.num_tokens else math.inf

    def catch_up_seconds(self, sequence: SequenceState) -> float:
        return self.behind

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        self.num_tokens += max(count for _, count in wanted)
        return [[8] * count for _, count in wanted]


def sequence(drafter: Drafter | None) -> SequenceState:
    request = GenerateTokens(holder="test", epoch=1, max_tokens=100)
    return SequenceState(1, request, [1], 1, drafter=drafter)


def simulated(
    acceptance: float,
    seconds_of_row: float,
    num_steps: int = 400,
    model: Model | None = None,
    speculation: Speculation | None = None,
) -> tuple[float, list[int]]:
    """Speed-up over single tokens of one sequence, and the number of drafted tokens of each step."""
    rng = random.Random(1)
    speculation = speculation or Speculation(Never if model else Certain, model)
    drafter = speculation.new_drafter()
    counts, num_tokens, total = [], 0, 0.0
    for _ in range(num_steps):
        (drafts,) = speculation.drafts([sequence(drafter)], [15], 15)
        seconds = 1.0 + seconds_of_row * len(drafts)
        accepted = next((n for n in range(len(drafts)) if rng.random() >= acceptance), len(drafts))
        speculation.times.record(1 + len(drafts), seconds)
        speculation.record(drafter, len(drafts), accepted)
        counts.append(len(drafts))
        guessing = model.seconds_of_step * len(drafts) if model else 0.0
        num_tokens, total = num_tokens + accepted + 1, total + seconds + guessing
    return num_tokens / total, counts


@pytest.mark.parametrize(
    ("acceptance", "seconds_of_row", "least"), [(0.9, 0.05, 3.5), (0.9, 0.2, 1.8), (0.6, 0.1, 1.5), (0.3, 0.05, 1.2)]
)
def test_number_of_drafts_adapts(acceptance: float, seconds_of_row: float, least: float) -> None:
    assert simulated(acceptance, seconds_of_row)[0] > least


@pytest.mark.parametrize("seconds_of_row", [0.0, 0.05, 0.5])
def test_wrong_guesses_end_but_are_tried_now_and_then(seconds_of_row: float) -> None:
    """Also where a further row seems to cost nothing."""
    speed, counts = simulated(0.0, seconds_of_row)
    assert speed > 0.97
    assert 0 < sum(counts[-200:]) < 10
    assert max(counts[-200:]) == 1


@pytest.mark.parametrize(
    ("acceptance", "seconds_of_step", "least"), [(0.9, 0.05, 3.0), (0.6, 0.1, 1.4), (0.6, 2.0, 0.97), (0.0, 0.3, 0.97)]
)
def test_draft_model_guesses_as_much_as_its_steps_pay_for(
    acceptance: float, seconds_of_step: float, least: float
) -> None:
    speed, counts = simulated(acceptance, 0.05, 1000, Model(seconds_of_step))
    assert speed > least
    assert sum(counts) > 0
    if least < 1:
        assert sum(counts[-500:]) < 20


@pytest.mark.parametrize("rounds", [1, 6])
def test_answers_do_not_spoil_each_others_guesses(rounds: int) -> None:
    """Short answers in turns, as from one client that asks what the draft model knows and one that does not."""
    model = Model(0.1)
    speculation = Speculation(Never, model)
    simulated(0.5, 0.05, 100, model, speculation)
    for _ in range(rounds):
        for _ in range(3):
            assert simulated(0.0, 0.05, 60, model, speculation)[0] > 0.92  # the first steps find out
        assert simulated(0.9, 0.05, 60, model, speculation)[0] > 2.0


def test_sequences_of_one_step_have_numbers_of_their_own() -> None:
    rng, model = random.Random(3), Model(0.1)
    speculation = Speculation(Never, model)
    rates = (0.9, 0.0, 0.9, 0.0)
    group = [sequence(speculation.new_drafter()) for _ in rates]
    counts = []
    for _ in range(300):
        drafts = speculation.drafts(group, [8] * 4, 32)
        num_rows = 4 + sum(map(len, drafts))
        speculation.times.record(num_rows, 1.0 + 0.02 * num_rows)
        for each, guess, rate in zip(group, drafts, rates, strict=True):
            accepted = next((n for n in range(len(guess)) if rng.random() >= rate), len(guess))
            assert each.drafter is not None
            speculation.record(each.drafter, len(guess), accepted)
        counts.append([len(guess) for guess in drafts])
    means = np.mean(counts[-100:], axis=0)
    assert min(means[0], means[2]) > 3
    assert max(means[1], means[3]) < 0.1


def test_guesses_of_a_draft_model_that_begin_to_be_right_return_within_its_share_of_the_time() -> None:
    model = Model(0.1)
    speculation = Speculation(Never, model)
    simulated(0.0, 0.05, 300, model, speculation)
    drafter, counts = speculation.new_drafter(), []
    for step in range(200):
        (drafts,) = speculation.drafts([sequence(drafter)], [8], 8)
        speculation.times.record(1 + len(drafts), 1.0 + 0.05 * len(drafts))
        speculation.record(drafter, len(drafts), len(drafts) if step >= 100 else 0)
        counts.append(len(drafts))
    assert sum(counts[:100]) * 0.15 < 0.03 * 100
    first = next(step for step in range(100, 200) if counts[step])
    assert first < 100 + 64
    assert min(counts[first + 1 : first + 20]) >= 1


def test_new_sequence_begins_with_what_the_first_guesses_of_others_were_worth() -> None:
    speculation = Speculation(Never, Model(0.1))
    for _ in range(10):
        bad, good = speculation.new_drafter(), speculation.new_drafter()
        for _ in range(20):
            bad.by_model = good.by_model = True
            speculation.record(bad, 1, 0)
            speculation.record(good, 8, 8)  # eight times as many guesses, and still one of two sequences
    assert speculation.new_drafter().model.acceptance == pytest.approx(0.5, abs=0.1)
    for _ in range(10):
        bad = speculation.new_drafter()
        for _ in range(20):
            bad.by_model = True
            speculation.record(bad, 1, 0)
    assert speculation.new_drafter().model.acceptance < 0.2
    assert good.model.acceptance > 0.8


def test_a_draft_model_far_behind_is_tried_seldom() -> None:
    """It would have to compute a long prompt for one guess."""
    model = Model(0.1, behind=4.0)
    speculation = Speculation(Never, model)
    simulated(0.0, 0.05, 100, model, speculation)
    seldom = sum(simulated(0.0, 0.05, 1000, model, speculation)[1])
    model.behind = 0.0
    often = sum(simulated(0.0, 0.05, 1000, model, speculation)[1])
    assert 1 <= seldom <= 6 < often


def test_each_sequence_has_the_better_source() -> None:
    speculation = Speculation(Certain, model := Model(0.02))
    for rows in (2, 2, 10, 10):
        speculation.times.record(rows, 1.0)
    model.num_tokens = 1
    looked_up, guessed = speculation.new_drafter(), speculation.new_drafter()
    for _ in range(20):
        looked_up.record(4, 4)
        guessed.record(4, 0)
    first, second = speculation.drafts([sequence(looked_up), sequence(guessed)], [4, 4], 9)
    assert (set(first), set(second)) == ({7}, {8})
    assert (looked_up.by_model, guessed.by_model) == (False, True)


def test_guesses_return_when_they_are_right_again() -> None:
    drafter = Drafter(Certain())
    for _ in range(50):
        drafter.record(1, 0)
    assert drafter.acceptance < 0.01
    for _ in range(64):
        assert not drafter.is_probe_due
        drafter.record(0, 0)
    assert drafter.is_probe_due
    drafter.record(1, 1)
    drafter.record(8, 8)
    assert drafter.acceptance > 0.6


def test_nothing_is_drafted_until_the_time_of_such_a_step_is_known() -> None:
    speculation = Speculation(Certain)
    group = [sequence(speculation.new_drafter()), sequence(None)]
    assert speculation.drafts(group, [4, 4], 9) == [[], []]
    speculation.times.record(2, 1.0)
    speculation.times.record(2, 1.0)
    assert speculation.drafts(group, [4, 4], 9) == [[7, 7], []]
    assert speculation.drafts(group, [4, 4], 1) == [[7], []]
    assert speculation.drafts(group, [0, 4], 9) == [[], []]


def test_verified_tokens_end_with_the_first_that_differs() -> None:
    assert verify_drafts([], [5].__getitem__) == [5]
    assert verify_drafts([5, 6, 9, 8], [5, 6, 7, 8, 4].__getitem__) == [5, 6, 7]
    assert verify_drafts([5, 6], [5, 6, 7].__getitem__) == [5, 6, 7]


@pytest.mark.parametrize("has_draft_model", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}], ids=str)
def test_drafts_leave_the_distribution_of_answers_as_it_is(sampling: dict[str, float], has_draft_model: bool) -> None:
    """Chi-square of all answers of three tokens, of which the second depends on the first, and the third on the second.

    A draft model has a distribution of its own, and samples from it with the noise of the answer.
    """
    rng = np.random.default_rng(2)
    logits = {token: rng.normal(0, 1, 3).astype(np.float32) for token in (-1, *range(3))}  # by the token before
    of_draft = {token: row + rng.normal(0, 0.5, 3).astype(np.float32) for token, row in logits.items()}
    count, accepted = 1500, []

    def next_token(seed: int, known: Sequence[int], first: int, num_drafted: int, by_token: Any = logits) -> int:
        answer = known[: first + num_drafted]
        settings, row = Sampling(temperature=0.8, seed=seed, **sampling), by_token[answer[-1] if answer else -1]
        return sample_token(select_candidates(row, 0, settings, answer, len(answer)), settings, len(answer))

    def guesses(seed: int, answer: Sequence[int], num_guesses: int) -> list[int]:
        if not has_draft_model:
            return rng.integers(0, 3, num_guesses).tolist()
        known = list(answer)
        for _ in range(num_guesses):
            known.append(next_token(seed, known, len(known), 0, of_draft))
        return known[len(answer) :]

    def answer_with_drafts(seed: int) -> tuple[int, ...]:
        answer: list[int] = []
        while len(answer) < 3:
            drafts = guesses(seed, answer, 2 - len(answer))
            verified = verify_drafts(drafts, partial(next_token, seed, [*answer, *drafts], len(answer)))
            accepted.extend(n < len(verified) - 1 for n in range(min(len(drafts), len(verified))))
            answer += verified
        return tuple(answer)

    def probabilities(row: np.ndarray) -> np.ndarray:
        found, order = np.zeros(3), np.argsort(-row)
        chances = np.exp(row / 0.8)[order]
        chances /= chances.sum()
        chances[chances.cumsum() - chances >= sampling.get("top_p", 1.0)] = 0
        found[order] = chances / chances.sum()
        return found

    by_token = {token: probabilities(row) for token, row in logits.items()}
    seen = dict.fromkeys(itertools.product(range(3), repeat=3), 0)
    for seed in range(count):
        seen[answer_with_drafts(seed)] += 1
    expected = {(a, b, c): count * by_token[-1][a] * by_token[a][b] * by_token[b][c] for a, b, c in seen}
    assert not [each for each, mean in expected.items() if mean == 0 and seen[each]]
    possible = [each for each, mean in expected.items() if mean > 0]
    chi_square = sum((seen[each] - expected[each]) ** 2 / expected[each] for each in possible)
    freedom = len(possible) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations
    # Guesses that know nothing are right once in three times.
    assert (sum(accepted) / len(accepted) > 0.7) == has_draft_model
