"""How many tokens a decoding step guesses: as many as its measured time pays for. Pure.

With the acceptance rate a of a sequence, the expected number of its tokens after a step with k drafted ones is
1 + a + ... + a^k (Leviathan et al., ICML 2023, equation 1). A drafted token is a further row of the step.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from agent.worker.transformer.generation.drafting import Drafter, NgramProposer, Proposer

_NUM_TIMES = 7  # steps whose median is the time of a number of rows
_MAX_AGE_STEPS = 512  # the time of a number of rows is measured again then: contexts grow, other programs come and go


class StepTimes:
    """Measured seconds of decoding steps by number of rows, interpolated between those that were measured."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}  # empty: one step has run, in which libraries prepared their kernels
        self._measured_at: dict[int, int] = {}  # number of steps then
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []  # rows and seconds, by rows

    def record(self, num_rows: int, seconds: float) -> None:
        """Take note of a step."""
        self._num_steps += 1
        if num_rows not in self._times:
            self._times[num_rows] = deque(maxlen=_NUM_TIMES)
            return
        if self._num_steps - self._measured_at.get(num_rows, self._num_steps) > _MAX_AGE_STEPS:
            self._times[num_rows].clear()
        self._times[num_rows].append(seconds)
        self._measured_at[num_rows] = self._num_steps
        oldest = self._num_steps - _MAX_AGE_STEPS
        recent = sorted(rows for rows, step in self._measured_at.items() if step >= oldest)
        self._known = [(rows, statistics.median(self._times[rows])) for rows in recent]

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


class Speculation:
    """Decides the drafted tokens of each decoding step. `make_proposer` makes the proposer of a sequence."""

    def __init__(self, make_proposer: Callable[[], Proposer] = NgramProposer) -> None:
        self.times = StepTimes()
        self._make_proposer = make_proposer

    def new_drafter(self) -> Drafter:
        """The drafter of a new sequence."""
        return Drafter(self._make_proposer())

    def drafts(
        self, drafters: Sequence[Drafter | None], tokens: Sequence[Sequence[int]], most: Sequence[int], room: int
    ) -> list[list[int]]:
        """The drafted tokens of each sequence of a step: at most `most` of each, and `room` of all; None: no drafts.

        A sequence whose drafts do not pay gets one now and then, so that its acceptance rate stays known.
        """
        guesses = [
            drafter.propose(known, min(count, room)) if drafter is not None else []
            for drafter, known, count in zip(drafters, tokens, most, strict=True)
        ]
        counts = [0] * len(guesses)
        if any(guesses) and self.times.is_measured(len(guesses)):
            rates = [drafter.acceptance if drafter is not None else 0.0 for drafter in drafters]
            counts = draft_counts(rates, [len(each) for each in guesses], room, self.times.seconds)
            for n, drafter in enumerate(drafters):
                if drafter is not None and drafter.is_probe_due and guesses[n] and sum(counts) < room:
                    counts[n] = max(counts[n], 1)
        return [each[:count] for each, count in zip(guesses, counts, strict=True)]
