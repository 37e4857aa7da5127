"""Proposers whose guesses are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Never:
    """Guesses nothing, so that all guesses are those of a draft model, if there is one."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return []


class Remembered:
    """Guesses known texts, prompt and answer. `spoil` makes every second guess wrong: at its first token, its second, ..."""

    def __init__(self, texts: Sequence[Sequence[int]], spoil: Callable[[int], int] = lambda token: token ^ 1) -> None:
        self._texts = [list(text) for text in texts]
        self._spoil = spoil
        self._num_calls = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        self._num_calls += 1
        text = next(text for text in self._texts if text[: len(tokens)] == list(tokens))
        guess = text[len(tokens) : len(tokens) + count]
        if self._num_calls % 2 == 0 and guess:
            wrong = (self._num_calls // 2 - 1) % len(guess)
            guess[wrong] = self._spoil(guess[wrong])
        return guess
