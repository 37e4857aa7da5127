"""The file that keeps events over restarts: one JSON object a line, appended, and cut when it has grown too long."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field, ValidationError

from hearth.wire.messages import Name, RecordedEvent

EVENTS_FILE = "events.jsonl"  # in the state directory
# Of the file, and of the one before it. Together they hold about as many events as are kept in memory.
_MAX_BYTES = 1 << 20


class _Line(RecordedEvent):
    """One line. `stream` identifies the coordinator's folder: the numbers of two of them have nothing in common."""

    stream: Name = Field(min_length=1)


class EventFile:
    """`path`, and `path.1` with what came before. Not durable: a power cut loses what the kernel has not written yet."""

    def __init__(self, path: Path, max_bytes: int = _MAX_BYTES) -> None:
        self.path = path
        self._before = path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes
        # Whether a line may be incomplete at the end: after a power cut, or a write that has failed.
        self._may_be_cut = True

    def read(self) -> tuple[str, list[RecordedEvent]]:
        """The stream's id, and its events, oldest first; lines that cannot be read are left out. Empty if there are none."""
        lines: list[_Line] = []
        for path in (self._before, self.path):
            with suppress(OSError):
                for text in path.read_bytes().splitlines():
                    with suppress(ValidationError):
                        lines.append(_Line.model_validate_json(text))
        stream = lines[-1].stream if lines else ""
        events: list[RecordedEvent] = []
        for line in lines:
            if line.stream == stream and (not events or line.number > events[-1].number):
                events.append(RecordedEvent(number=line.number, unix_seconds=line.unix_seconds, event=line.event))
        return stream, events

    def append(self, stream: str, events: Sequence[RecordedEvent]) -> None:
        """Add events. Raises OSError; then none of them, or only the first ones, can be read."""
        lines = (_Line(stream=stream, **dict(each)) for each in events)
        text = "".join(line.model_dump_json() + "\n" for line in lines)
        if self._may_be_cut:
            text = "\n" + text
        self._may_be_cut = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(text.encode())
        self._may_be_cut = False
        if self.path.stat().st_size > self._max_bytes:
            os.replace(self.path, self._before)
