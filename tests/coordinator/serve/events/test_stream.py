"""The event stream: what is kept, what a file holds after a cut or a full disk, and what those who watch see."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from coordinator.serve.events.stream import EventFile, EventRing, EventStream
from hearth.errors import BadRequest
from hearth.platform.asyncio_tools import cancel_all
from hearth.wire import messages as wire


def phase(cause: str = "asked") -> wire.PhaseChanged:
    return wire.PhaseChanged(deployment="d", phase="settling", cause=cause)


def device(name: str = "kitchen") -> wire.DeviceChanged:
    return wire.DeviceChanged(device_id="1", name=name, state="alive")


def recorded(number: int, event: wire.Event | None = None) -> wire.RecordedEvent:
    return wire.RecordedEvent(number=number, unix_seconds=1e9 + number, event=event or phase(str(number)))


# ---- what is kept -----------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 45), st.integers(1, 20))
def test_ring_keeps_the_newest_of_each_kind_in_order_and_says_what_is_missing(
    kinds: list[bool], since: int, limit: int
) -> None:
    ring = EventRing({"phase_changed": 5, "device_changed": 3})
    everything = [recorded(number, phase() if is_phase else device()) for number, is_phase in enumerate(kinds, start=1)]
    for each in everything:
        ring.add(each)
    kept = {
        each.number
        for kind, limit_of_kind in (("phase_changed", 5), ("device_changed", 3))
        for each in [one for one in everything if one.event.kind == kind][-limit_of_kind:]
    }
    newer = [each for each in everything if each.number > since]
    assert ring.after(since, (), limit) == [each for each in newer if each.number in kept][:limit]
    assert ring.has_dropped(since, ()) == any(each.number not in kept for each in newer)
    assert all(each.event.kind == "phase_changed" for each in ring.after(since, ("phase_changed",), limit))


# ---- the file ---------------------------------------------------------------------------------------------------------


def test_file_is_read_again_and_stays_bounded(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "state" / "events.jsonl", max_bytes=2000)
    for number in range(1, 101):
        file.append("ab", [recorded(number)])
    assert sum(each.stat().st_size for each in file.path.parent.iterdir()) < 2 * 2200
    stream, events = EventFile(file.path, max_bytes=2000).read()
    numbers = [each.number for each in events]
    assert stream == "ab"
    assert numbers == list(range(numbers[0], 101))
    assert len(numbers) > 10
    assert events[-1] == recorded(100)


@given(st.integers(0, 700), st.binary(max_size=20))
def test_cut_or_damaged_file_loses_only_the_events_that_it_concerns(cut: int, garbage: bytes) -> None:

    with tempfile.TemporaryDirectory() as folder:
        file = EventFile(Path(folder) / "events.jsonl")
        file.append("ab", [recorded(number) for number in range(1, 6)])
        whole = file.path.read_bytes()
        file.path.write_bytes(whole[:cut] + garbage)
        num_whole = whole[:cut].count(b"}\n")
        EventFile(file.path).append("ab", [recorded(100)])
        _, events = EventFile(file.path).read()
        assert [each.number for each in events][-1] == 100
        assert [each.number for each in events][:num_whole] == list(range(1, num_whole + 1))


# ---- those who watch --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[EventStream]:
    stream = EventStream(EventFile(path), clock=lambda: 1e9)
    task = asyncio.ensure_future(stream.run())
    try:
        yield stream
    finally:
        await cancel_all([task])


async def seen(
    stream: EventStream, since: str = "", kinds: Iterable[str] = ()
) -> tuple[list[wire.RecordedEvent], str, bool]:
    """The events that are there, the cursor after them, and whether some are missing."""
    events: list[wire.RecordedEvent] = []
    cursor, has_gap = "", False
    async with aclosing(await stream.watch(wire.WatchEvents(since=since, kinds=tuple(kinds), follow=False))) as answers:
        async for answer in answers:
            if isinstance(answer, wire.EventsRecorded):
                events += answer.events
                cursor, has_gap = answer.cursor, has_gap or answer.has_gap
    return events, cursor, has_gap


def causes(events: Iterable[wire.RecordedEvent]) -> list[str]:
    return [each.event.cause for each in events if isinstance(each.event, wire.PhaseChanged)]


async def test_events_survive_a_restart_and_a_cursor_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    async with running(path) as stream:
        stream.record(phase("early"))  # before the file was read
        _, cursor, _ = await seen(stream)
        for number in range(300):  # more than one message holds
            stream.record(phase(str(number)))
        events, _, has_gap = await seen(stream, cursor)
        assert causes(events) == [str(number) for number in range(300)]
        assert not has_gap
    async with running(path) as stream:
        stream.record(phase("late"))
        events, _, has_gap = await seen(stream, cursor)
        assert causes(events) == [*(str(number) for number in range(300)), "late"]
        assert not has_gap
        numbers = [each.number for each in (await seen(stream))[0]]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("since", ["feed-12", "x", "-", "{stream}-99999999999", "{stream}-x"])
async def test_cursor_that_this_coordinator_does_not_know_gets_everything(tmp_path: Path, since: str) -> None:
    async with running(tmp_path / "events.jsonl") as stream:
        stream.record(phase("one"))
        _, cursor, _ = await seen(stream)
        events, _, has_gap = await seen(stream, since.format(stream=cursor.partition("-")[0]))
        assert causes(events) == ["one"]
        assert has_gap
        assert (await seen(stream, "now"))[0] == []


async def test_slow_client_misses_what_is_dropped_and_is_told(tmp_path: Path) -> None:
    async with running(tmp_path / "events.jsonl") as stream:
        answers = await stream.watch(wire.WatchEvents(kinds=("phase_changed",)))
        stream.record(phase("first"))
        first = await anext(answers)
        assert isinstance(first, wire.EventsRecorded)
        assert causes(first.events) == ["first"]
        for number in range(1000):  # twice as many as are kept, while the client does not read
            stream.record(phase(str(number)))
        batch = await asyncio.wait_for(anext(answers), 20)
        assert isinstance(batch, wire.EventsRecorded)
        assert batch.has_gap
        assert causes(batch.events)[0] == "500"
        await answers.aclose()


async def test_kinds_are_chosen_and_unknown_ones_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "events.jsonl") as stream:
        stream.record(phase())
        stream.record(device())
        events, _, _ = await seen(stream, kinds=["device_changed"])
        assert [each.event for each in events] == [device()]
        with pytest.raises(BadRequest, match="no events of the kind 'weather'"):
            await seen(stream, kinds=["weather"])


async def test_full_disk_is_reported_once_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("coordinator.serve.events.stream._SAVE_SECONDS", 0.01)
    path = tmp_path / "events.jsonl"
    failures = 0

    class FullDisk(EventFile):
        def append(self, stream: str, events: object) -> None:
            nonlocal failures
            if failures < 3:
                failures += 1
                with contextlib.suppress(OSError):  # a part is written
                    self.path.write_text('{"stream": "a')
                raise OSError(28, "No space left on device")
            super().append(stream, events)  # type: ignore[arg-type]

    stream = EventStream(FullDisk(path))
    task = asyncio.ensure_future(stream.run())
    stream.record(phase("kept"))
    await until("the events are written again", lambda: "written again" in caplog.text)
    await cancel_all([task])
    assert caplog.text.count("cannot be written") == 1
    assert causes(EventFile(path).read()[1]) == ["kept"]
