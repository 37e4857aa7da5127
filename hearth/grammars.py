"""Grammars that an answer must follow, by llguidance: which tokens of a model's vocabulary may come next.

Grammars are texts in llguidance's form of Lark, which holds JSON schemas and regular expressions, too. The coordinator compiles
one to check it; each rank that holds rows of the vocabulary compiles it again and masks its own logits. The state follows from
the tokens of the answer alone, so that it is built again wherever an answer goes on.

llguidance is imported when the first grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from hearth.errors import BadGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_CHARACTERS = 1 << 16  # as of any text in a message
_MAX_COMPILED = 16  # grammars that stay compiled: a home's apps send the same few again and again
_MAX_DETAIL_CHARACTERS = 1000  # of llguidance's explanation
# Forced text is left to the model, which knows how it splits it into tokens.
_HEAD = '%llguidance {"no_forcing": true}\n'


class Vocabulary(NamedTuple):
    """The bytes of each token, by id, and which tokens are special: these stand for themselves, not for their text."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    stop_ids: Sequence[int]  # each may end an answer whose grammar is satisfied

    def pack(self) -> bytes:
        """As bytes, for devices. Equal vocabularies have equal bytes."""
        packed: bytes = msgpack.packb([list(self.tokens), list(self.special_ids), list(self.stop_ids)])
        return packed

    @staticmethod
    def unpack(packed: bytes) -> Vocabulary:
        """The vocabulary of these bytes. Raises ValueError if they hold none."""
        tokens, special_ids, stop_ids = msgpack.unpackb(packed)
        return Vocabulary(tokens, special_ids, stop_ids)


class Grammars:
    """Compiles grammars for one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def constraint(self, grammar: str) -> Constraint:
        """The constraint of a new answer. Raises BadGrammar."""
        return Constraint(self._compiled(grammar).deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            reason = f"it has {len(grammar)} characters, more than {MAX_GRAMMAR_CHARACTERS}"
            raise BadGrammar(what="grammar", reason=reason)
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise BadGrammar(what="grammar", reason="a device lacks the package llguidance") from None
        matcher = LLMatcher(self._tokenizer, _HEAD + grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise BadGrammar(what="grammar", reason=_explained(matcher.get_error()))
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper  # the package exports no other way to give it tokens

        wrapped = TokenizerWrapper(_Tokens(self._vocabulary))
        num_tokens, slices = len(self._vocabulary.tokens), LLTokenizer.json_slices()  # much faster masks in texts
        return LLTokenizer(wrapped, n_vocab=num_tokens, eos_token=list(self._vocabulary.stop_ids), slices=slices)


class Constraint:
    """The state of one answer. It follows the tokens that it is given, and goes back where they differ from earlier ones."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._tokens: list[int] = []  # that the matcher has consumed

    def mask(self, answer: Sequence[int]) -> bytes | None:
        """The tokens that may follow these of the answer: a bit each, the lowest of a byte first.

        None: nothing may, since the answer breaks the grammar. Raises BadGrammar if the grammar became too complex.
        """
        matcher, known = self._matcher, self._tokens
        answer = list(answer)
        if answer[: len(known)] != known:
            num_equal = next(
                (n for n, (one, other) in enumerate(zip(answer, known, strict=False)) if one != other), len(answer)
            )
            matcher.rollback(len(known) - num_equal)
            del known[num_equal:]
        new = answer[len(known) :]
        known += new[: matcher.try_consume_tokens(new)] if new else []
        bits = matcher.compute_bitmask() if len(known) == len(answer) else None
        if matcher.is_error():
            raise BadGrammar(what="grammar", reason=_explained(matcher.get_error()))
        return bits


class _Tokens:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None

    def __call__(self, text: object) -> list[int]:
        """The tokens of a text, which llguidance only needs to force a text."""
        return []


def _limits() -> LLParserLimits:
    """Limits on the cost of a grammar: some 20 ms to compile and 15 ms for a mask on a fast core, and some 40 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=30_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _explained(error: Any) -> str:
    """llguidance's explanation, without its dumps of states."""
    text = str(error).split("\n<state>")[0].replace(_HEAD, "").strip().rstrip(".")
    return text[:_MAX_DETAIL_CHARACTERS] or "unknown reason"
