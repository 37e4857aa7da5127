"""Machine-readable events of a generation in the debug log, one JSON object per line."""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

from pydantic import BaseModel

FACT_PREFIX = "generation fact: "  # prefix of such a line


class StepBegun(BaseModel):
    """This rank begins a step. `rows` is the number of rows per sequence, `freed` are the sequences freed before."""

    fact: Literal["step"] = "step"
    kind: Literal["prefill", "decode"]
    rows: dict[int, int]
    freed: tuple[int, ...]


class SequenceCancelled(BaseModel):
    """Rank 0 has cancelled a sequence, after `num_tokens` generated tokens."""

    fact: Literal["cancelled"] = "cancelled"
    sequence: int
    num_tokens: int


class SequenceResumed(BaseModel):
    """A newer request continues a sequence, which may have been cancelled."""

    fact: Literal["resumed"] = "resumed"
    sequence: int


class SchedulerIdle(BaseModel):
    """Rank 0 has no request to compute. Blocks of the KV cache are in use by streams that may return, the others are free."""

    fact: Literal["idle"] = "idle"
    num_blocks: int
    num_free_blocks: int


Fact: TypeAlias = StepBegun | SequenceCancelled | SequenceResumed | SchedulerIdle


def log_fact(log: logging.Logger, fact: Fact) -> None:
    """Log an event at debug level."""
    log.debug("%s%s", FACT_PREFIX, fact.model_dump_json())
