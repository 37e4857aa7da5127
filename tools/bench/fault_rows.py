"""Rows of the fault experiments: what clients saw around a fault, and the tables made of it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hearth.platform.units import format_seconds
from tools.bench.results import Record, Summary, Table

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
    answers: int  # correct ones, from the fault to the end of the observation
    failed: tuple[str, ...] = ()  # errors of calls since the last fault, with seconds from this one
    wrong: tuple[str, ...] = ()  # what was wrong with answers
    pause_seconds: float
    rejoin_pause_seconds: float = 0.0
    limit_seconds: float | None = None  # of the pause
    recovered: bool = True  # serves, with all devices there, when the observation ended
    plan_devices_before: int  # devices of the plan at the fault
    disturbed: str = ""  # why times cannot be trusted
    log: str = ""  # where something went wrong: the gap of each client, and what coordinators and agents have logged

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


def worst_pause(found: Mapping[int, tuple[float, Gap]], since: float) -> tuple[float, Gap]:
    """Of the pauses of all clients (`pauses`), the longest, and the gap itself."""
    return max(found.values(), key=lambda pause: pause[0], default=(0.0, Gap(since, since)))


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


_COLUMNS: Mapping[str, Callable[[Sequence[FaultRow]], object]] = {  # of the rows of one fault
    "fault": lambda rows: rows[0].fault,
    "times": len,
    "answers": lambda rows: sum(row.answers for row in rows),
    "failed calls": lambda rows: sum(len(row.failed) for row in rows),
    "wrong answers": lambda rows: sum(len(row.wrong) for row in rows),
    "not recovered": lambda rows: sum(not row.recovered for row in rows),
    "pause, median": lambda rows: format_seconds(statistics.median(row.pause_seconds for row in rows)),
    "pause, worst": lambda rows: format_seconds(max(row.pause_seconds for row in rows)),
    "limit": lambda rows: "-" if rows[0].limit_seconds is None else format_seconds(rows[0].limit_seconds),
    "over the limit": lambda rows: "-" if rows[0].limit_seconds is None else _over_the_limit(rows),
    "pause at rejoining, worst": lambda rows: format_seconds(max(row.rejoin_pause_seconds for row in rows)),
}


def _over_the_limit(rows: Sequence[FaultRow]) -> str:
    late = sum(row.is_late for row in rows)
    return f"**{late} of {len(rows)}**" if late else f"0 of {len(rows)}"


def summarise_faults(rows: Sequence[FaultRow]) -> Summary:
    """A table per load. The run fails if a call failed, an answer was wrong or a home did not recover."""
    tables = []
    for load in dict.fromkeys(row.load for row in rows):
        by_fault: dict[str, list[FaultRow]] = {}
        for row in sorted((row for row in rows if row.load == load), key=lambda row: row.fault):
            by_fault.setdefault(row.fault, []).append(row)
        tables.append(Table.of_columns(f"Faults under load: {load}", _COLUMNS, by_fault.values()))
    failed, wrong = sum(len(row.failed) for row in rows), sum(len(row.wrong) for row in rows)
    stuck = sum(not row.recovered for row in rows)
    answers = sum(row.answers for row in rows)
    late = [row for row in rows if row.is_late]
    limited = sum(row.limit_seconds is not None for row in rows)
    disturbed = sum(bool(row.disturbed) for row in rows)
    counts = Counter(row.plan_devices_before for row in rows)
    sizes = ", ".join(f"{size} in {count} cases" for size, count in sorted(counts.items()))
    worst = {row.fault: row for row in sorted(late, key=lambda row: row.pause_seconds)}
    harms = [f"{row.load}, {row.fault} of {row.target}: {row.harms[0]}" for row in rows if row.harms]
    conclusions = [
        f"{len(rows)} faults, {answers} correct answers, {failed} failed calls, {wrong} wrong answers; "
        f"{stuck} times the home did not recover",
        f"{limited - len(late)} of {limited} pauses are within their limits",
        *(
            f"over the limit: {fault}, {sum(row.fault == fault for row in late)} of {sum(row.fault == fault for row in rows)}, "
            f"worst {format_seconds(row.pause_seconds)} under {row.load}, limit {format_seconds(row.limit_seconds or 0.0)}"
            for fault, row in sorted(worst.items())
        ),
        f"devices of the plan at the fault: {sizes}",
    ]
    if disturbed:
        conclusions.append(f"other programs used the machine during {disturbed} faults: their pauses are too long")
    failure = "" if all(row.harmless for row in rows) else "a fault was not harmless"
    return Summary(conclusions=(*conclusions, *harms), tables=tuple(tables), failure=failure)
