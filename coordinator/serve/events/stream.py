"""The event stream of a coordinator: records, keeps and saves events, and sends them to those who watch."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from pydantic import Field, ValidationError

from hearth.errors import BadRequest, DiskHung
from hearth.platform.asyncio_tools import loop_time, with_timeout
from hearth.platform.disk import FILE_SECONDS, hung_paths, on_disk
from hearth.wire import messages as wire

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"  # in the state directory
# Of the file, and of the one before it. Together they hold about as many events as are kept in memory.
_MAX_BYTES = 1 << 20
_SAVE_SECONDS = 2.0  # interval of writes; what happened since the last one is lost if the coordinator is killed
_LAST_SAVE_SECONDS = 3.0  # for the last save, when the program ends
_MAX_UNSAVED = 5000  # events that wait for a disk that fails; the oldest are dropped
# Left out at each start: numbers that clients may have seen, and that were not saved, must not be used again.
_SKIPPED_NUMBERS = 1_000_000
_BATCH_SECONDS = 0.1  # events of this time travel together: a flood of requests costs those who watch one message
_ALIVE_SECONDS = 5.0  # after which those who watch hear that nothing has happened
_WATCHED_SECONDS = 60.0  # for which the stream counts as watched after somebody has asked

# Of each kind, so that frequent ones do not push out the others. In all 2 to 3 MB, and 2 MB as text.
_KEPT: Mapping[str, int] = {
    "request_ended": 1000,
    "device_sampled": 1500,  # of five devices: five hours at one a minute, half an hour while somebody watches
    "device_changed": 500,
    "link_rated": 500,
    "plan_changed": 200,
    "phase_changed": 500,
    "coordinator_started": 50,
}
assert _KEPT.keys() == set(wire.EVENT_KINDS)


class _Line(wire.RecordedEvent):
    """One line. `stream` identifies the coordinator's folder: the numbers of two of them have nothing in common."""

    stream: wire.Name = Field(min_length=1)


class EventFile:
    """Keeps events over restarts: one JSON object a line, appended to `path`, with what came before in `path.1`.

    Not durable: a power cut loses what the kernel has not written yet.
    """

    def __init__(self, path: Path, max_bytes: int = _MAX_BYTES) -> None:
        self.path = path
        self._before = path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes
        # Whether a line may be incomplete at the end: after a power cut, or a write that has failed.
        self._may_be_cut = True

    def read(self) -> tuple[str, list[wire.RecordedEvent]]:
        """The stream's id, and its events, oldest first; lines that cannot be read are left out. Empty if there are none."""
        lines: list[_Line] = []
        for path in (self._before, self.path):
            with suppress(OSError):
                for text in path.read_bytes().splitlines():
                    with suppress(ValidationError):
                        lines.append(_Line.model_validate_json(text))
        stream = lines[-1].stream if lines else ""
        events: list[wire.RecordedEvent] = []
        for line in lines:
            if line.stream == stream and (not events or line.number > events[-1].number):
                events.append(wire.RecordedEvent(number=line.number, unix_seconds=line.unix_seconds, event=line.event))
        return stream, events

    def append(self, stream: str, events: Sequence[wire.RecordedEvent]) -> None:
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


class EventRing:
    """The events that are kept, of each kind the newest. Numbers must grow."""

    def __init__(self, kept: Mapping[str, int] = _KEPT) -> None:
        self._kept = {kind: deque[wire.RecordedEvent](maxlen=limit) for kind, limit in kept.items()}
        self._last_dropped = dict.fromkeys(kept, 0)  # number of the newest event that was dropped

    def add(self, recorded: wire.RecordedEvent) -> None:
        """Keep an event; the oldest one of its kind is dropped if there are too many."""
        kind = recorded.event.kind
        kept = self._kept[kind]
        if len(kept) == kept.maxlen:
            self._last_dropped[kind] = kept[0].number
        kept.append(recorded)

    def after(self, number: int, kinds: Collection[str], limit: int) -> list[wire.RecordedEvent]:
        """The first `limit` events of these kinds (empty: all) after this number, oldest first."""
        newer = [
            each
            for kind, kept in self._kept.items()
            if not kinds or kind in kinds
            for each in takewhile(lambda one: one.number > number, reversed(kept))
        ]
        return sorted(newer, key=lambda each: each.number)[:limit]

    def has_dropped(self, number: int, kinds: Collection[str]) -> bool:
        """Whether an event of these kinds after this number was dropped."""
        return any(last > number for kind, last in self._last_dropped.items() if not kinds or kind in kinds)


