"""Rows of the fault experiments: what clients saw around a fault, and the tables made of it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hearth.platform.units import format_seconds
from tools.bench.results import Record, Summary, Table

_MOST_HARMS = 10  # errors that the conclusions name

# Seconds (monotonic), client, "answer", "token", "wrong" or "failed", and what was wrong.
Happened = tuple[float, int, str, str]
_DELIVERY_SECONDS = 0.1  # after a network was parted: answers that had passed it may still be read


class FaultRow(Record):
    """One fault under load.

    `pause_seconds`: a client's longest time between two answers (of a stream: two tokens) around the fault, less its
    median time before; of the client that waited longest. `rejoin_pause_seconds`: the same after the repair.
    """

    load: str
    number: int  # in the schedule of its load
    fault: str
    target: str  # device, or devices
    moment_seconds: float  # from the start of the load
    answers: int  # correct ones, from the fault to the end of the observation
    failed: tuple[str, ...] = ()  # errors of calls since the last fault, with seconds from this one
    wrong: tuple[str, ...] = ()  # what was wrong with answers
    pause_seconds: float
    rejoin_pause_seconds: float = 0.0
    again_seconds: float  # from the fault to the end of that pause
    limit_seconds: float | None = None  # of the pause
    recovered: bool = True  # serves, with all devices there, when the observation ended
    workers_before: Mapping[str, int] = {}  # pids by device
    workers_after: Mapping[str, int] = {}
    phases: tuple[str, ...] = ()  # of the deployment, with seconds since the fault
    plan_devices_before: int = 0  # devices of the plan at the fault; 0: an earlier version did not record it
    plan_devices: int = 0  # after it
    disturbed: str = ""  # why times cannot be trusted
    log: str = ""  # where something went wrong: the gap of each client, and what coordinators and agents have logged

    @property
    def kept_workers(self) -> int:
        return sum(self.workers_after.get(device) == pid for device, pid in self.workers_before.items())

    @property
    def is_late(self) -> bool:
        """Whether the pause is longer than its limit."""
        return self.limit_seconds is not None and self.pause_seconds > self.limit_seconds

    @property
    def harms(self) -> tuple[str, ...]:
        """Errors of calls, and what was wrong with answers."""
        return (*self.failed, *self.wrong)

    @property
    def harmless(self) -> bool:
        return self.recovered and not self.harms


class Gap(NamedTuple):
    """A time without an answer, in monotonic seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def longest_gap(times: Sequence[float], since: float, until: float, end: float) -> Gap:
    """The longest gap between successive times that begins before `until` and ends after `since`.

    `end` is when the observation ended: a client without a further answer waits until then.
    """
    moments = [*times, max(end, times[-1])] if times else [since, end]
    gaps = [Gap(before, after) for before, after in pairwise(moments) if before < until and after > since]
    return max(gaps, key=lambda gap: gap.seconds, default=Gap(since, since))


def worst_pause(happened: Iterable[Happened], since: float, until: float, end: float) -> tuple[float, Gap]:
    """Of all clients, the largest pause, and the gap itself."""
    none = 0.0, Gap(since, since)
    return max(pauses(happened, since, until, end).values(), key=lambda pause: pause[0], default=none)


def pauses(happened: Iterable[Happened], since: float, until: float, end: float) -> dict[int, tuple[float, Gap]]:
    """Of each client, the largest pause: its length less the client's median gap before `since`, and the gap itself."""
    by_client: dict[int, list[float]] = {}
    for seconds, client, kind, _ in happened:
        times = by_client.setdefault(client, [])
        if kind != "failed":
            times.append(seconds)
    found: dict[int, tuple[float, Gap]] = {}
    for client, times in by_client.items():
        usual = [after - before for before, after in pairwise(times) if after <= since]
        gap = longest_gap(times, since, until, end)
        found[client] = max(gap.seconds - (statistics.median(usual) if usual else 0.0), 0.0), gap
    return found


def answers_steadily(happened: Iterable[Happened], clients: Iterable[int], since: float, until: float) -> bool:
    """Whether each of these clients got an answer in either half of this time."""
    middle = (since + until) / 2
    halves: tuple[set[int], set[int]] = (set(), set())
    for seconds, client, kind, _ in happened:
        if kind != "failed" and since <= seconds <= until:
            halves[seconds > middle].add(client)
    return all(half.issuperset(clients) for half in halves)


