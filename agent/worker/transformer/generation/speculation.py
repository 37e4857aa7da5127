"""How many tokens a decoding step guesses: as many as its measured time pays for. Pure.

With the acceptance rate a of a sequence, the expected number of its tokens after a step with k drafted ones is
1 + a + ... + a^k (Leviathan et al., ICML 2023, equation 1). A drafted token is a further row of the step.

Guesses are looked up in the sequence itself, which costs nothing, or come from a draft model, whose steps cost time. Each
sequence of a step has the source that was right more often in it. What the draft model is worth differs from answer to answer:
each has a record of its own, which begins with what others' first guesses were worth.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from agent.worker.transformer.generation.drafting import Drafter, FirstGuesses, NgramProposer, Proposer
from agent.worker.transformer.generation.sequence import SequenceState

_NUM_TIMES = 7  # steps whose median is the time of a number of rows
_NUM_DRAFT_TIMES = 15  # steps of a draft model whose second least time counts
_MIN_GAIN = 0.02  # of the tokens per second without guesses: less is within the error of the measured times
_MAX_DEPTH = 12  # steps of a draft model before one of the model: with 9 of 10 guesses right, more add 3 tokens to 7
_MAX_PROBE_SHARE = 0.02  # of the time, for guesses of a draft model that do not pay
_MAX_SAVED_STEPS = 8  # time for such guesses that is saved up, in steps: several answers may begin at once
_MAX_AGE_STEPS = 512  # the time of a number of rows is measured again then: contexts grow, other programs come and go


class StepTimes:
    """Measured seconds of decoding steps by number of rows, interpolated between those that were measured.

    `of_draft`: of a draft model, whose steps are run only while its guesses pay. Other programs add time to some of them; a
    median that they have disturbed would end the guessing, and then be measured no more.
    """

    def __init__(self, of_draft: bool = False) -> None:
        self._of_draft = of_draft
        self._times: dict[int, deque[float]] = {}  # empty: one step has run, in which libraries prepared their kernels
        self._measured_at: dict[int, int] = {}  # number of steps then
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []  # rows and seconds, by rows

    def record(self, num_rows: int, seconds: float) -> None:
        """Take note of a step."""
        self._num_steps += 1
        if num_rows not in self._times:
            self._times[num_rows] = deque(maxlen=_NUM_DRAFT_TIMES if self._of_draft else _NUM_TIMES)
            return
        if self._num_steps - self._measured_at.get(num_rows, self._num_steps) > _MAX_AGE_STEPS:
            self._times[num_rows].clear()
        self._times[num_rows].append(seconds)
        self._measured_at[num_rows] = self._num_steps
        oldest = self._num_steps - _MAX_AGE_STEPS
        recent = sorted(rows for rows, step in self._measured_at.items() if step >= oldest)
        # More rows take no less time: so a disturbed step of a number of rows that is seldom run does not count.
        least = math.inf
        self._known = []
        for rows in reversed(recent):
            times = self._times[rows]
            least = min(least, sorted(times)[:2][-1] if self._of_draft else statistics.median(times))
            self._known.append((rows, least))
        self._known.reverse()

    def is_measured(self, num_rows: int) -> bool:
        """Whether steps of as many rows have run lately."""
        return any(rows == num_rows for rows, _ in self._known)

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a step.

        More rows than were measured are taken to cost no more than these, up to twice as many; beyond, infinity: so larger
        steps are tried one by one.
        """
        if not self._known or num_rows > 2 * self._known[-1][0]:
            return math.inf
        index = bisect.bisect_left(self._known, (num_rows, 0.0))
        if index == len(self._known):
            return self._known[-1][1]
        after, seconds_after = self._known[index]
        if index == 0:
            return seconds_after
        before, seconds_before = self._known[index - 1]
        return seconds_before + (seconds_after - seconds_before) * (num_rows - before) / (after - before)


def draft_counts(
    acceptances: Sequence[float], most: Sequence[int], room: int, step_seconds: Callable[[int], float]
) -> list[int]:
    """The number of drafted tokens of each sequence of a step with the most expected tokens per second.

    At most `most` of each sequence, and `room` of all.
    """
    # Tokens that a draft is expected to add, the k-th of a sequence no more than the one before: a stable sort keeps the order.
    gains = [(rate**k, n) for n, rate in enumerate(acceptances) for k in range(1, most[n] + 1)]
    gains.sort(key=lambda gain: -gain[0])
    num_sequences = len(acceptances)
    expected = float(num_sequences)
    best_rate, best_count = expected / step_seconds(num_sequences), 0
    for count, (gain, _) in enumerate(gains[:room], start=1):
        expected += gain
        if (rate := expected / step_seconds(num_sequences + count)) > best_rate:
            best_rate, best_count = rate, count
    counts = [0] * num_sequences
    for _, n in gains[:best_count]:
        counts[n] += 1
    return counts


