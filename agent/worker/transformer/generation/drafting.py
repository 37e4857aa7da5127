"""Guesses of a sequence's next tokens, which a step then verifies (speculative decoding). Pure.

The n-gram lookup is prompt lookup decoding (Saxena 2023): text that quotes the prompt, or itself, is found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_MIN_NGRAM, _MAX_NGRAM = 2, 4  # newest tokens that must have occurred before, and tokens that are compared
_PRIOR_TOKENS = 2.0  # drafted tokens that what is expected of a new sequence weighs as much as
_MEMORY = 0.9  # weight of the earlier drafted tokens in the acceptance rate, per drafted token
_NUM_FIRST_GUESSES = 8  # of a sequence, that count for later ones
_FIRST_GUESSES_MEMORY = 0.98  # weight of the earlier ones, per guess: those of about six sequences count
_FIRST_PROBE_STEPS, _MAX_PROBE_STEPS = 8, 64  # steps without drafts until one is tried again; doubled while it fails


class Proposer(Protocol):
    """Guesses the continuation of one sequence."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow prompt and answer `tokens`, which only grow from call to call."""


class NgramProposer:
    """Continues as the sequence did after an earlier occurrence of its last tokens: the newest of the longest ones."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int64)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        known = self._tokens = np.append(self._tokens, tokens[len(self._tokens) :])
        found, matched = np.flatnonzero(known[:-1] == known[-1]), 1  # where earlier occurrences end, and their length
        for size in range(2, min(_MAX_NGRAM, len(known)) + 1):
            longer = found[found >= size - 1]
            longer = longer[known[longer - size + 1] == known[-size]]
            if not len(longer):
                break
            found, matched = longer, size
        if matched < _MIN_NGRAM:
            return []
        start = int(found[-1]) + 1
        period = len(known) - start  # beyond the newest token, the guess repeats itself
        following: list[int] = known[start + np.arange(count) % period].tolist()
        return following


class TrackRecord:
    """How often the guesses of one source were right in one sequence, and when one that does not pay is tried again.

    `prior`: the acceptance rate that is expected before the first guess. `is_new`: the first try is due at once.
    """

    def __init__(self, prior: float = 0.5, is_new: bool = False) -> None:
        self._num_right, self._num_tried = _PRIOR_TOKENS * prior, _PRIOR_TOKENS  # decayed
        self.steps_since_draft = _FIRST_PROBE_STEPS if is_new else 0
        self._probe_steps = _FIRST_PROBE_STEPS
        self.num_judged = 0  # drafted tokens that were accepted, or the first of their step that was not

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted, recent ones first, among those whose predecessors were."""
        return self._num_right / self._num_tried

    @property
    def is_probe_due(self) -> bool:
        """Whether nothing was drafted for so long that the acceptance rate may have changed."""
        return self.steps_since_draft >= self._probe_steps

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of a step of a sequence."""
        if not num_drafted:
            self.steps_since_draft += 1
            return
        self.steps_since_draft = 0
        self._probe_steps = _FIRST_PROBE_STEPS if num_accepted else min(2 * self._probe_steps, _MAX_PROBE_STEPS)
        for index in range(min(num_accepted + 1, num_drafted)):
            self._num_right = _MEMORY * self._num_right + (index < num_accepted)
            self._num_tried = _MEMORY * self._num_tried + 1
            self.num_judged += 1


class FirstGuesses:
    """How often the first guesses of a draft model were right in recent sequences: what to expect of it in a new one.

    Later guesses do not count: a sequence with good guesses has many more of them than one with bad ones.
    """

    def __init__(self) -> None:
        self._num_right, self._num_tried = 1.0, 2.0  # decayed; one half before the first

    @property
    def acceptance(self) -> float:
        return self._num_right / self._num_tried

    def record(self, num_before: int, num_drafted: int, num_accepted: int) -> None:
        """Take note of a step of a sequence of which `num_before` guesses have been judged."""
        for index in range(min(num_accepted + 1, num_drafted, _NUM_FIRST_GUESSES - num_before)):
            self._num_right = _FIRST_GUESSES_MEMORY * self._num_right + (index < num_accepted)
            self._num_tried = _FIRST_GUESSES_MEMORY * self._num_tried + 1


class Drafter(TrackRecord):
    """The guesses for one sequence without a draft model, and their record.

    `model`: the record of the draft model in this sequence; `prior`: its acceptance rate in others. `by_model`: the guesses in
    flight are the model's.
    """

    def __init__(self, proposer: Proposer, prior: float = 0.5) -> None:
        super().__init__()
        self._proposer = proposer
        self.model = TrackRecord(prior, is_new=True)
        self.by_model = False

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` guesses."""
        return self._proposer.propose(tokens, count) if count > 0 else []