def two_leaders(happened: Iterable[Happened], num_near: int, parted: float, mended: float) -> str:
    """What shows that both sides of a parted network computed at the same time; empty if nothing does.

    The clients below `num_near` are on one side, the others on the other. A side may take over from the other one, once.
    """
    sides: tuple[list[float], list[float]] = ([], [])
    for seconds, client, kind, _ in happened:
        if kind != "failed" and parted + _DELIVERY_SECONDS <= seconds <= mended:
            sides[client >= num_near].append(seconds)
    near, far = sides
    if not near or not far or max(near) < min(far) or max(far) < min(near):
        return ""
    spans = " and ".join(f"from +{min(side) - parted:.2f} to +{max(side) - parted:.2f} s" for side in sides)
    return f"both sides of the network got answers: {spans}"


def tokens_that_differ(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Positions at which two answers differ; missing and additional tokens count."""
    different = sum(a != b for a, b in zip(answer, reference, strict=False))
    return different + abs(len(answer) - len(reference))


def phases_since(history: Sequence[dict[str, Any]], seconds: float) -> tuple[str, ...]:
    """The phases entered in the last `seconds`, with the time since their start."""
    recent = [each for each in history if each["seconds_ago"] <= seconds]
    return tuple(f"+{seconds - each['seconds_ago']:.2f} s {each['phase']}: {each['cause']}"[:200] for each in recent)


_COLUMNS = (
    "fault", "times", "answers", "failed calls", "wrong answers", "not recovered", "workers kept", "pause, median",
    "pause, worst", "limit", "over the limit", "pause at rejoining, worst",
)  # fmt: skip


def summarise_faults(rows: Sequence[FaultRow]) -> Summary:
    """A table per load. The run fails if a call failed, an answer was wrong or a home did not recover."""
    tables = []
    for load in dict.fromkeys(row.load for row in rows):
        of_load = [row for row in rows if row.load == load]
        names = sorted({row.fault for row in of_load})
        lines = [_line(name, [row for row in of_load if row.fault == name]) for name in names]
        tables.append(Table.of(f"Faults under load: {load}", _COLUMNS, lines))
    failed, wrong = sum(len(row.failed) for row in rows), sum(len(row.wrong) for row in rows)
    stuck = sum(not row.recovered for row in rows)
    answers = sum(row.answers for row in rows)
    late = [row for row in rows if row.is_late]
    limited = sum(row.limit_seconds is not None for row in rows)
    disturbed = sum(bool(row.disturbed) for row in rows)
    counts = Counter(row.plan_devices_before for row in rows if row.plan_devices_before)
    sizes = ", ".join(f"{size} in {count} cases" for size, count in sorted(counts.items()))
    worst = {row.fault: row for row in sorted(late, key=lambda row: row.pause_seconds)}
    harms = [f"{row.load}, {row.fault} of {row.target}: {row.harms[0]}" for row in rows if row.harms]
    conclusions = (
        f"{len(rows)} faults, {answers} correct answers, {failed} failed calls, {wrong} wrong answers; "
        f"{stuck} times the home did not recover",
        f"{limited - len(late)} of {limited} pauses are within their limits",
        *(
            f"over the limit: {fault}, {sum(row.fault == fault for row in late)} of {sum(row.fault == fault for row in rows)}, "
            f"worst {format_seconds(row.pause_seconds)} under {row.load}, limit {format_seconds(row.limit_seconds or 0.0)}"
            for fault, row in sorted(worst.items())
        ),
        *([f"devices of the plan at the fault: {sizes}"] if sizes else ()),
        *(
            [f"other programs used the machine during {disturbed} faults: their pauses are too long"]
            if disturbed
            else ()
        ),
        *harms[:_MOST_HARMS],
        *([f"... and {len(harms) - _MOST_HARMS} more"] if len(harms) > _MOST_HARMS else ()),
    )
    harmless = all(row.harmless for row in rows)
    return Summary(
        conclusions=conclusions, tables=tuple(tables), failure="" if harmless else "a fault was not harmless"
    )


def _line(fault: str, rows: Sequence[FaultRow]) -> tuple[str, ...]:
    pauses = [row.pause_seconds for row in rows]
    limit = rows[0].limit_seconds
    kept, before = (
        sum(values) for values in zip(*((r.kept_workers, len(r.workers_before)) for r in rows), strict=True)
    )
    late = sum(row.is_late for row in rows)
    return (
        fault, str(len(rows)), str(sum(row.answers for row in rows)), str(sum(len(row.failed) for row in rows)),
        str(sum(len(row.wrong) for row in rows)), str(sum(not row.recovered for row in rows)), f"{kept} of {before}",
        format_seconds(statistics.median(pauses)), format_seconds(max(pauses)),
        "-" if limit is None else format_seconds(limit),
        "-" if limit is None else f"**{late} of {len(rows)}**" if late else f"0 of {len(rows)}",
        format_seconds(max(row.rejoin_pause_seconds for row in rows)),
    )  # fmt: skip
