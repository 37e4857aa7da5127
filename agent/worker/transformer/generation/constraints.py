"""Masks of one rank's logits: the tokens that the grammars of the running answers allow."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from hearth.errors import BadGrammar
from hearth.grammars import Constraint, Grammars
from hearth.plan.geometry import Span
from hearth.wire.codec import Array

log = logging.getLogger("hearth.worker")


class Constraints:
    """The grammars of the sequences on one rank, by the number of the sequence. `grammars`: None if the model has no tokens."""

    def __init__(self, grammars: Grammars | None, vocabulary: Span) -> None:
        """`vocabulary`: the token ids whose logits this rank computes."""
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._constraints: dict[int, Constraint | None] = {}  # None: it cannot be used here

    def add(self, sequence: int, grammar: str) -> None:
        """Constrain a new sequence; an empty grammar allows everything."""
        if not grammar or not self._vocabulary.size:
            return
        self._constraints[sequence] = None
        try:
            if self._grammars is None:
                raise BadGrammar(what="grammar", reason="the worker has no vocabulary")
            self._constraints[sequence] = self._grammars.constraint(grammar)
        except BadGrammar as error:
            log.warning("%s", error)

    def free(self, sequence: int) -> None:
        self._constraints.pop(sequence, None)

    def allowed(self, sequence: int, answer: Sequence[int]) -> Array | None:
        """Mask [V] of this rank's tokens that may follow these of the answer; None: all. Raises BadGrammar."""
        if sequence not in self._constraints:
            return None
        constraint = self._constraints[sequence]
        if constraint is None:
            raise BadGrammar(what="grammar", reason="it cannot be used on this device")
        own = self._vocabulary
        bits = constraint.mask(answer)
        if bits is None:
            return np.zeros(own.size, bool)
        first = own.start // 8
        flags = np.unpackbits(np.frombuffer(bits, np.uint8)[first : -(-own.stop // 8)], bitorder="little")
        return flags[own.start - 8 * first :][: own.size].astype(bool)
