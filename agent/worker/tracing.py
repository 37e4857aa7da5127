"""Records of what a worker does: a step's timeline, if the request asks for it, and facts of a generation in the debug log.

Facts are machine-readable, one JSON object a line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple, TypeAlias

from pydantic import BaseModel

from hearth.plan.phases import Work
from hearth.transport.base import Buffer
from hearth.wire.framing import TileKey
from hearth.wire.messages import TraceEvent

FACT_PREFIX = "generation fact: "  # of the line of a fact
_NOTHING = nullcontext()
_TENSOR_CHARACTERS = 64  # kept from the end of a tensor's name, which is more specific than its beginning


class TransferEvent(NamedTuple):
    """A tile was passed to the transport for `peer`, or arrived from it, at `seconds` of the monotonic clock."""

    lane: Literal["send", "receive"]
    key: TileKey
    peer: int
    num_bytes: int
    seconds: float

    @classmethod
    def now(cls, lane: Literal["send", "receive"], key: TileKey, peer: int, frames: Sequence[Buffer]) -> TransferEvent:
        return cls(lane, key, peer, sum(len(frame) for frame in frames), time.monotonic())


class Recorder:
    """Collects trace events. Thread-safe, because appending to a list is atomic."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[TraceEvent] = []

    def timed(
        self, work: Work, layer: int | None = None, tile: int | None = None, peer: int | None = None
    ) -> AbstractContextManager[None]:
        """Record the time inside the block as one compute event. `peer`: the rank for whose heads or rows it computes."""
        return self._timed(work, layer, tile, peer) if self.enabled else _NOTHING

    @contextmanager
    def _timed(self, work: Work, layer: int | None, tile: int | None, peer: int | None) -> Iterator[None]:
        start = time.monotonic()
        yield
        end = time.monotonic()
        self._events.append(
            TraceEvent(
                lane="compute", kind=work, layer=layer, tile=tile, peer=peer, start_seconds=start, end_seconds=end
            )
        )

    def transfer(self, event: TransferEvent, tensor: str = "") -> None:
        """Record a send or receive event. `tensor`: the tensor's name, for an ONNX graph."""
        if not self.enabled:
            return
        key = event.key
        self._events.append(
            TraceEvent(
                lane=event.lane,
                kind=key.phase,
                layer=key.layer,
                tile=None if tensor else key.tile,
                peer=event.peer,
                tensor=tensor[-_TENSOR_CHARACTERS:],
                start_seconds=event.seconds,
                end_seconds=event.seconds,
                num_bytes=event.num_bytes,
            )
        )

    def events(self) -> tuple[TraceEvent, ...]:
        return tuple(self._events)


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
