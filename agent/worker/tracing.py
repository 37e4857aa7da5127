"""A step's timeline, recorded only when a request asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from hearth.wire.framing import TileKey
from hearth.wire.messages import TraceEvent

_NOTHING = nullcontext()


def transfer_name(key: TileKey, sender: int, receiver: int) -> str:
    """The name that both ends give to one tile on one hop."""
    return f"layer {key.layer} {key.phase.name.lower()} tile {key.tile} {sender}->{receiver}"


class Recorder:
    """Collects events; appending to a list is atomic, so the compute and communication threads share one recorder."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._events: list[TraceEvent] = []

    def bar(self, name: str) -> AbstractContextManager[None]:
        """What runs inside is one bar of the compute lane."""
        return self._bar(name) if self._enabled else _NOTHING

    @contextmanager
    def _bar(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._add(name, "compute", start, time.monotonic(), 0)

    def instant(self, name: str, lane: Literal["send", "receive"], num_bytes: int) -> None:
        now = time.monotonic()
        self._add(name, lane, now, now, num_bytes)

    @property
    def enabled(self) -> bool:
        return self._enabled

    def events(self) -> tuple[TraceEvent, ...]:
        return tuple(self._events)

    def _add(
        self,
        name: str,
        lane: Literal["compute", "send", "receive"],
        start: float,
        end: float,
        num_bytes: int,
    ) -> None:
        self._events.append(TraceEvent(name=name, lane=lane, start_seconds=start, end_seconds=end, num_bytes=num_bytes))
