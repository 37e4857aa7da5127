"""Facts about a generation in the debug log, for programs: a line of JSON each."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import BaseModel

MARK = "generation fact: "  # what a line begins with


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


def log_fact(log: logging.Logger, fact: StepBegun | SequenceCancelled) -> None:
    log.debug("%s%s", MARK, fact.model_dump_json())
