"""What a rank's debug log says about cancelled sequences and the KV cache.

Read from the facts of `agent.worker.tracing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

from agent.worker.tracing import FACT_PREFIX, Fact, SchedulerIdle, SequenceCancelled, SequenceResumed

_FACT: TypeAdapter[Fact] = TypeAdapter(Annotated[Fact, Field(discriminator="fact")])


@dataclass
class CancelLog:
    """What one rank has logged about cancelled sequences and the KV cache."""

    cancelled: dict[int, int] = field(default_factory=dict)  # by sequence: tokens chosen before the cancel
    freed: set[int] = field(default_factory=set)  # sequences whose blocks were freed
    steps: int = 0
    late_rows: int = 0  # rows computed for a sequence after its cancel or its release
    num_blocks: int = 0  # of the KV cache; only rank 0 logs it
    num_free_blocks: int = 0  # when it was last idle


def read_cancel_log(lines: Iterable[str]) -> CancelLog:
    """Read a rank's log.

    Rank 0 logs each cancel; every rank logs the sequences of each step and those released before it. Sequence numbers are
    never reused.
    """
    log = CancelLog()
    ended: set[int] = set()
    for fact in _facts_in(lines):
        if isinstance(fact, SequenceCancelled):
            log.cancelled[fact.sequence] = fact.num_tokens
            ended.add(fact.sequence)
        elif isinstance(fact, SequenceResumed):
            ended.discard(fact.sequence)
        elif isinstance(fact, SchedulerIdle):
            log.num_blocks, log.num_free_blocks = fact.num_blocks, fact.num_free_blocks
        else:
            log.steps += 1
            ended.update(fact.freed)
            log.freed.update(fact.freed)
            log.late_rows += sum(rows for sequence, rows in fact.rows.items() if sequence in ended)
    return log


def _facts_in(lines: Iterable[str]) -> Iterator[Fact]:
    """The facts in a process's log. Raises pydantic's ValidationError for facts of another version."""
    for line in lines:
        _, prefix, text = line.partition(FACT_PREFIX)
        if prefix:
            yield _FACT.validate_json(text)