class EventStream:
    """`record` is called where something happens. Until `run` has read the file, events wait without numbers.

    A client that watches has no queue: it reads on where it stopped. If it is too slow, it misses what is no longer kept.
    """

    def __init__(self, file: EventFile, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock  # wall clock in Unix seconds
        self._ring = EventRing()
        self._stream = ""
        self._last_number = 0
        self._early: list[tuple[float, wire.Event]] = []  # before the file was read
        self._is_read = asyncio.Event()
        self._unsaved: list[wire.RecordedEvent] = []
        self._saves = True
        self._news = asyncio.Event()  # set, and replaced, at the next event
        self._num_watchers = 0
        self._asked_at: float | None = None
        self.listeners: list[Callable[[wire.Event], None]] = []  # called with each event, at once

    @property
    def is_watched(self) -> bool:
        """Whether somebody watches, or has asked within the last minute."""
        asked_now = self._asked_at is not None and loop_time() - self._asked_at < _WATCHED_SECONDS
        return bool(self._num_watchers) or asked_now

    def note_reader(self) -> None:
        """Somebody has asked for what is recorded."""
        self._asked_at = loop_time()

    def record(self, event: wire.Event) -> None:
        """Add an event. Never fails."""
        for listener in self.listeners:
            listener(event)
        if self._is_read.is_set():
            self._add(self._clock(), event)
        else:
            self._early.append((self._clock(), event))

    async def run(self) -> None:
        """Read the file, then save events until cancelled."""
        try:
            stream, events = await on_disk(self._file.path, FILE_SECONDS, self._file.read)
        except DiskHung as error:
            log.warning("events of earlier runs are not shown: %s", error)
            stream, events = "", []
        for each in events:
            self._ring.add(each)
        self._stream = stream or secrets.token_hex(4)
        self._last_number = (events[-1].number if events else 0) + _SKIPPED_NUMBERS
        self._is_read.set()
        for at, event in self._early:
            self._add(at, event)
        self._early.clear()
        try:
            while True:
                await asyncio.sleep(_SAVE_SECONDS)
                await self._save()
        finally:
            if not hung_paths():
                await self._save(_LAST_SAVE_SECONDS)

    async def watch(self, request: wire.WatchEvents) -> AsyncGenerator[wire.EventsRecorded | wire.Done, None]:
        """Answer a request. Raises BadRequest for a kind that there is not."""
        if unknown := set(request.kinds) - set(wire.EVENT_KINDS):
            kinds = ", ".join(wire.EVENT_KINDS)
            raise BadRequest(reason=f"there are no events of the kind '{min(unknown)}'; the kinds are: {kinds}")
        if not request.is_copy:
            self.note_reader()
        return self._watch(request)

    async def _watch(self, request: wire.WatchEvents) -> AsyncGenerator[wire.EventsRecorded | wire.Done, None]:
        self._num_watchers += not request.is_copy
        try:
            await self._is_read.wait()
            number, has_gap = self._start(request.since)
            alive_at = loop_time()
            while True:
                news = self._news
                has_gap |= number > 0 and self._ring.has_dropped(number, request.kinds)
                events = self._ring.after(number, request.kinds, wire.MAX_EVENTS)
                is_full = len(events) == wire.MAX_EVENTS
                number = events[-1].number if is_full else self._last_number
                if events or has_gap or loop_time() >= alive_at:
                    cursor = f"{self._stream}-{number}"
                    yield wire.EventsRecorded(events=tuple(events), cursor=cursor, has_gap=has_gap)
                    alive_at, has_gap = loop_time() + _ALIVE_SECONDS, False
                if is_full:
                    continue
                if not request.follow:
                    yield wire.Done()
                    return
                with suppress(asyncio.TimeoutError):
                    await with_timeout(max(alive_at - loop_time(), 0.001), news.wait())
                    await asyncio.sleep(_BATCH_SECONDS)
        finally:
            self._num_watchers -= not request.is_copy

    def _start(self, since: str) -> tuple[int, bool]:
        """The number after which to begin, and whether events are missing before it."""
        if since == "now":
            return self._last_number, False
        stream, _, number = since.partition("-")
        if stream == self._stream and number.isdigit() and int(number) <= self._last_number:
            return int(number), False
        return 0, bool(since)

    def _add(self, at: float, event: wire.Event) -> None:
        self._last_number += 1
        recorded = wire.RecordedEvent(number=self._last_number, unix_seconds=at, event=event)
        self._ring.add(recorded)
        self._unsaved.append(recorded)
        del self._unsaved[:-_MAX_UNSAVED]
        self._news.set()
        self._news = asyncio.Event()

    # ---- the file -------------------------------------------------------------------------------------------------

    async def _save(self, seconds: float = FILE_SECONDS) -> None:
        if not (events := self._unsaved):
            return
        self._unsaved = []
        try:
            error = await on_disk(self._file.path, seconds, self._append, events)
        except DiskHung as hung:
            error = hung
        if error is not None:
            self._unsaved = [*events, *self._unsaved][-_MAX_UNSAVED:]
        self._saved(error)

    def _append(self, events: list[wire.RecordedEvent]) -> Exception | None:
        try:
            self._file.append(self._stream, events)
        except OSError as error:
            return error
        return None

    def _saved(self, error: Exception | None) -> None:
        """Report the first failure, and the first success after one."""
        if error is not None and self._saves:
            log.warning("%s cannot be written; events are kept in memory: %s", self._file.path, error)
        elif error is None and not self._saves:
            log.warning("%s is written again", self._file.path)
        self._saves = error is None
