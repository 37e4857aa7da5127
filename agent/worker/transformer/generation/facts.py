"""Facts about a generation in the debug log, for programs: a line of JSON each, written and read here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

_MARK = "generation fact: "


class StepBegun(BaseModel):
    """This rank begins a step: rows to compute by sequence, and the sequences that it frees before."""

    fact: Literal["step"] = "step"
    kind: Literal["prefill", "decode"]
    rows: dict[int, int]
    freed: tuple[int, ...]


class SequenceCancelled(BaseModel):
    """Rank 0 takes a cancel, after it chose `num_tokens` of the sequence."""

    fact: Literal["cancelled"] = "cancelled"
    sequence: int
    num_tokens: int


Fact = Annotated[StepBegun | SequenceCancelled, Field(discriminator="fact")]
_ADAPTER: TypeAdapter[StepBegun | SequenceCancelled] = TypeAdapter(Fact)


def log_fact(log: logging.Logger, fact: StepBegun | SequenceCancelled) -> None:
    log.debug("%s%s", _MARK, fact.model_dump_json())


def facts_in(lines: Iterable[str]) -> Iterator[StepBegun | SequenceCancelled]:
    """The facts in a process's log. Raises pydantic's ValidationError for one of another version."""
    for line in lines:
        _, mark, text = line.partition(_MARK)
        if mark:
            yield _ADAPTER.validate_json(text)