def _expected_tokens(rate: float, count: int) -> float:
    """Tokens of a sequence after a step with `count` drafted ones."""
    return (1 - rate ** (count + 1)) / (1 - rate) if rate < 1 else count + 1.0


class DraftModel(Protocol):
    """A small model that guesses the tokens of several sequences at once."""

    def seconds(self, num_sequences: int) -> float:
        """Expected seconds of one token for each of `num_sequences` sequences; infinity if that was not measured."""

    def catch_up_seconds(self, sequence: SequenceState) -> float:
        """Expected seconds of computing what the model has not seen of a sequence, beyond those of its next token."""

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Guess at most the given number of tokens for each sequence; fewer, or none, where the model is not ready."""


class _Choice(NamedTuple):
    """A number of drafted tokens for each sequence of a step; `by_model`: whether the draft model guesses them."""

    tokens_per_second: float
    counts: list[int]
    by_model: list[bool]


class Speculation:
    """Decides the drafted tokens of each decoding step. `make_proposer` makes the proposer of a sequence."""

    def __init__(self, make_proposer: Callable[[], Proposer] = NgramProposer, draft: DraftModel | None = None) -> None:
        self.times = StepTimes()
        self._make_proposer = make_proposer
        self._draft = draft
        self._first_guesses = FirstGuesses()
        self._saved_seconds = 0.0  # for guesses of the draft model that are not expected to pay

    def new_drafter(self) -> Drafter:
        """The drafter of a new sequence."""
        return Drafter(self._make_proposer(), self._first_guesses.acceptance)

    def record(self, drafter: Drafter, num_drafted: int, num_accepted: int) -> None:
        """Take note of a step of a sequence."""
        by_model, drafter.by_model = drafter.by_model, False
        nothing = (0, 0)
        drafter.record(*(nothing if by_model else (num_drafted, num_accepted)))
        if by_model:
            self._first_guesses.record(drafter.model.num_judged, num_drafted, num_accepted)
        drafter.model.record(*((num_drafted, num_accepted) if by_model else nothing))

    def drafts(self, group: Sequence[SequenceState], most: Sequence[int], room: int) -> list[list[int]]:
        """The drafted tokens of each sequence of a step: at most `most` of each, and `room` of all.

        A source whose drafts do not pay gives one now and then, so that its acceptance rate stays known.
        """
        found = [
            sequence.drafter.propose([*sequence.prompt, *sequence.generated], min(count, room))
            if sequence.drafter is not None
            else []
            for sequence, count in zip(group, most, strict=True)
        ]
        if not self.times.is_measured(len(group)) or not (self._draft or any(found)):
            return [[] for _ in group]
        best = self._choice(group, found, most, room, 0)
        for depth in range(1, _MAX_DEPTH + 1 if self._draft else 1):
            if self._most_tokens_per_second(group, found, depth) > best.tokens_per_second:
                best = max(
                    best, self._choice(group, found, most, room, depth), key=lambda choice: choice.tokens_per_second
                )
        if best.tokens_per_second < (1 + _MIN_GAIN) * len(group) / self.times.seconds(len(group)):
            best = _Choice(0.0, [0] * len(group), [False] * len(group))
        _, counts, by_model = best
        for n, sequence in enumerate(group):
            is_due = sequence.drafter is not None and sequence.drafter.is_probe_due and not by_model[n]
            if is_due and found[n] and sum(counts) < room:
                counts[n] = max(counts[n], 1)
        if self._draft is not None:
            self._try_model(self._draft, group, most, room, counts, by_model)
        return self._with_model(
            group, [each[:count] for each, count in zip(found, counts, strict=True)], counts, by_model
        )

    def _most_tokens_per_second(
        self, group: Sequence[SequenceState], found: Sequence[Sequence[int]], depth: int
    ) -> float:
        """An upper bound of what `_choice` finds, as if further rows took no time: mostly, few depths must be looked at."""
        assert self._draft is not None
        expected = 0.0
        for sequence, guess in zip(group, found, strict=True):
            if (drafter := sequence.drafter) is None:
                expected += 1
            else:
                expected += max(
                    _expected_tokens(drafter.model.acceptance, depth), _expected_tokens(drafter.acceptance, len(guess))
                )
        return expected / (self.times.seconds(len(group)) + depth * self._draft.seconds(1))

    def _choice(
        self, group: Sequence[SequenceState], found: Sequence[Sequence[int]], most: Sequence[int], room: int, depth: int
    ) -> _Choice:
        """The best numbers if the draft model runs `depth` steps, for sequences with nothing better."""
        rates, limits, by_model = [], [], []
        for sequence, guess, count in zip(group, found, most, strict=True):
            drafter = sequence.drafter
            rate, limit, takes_model = 0.0, 0, False
            if drafter is not None:
                takes_model = depth > 0 and count > 0 and (not guess or drafter.model.acceptance > drafter.acceptance)
                rate = drafter.model.acceptance if takes_model else drafter.acceptance
                limit = min(count, depth) if takes_model else len(guess)
            rates.append(rate)
            limits.append(limit)
            by_model.append(takes_model)
        num_guessed = sum(by_model)
        draft_seconds = depth * self._draft.seconds(num_guessed) if self._draft is not None and num_guessed else 0.0

        def seconds(num_rows: int) -> float:
            return self.times.seconds(num_rows) + draft_seconds

        counts = draft_counts(rates, limits, room, seconds)
        expected = sum(map(_expected_tokens, rates, counts))
        by_model = [takes and count > 0 for takes, count in zip(by_model, counts, strict=True)]
        if self._draft is not None:
            # Sequences leave the draft model's steps when they have their guesses.
            of_model = [count for count, takes in zip(counts, by_model, strict=True) if takes]
            running = [sum(count > done for count in of_model) for done in range(max(of_model, default=0))]
            draft_seconds = sum(map(self._draft.seconds, running))
        return _Choice(expected / seconds(len(group) + sum(counts)), counts, by_model)

    def _try_model(
        self,
        draft: DraftModel,
        group: Sequence[SequenceState],
        most: Sequence[int],
        room: int,
        counts: list[int],
        by_model: list[bool],
    ) -> None:
        """Let the draft model guess one token where nothing else is guessed: of one sequence, of all if its time is unknown."""
        step_seconds = self.times.seconds(len(group))
        self._saved_seconds += _MAX_PROBE_SHARE * step_seconds
        if sum(counts) >= room:
            return
        idle = [n for n, sequence in enumerate(group) if sequence.drafter is not None and most[n] > 0 and not counts[n]]
        if math.isfinite(draft.seconds(max(len(idle), 1))):
            idle = self._due(draft, group, idle, self.times.seconds(len(group) + sum(counts) + 1) - step_seconds)
        for n in idle[: room - sum(counts)]:
            counts[n], by_model[n] = 1, True

    def _due(
        self, draft: DraftModel, group: Sequence[SequenceState], idle: Sequence[int], row_seconds: float
    ) -> list[int]:
        """The sequence whose acceptance rate has been unknown for longest, if the time for a guess of it has been saved."""
        waited = {n: drafter.model for n in idle if (drafter := group[n].drafter) and drafter.model.is_probe_due}
        if not waited:
            self._saved_seconds = min(self._saved_seconds, _MAX_SAVED_STEPS * self.times.seconds(len(group)))
            return []
        longest = max(waited, key=lambda n: waited[n].steps_since_draft)
        price = draft.seconds(1) + draft.catch_up_seconds(group[longest]) + row_seconds
        if price > self._saved_seconds:
            return []
        self._saved_seconds -= price
        return [longest]

    def _with_model(
        self, group: Sequence[SequenceState], drafts: list[list[int]], counts: Sequence[int], by_model: Sequence[bool]
    ) -> list[list[int]]:
        """The drafts, with those of the draft model."""
        chosen = [n for n, count in enumerate(counts) if by_model[n] and count]
        if chosen and self._draft is not None:
            guesses = self._draft.propose([(group[n], counts[n]) for n in chosen])
            for n, guess in zip(chosen, guesses, strict=True):
                drafts[n] = guess
                if (drafter := group[n].drafter) is not None:
                    drafter.by_model = bool(guess)
        return drafts
