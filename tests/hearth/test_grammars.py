"""Grammars of answers: random tokens under a mask follow them, whatever was masked before; hostile ones are refused."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llguidance")
from support.vocabularies import allowed_ids, byte_level_vocabulary, random_answer

from coordinator.serve.text.prompts import TextTokenizer
from hearth.errors import BadGrammar
from hearth.grammars import MAX_GRAMMAR_CHARACTERS, Grammars, Vocabulary

GRAMMAR = 'start: "<" item ("," item)* ">"\nitem: /[a-z]{1,3}/ | %json {"enum": [1, "hello", null]}'
FORM = re.compile(r'<([a-z]{1,3}|1|"hello"|null)(,([a-z]{1,3}|1|"hello"|null))*>')


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, Vocabulary]:
    return byte_level_vocabulary(tmp_path_factory.mktemp("tokenizer"))


def test_vocabulary_has_the_bytes_of_each_token(known: tuple[TextTokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = known
    text = "hello wörld 🙂"
    assert b"".join(vocabulary.tokens[n] for n in tokenizer.encode(text)[1:]) == text.encode()
    special = {vocabulary.tokens[n] for n in vocabulary.special_ids}
    assert {b"<s>", b"</s>", b"<|user|>"} <= special
    assert Vocabulary.unpack(vocabulary.pack()).pack() == vocabulary.pack()


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_under_the_masks_follow_the_grammar(seed: int, known: tuple[TextTokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = known
    answer = random_answer(Grammars(vocabulary).constraint(GRAMMAR), vocabulary, seed)
    assert answer is not None
    assert FORM.fullmatch(tokenizer.decode(answer))


@given(seed=st.integers(0, 1 << 16), turns=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_mask_depends_on_the_tokens_alone(seed: int, turns: list[int], known: tuple[TextTokenizer, Vocabulary]) -> None:
    """As after rejected guesses, and when an answer goes on elsewhere."""
    _, vocabulary = known
    grammars = Grammars(vocabulary)
    long = random_answer(grammars.constraint(GRAMMAR), vocabulary, seed) or []
    used = grammars.constraint(GRAMMAR)
    for turn in turns:
        drawn = random.Random(turn)
        answer = long[: drawn.randint(0, len(long))]
        if drawn.random() < 0.5:  # a wrong guess, and more after it
            answer += [drawn.randrange(len(vocabulary.tokens)) for _ in range(drawn.randint(1, 3))]
        assert used.mask(answer) == grammars.constraint(GRAMMAR).mask(answer)


def test_end_of_text_may_only_follow_a_whole_answer(known: tuple[TextTokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = known
    constraint = Grammars(vocabulary).constraint('start: %json {"type": "boolean"}')
    whole = tokenizer.encode("true")[1:]
    assert [set(vocabulary.stop_ids) <= set(allowed_ids(constraint.mask(whole[:n]) or b"")) for n in range(5)] == [
        False, False, False, False, True,
    ]  # fmt: skip
    assert constraint.mask([*whole, *whole]) is None


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: other", "unknown name"),
        ("start: /(/", "unclosed group"),
        ("", ""),
        ('start: %json {"type": "nothing"}', "Invalid type"),
        ("start: /" + "a" * MAX_GRAMMAR_CHARACTERS + "/", "characters"),
        ("start: " + " | ".join(f"/x{n}.*y.*z/" for n in range(9000)), "characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused(grammar: str, reason: str, known: tuple[TextTokenizer, Vocabulary]) -> None:
    with pytest.raises(BadGrammar) as error:
        Grammars(known[1]).constraint(grammar)
    assert reason in error.value.reason


def test_grammar_that_becomes_too_complex_fails_and_does_not_hang(known: tuple[TextTokenizer, Vocabulary]) -> None:
    properties = [f"p{number}" for number in range(400)]
    schema = {"anyOf": [{"type": "object", "properties": {name: {"type": "string"}}} for name in properties]}
    tokenizer, vocabulary = known
    constraint = Grammars(vocabulary).constraint(f"start: %json {json.dumps(schema)}")
    with pytest.raises(BadGrammar, match="items"):
        constraint.mask(tokenizer.encode('{"other": 5, ')[1:])
