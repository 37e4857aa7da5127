"""Rows of the experiment with several models, and the findings made of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hearth.platform.units import format_bytes
from tools.bench.findings import COUNT, PERCENT, RATIO, Finding, at_least, at_most, equal, summarise, without_target
from tools.bench.results import Summary, Table
from tools.bench.stats import paired_ratio

Step = Literal["alone", "together", "stopped", "killed"]


class Asked(BaseModel):
    """What the clients of one model saw in some time."""

    answers: int = 0  # correct ones
    per_second: float = 0.0  # answers, of all clients together
    longest_seconds: float = 0.0  # from a request to its answer or its failure
    failed: list[str] = []
    wrong: list[str] = []


class LoadRow(BaseModel):
    """What clients saw in one step, by model: of one model or of all in a round, or of those that ask during a change."""

    model_config = ConfigDict(frozen=True)

    step: Step
    asked: dict[str, Asked]
    target: str = ""  # the model that is stopped, or the device that is killed
    seconds: float  # from the first request to the last answer
    disturbed: str = ""  # why times of a round cannot be trusted


class PlanRow(BaseModel):
    """A model's memory when it was served alone, by its plan for one device, and the devices of its plans among the others."""

    model_config = ConfigDict(frozen=True)

    model: str
    planned_bytes: int
    held_bytes: int  # by its device then, more than by an idle one
    devices: tuple[str, ...]
    devices_after: tuple[str, ...]  # the loss of a device


class DeviceRow(BaseModel):
    """Memory of one device, over the whole run."""

    model_config = ConfigDict(frozen=True)

    device: str
    limit_bytes: int
    peak_bytes: int  # of all its processes, without the page cache
    killed: int  # processes that the kernel killed for the limit


def summarise_models(rows: Sequence[LoadRow | PlanRow | DeviceRow]) -> Summary:
    """The findings, and the devices of the plans."""
    plans = [row for row in rows if isinstance(row, PlanRow)]
    loads = [row for row in rows if isinstance(row, LoadRow)]
    devices = [row for row in rows if isinstance(row, DeviceRow)]
    lines = [
        (
            row.model,
            *map(format_bytes, (row.planned_bytes, row.held_bytes)),
            *map(", ".join, (row.devices, row.devices_after)),
        )
        for row in plans
    ]
    columns = (
        "model", "planned memory, alone on one device", "held then", "devices, beside the others", "after the loss of one",
    )  # fmt: skip
    findings = [*_of_memory(plans, devices), *_of_answers(loads), *_of_rounds(loads), *_of_changes(loads)]
    return summarise("Three models at once", findings, Table.of("Plans", columns, lines))


def _of_memory(plans: Sequence[PlanRow], devices: Sequence[DeviceRow]) -> Iterator[Finding]:
    if plans and devices:
        total, limit = sum(row.planned_bytes for row in plans), devices[0].limit_bytes
        detail = f"{format_bytes(total)}, limit {format_bytes(limit)}"
        yield at_least(
            "memory of all models on one device by their plans, over its limit", total / limit, 1.0, RATIO, detail
        )
    for row in devices:
        detail = f"{format_bytes(row.peak_bytes)} of {format_bytes(row.limit_bytes)}"
        yield at_most(
            f"{row.device}: the most that it held, of its limit", row.peak_bytes / row.limit_bytes, 1.0, PERCENT, detail
        )
    if devices:
        yield equal("processes killed for memory", sum(row.killed for row in devices), 0, COUNT)


def _of_answers(rows: Sequence[LoadRow]) -> Iterator[Finding]:
    """Answers with all models up, against those of each alone."""
    for name in _names(rows):
        asked = [row.asked[name] for row in rows if name in row.asked]
        wrong = [what for each in asked for what in each.wrong]
        detail = "; ".join([f"{sum(each.answers for each in asked)} are equal", *wrong[:1]])
        yield equal(f"{name}: answers that differ from those of the model alone", len(wrong), 0, COUNT, detail)


def _of_rounds(rows: Sequence[LoadRow]) -> Iterator[Finding]:
    """Throughput of each model with all under load, over its own while the others rest; a third of it is its share."""
    names = _names(rows)
    for name in names:
        alone, together = (
            [row.asked[name].per_second for row in rows if row.step == step and name in row.asked]
            for step in ("alone", "together")
        )
        num = min(len(alone), len(together))
        if not num or not all(alone):
            continue
        ratio = paired_ratio(together[:num], alone[:num])
        own, shared = statistics.median(alone), statistics.median(together)
        yield at_least(
            f"{name}: throughput under load of all, over that alone", ratio.median, 1 / len(names), PERCENT,
            f"{ratio.interval}; {shared:.2f} and {own:.2f} answers/s, a share is {own / len(names):.2f}",
        )  # fmt: skip
    failed = sum(len(each.failed) for row in rows if row.step in ("alone", "together") for each in row.asked.values())
    yield equal("failed requests in the rounds", failed, 0, COUNT)
    if disturbed := sum(bool(row.disturbed) for row in rows):
        yield without_target("parts of rounds with other programs beside them", disturbed, COUNT)


def _of_changes(rows: Sequence[LoadRow]) -> Iterator[Finding]:
    for row in rows:
        if row.step in ("alone", "together"):
            continue
        failed = [what for each in row.asked.values() for what in each.failed]
        answers = sum(each.answers for each in row.asked.values())
        detail = "; ".join([f"{answers} answers in {row.seconds:.1f} s", *failed[:1]])
        what = f"{row.target} is stopped and served again" if row.step == "stopped" else f"{row.target} is killed"
        yield equal(f"{what}: failed requests of {', '.join(row.asked)}", len(failed), 0, COUNT, detail)
        each = ", ".join(f"{name} {asked.longest_seconds:.2f} s" for name, asked in row.asked.items())
        longest = max(asked.longest_seconds for asked in row.asked.values())
        yield without_target(f"{what}: longest request", longest, "{:.2f} s".format, each)


def _names(rows: Sequence[LoadRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.asked))
