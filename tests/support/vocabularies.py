"""Vocabularies for grammars, and random answers that follow a grammar."""

from __future__ import annotations

import random
from pathlib import Path

from support.chat_models import save_byte_level

from coordinator.serve.text.prompts import TextTokenizer
from hearth.grammars import Constraint, Vocabulary


def byte_level_vocabulary(directory: Path) -> tuple[TextTokenizer, Vocabulary]:
    """A tokenizer of bytes and few longer tokens, and its vocabulary in a model with some tokens more."""
    tokenizer = TextTokenizer(save_byte_level(directory))
    end = tokenizer.encode("</s>")[-1]
    vocabulary = tokenizer.vocabulary(300, [end])
    assert vocabulary is not None
    return tokenizer, vocabulary


def allowed_ids(mask: bytes) -> list[int]:
    return [8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def random_answer(constraint: Constraint, vocabulary: Vocabulary, seed: int, max_tokens: int = 400) -> list[int] | None:
    """Tokens drawn from the masks up to the end of the answer, which is not among them; None: there is no end so soon."""
    drawn, answer = random.Random(seed), []
    for _ in range(max_tokens):
        mask = constraint.mask(answer)
        assert mask is not None
        token = drawn.choice(allowed_ids(mask))
        if token in vocabulary.stop_ids:
            return answer
        answer.append(token)
    return None
