"""Result rows, one per strategy and setting, with their tables and files. Pure except for file checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from hearth.errors import BadSetting
from hearth.platform.units import format_bytes, format_seconds

Bytes = int | None


class Row(BaseModel):
    """One strategy in one setting. Times are None if it was not run; `notes` give the reason."""

    model_config = ConfigDict(frozen=True)

    scenario: str
    devices: int = Field(ge=1)  # available to the strategy
    model: str
    layers: int = Field(ge=1)  # number of layers run
    seq_len: int = Field(ge=1)
    mbit: float | None  # real rate of every link; None: the links differ
    paper_mbit: float | None = None  # corresponding rate in the paper, at the same ratio of compute to traffic
    strategy: str
    wire: str
    lz4: Literal["auto", "on", "off"] = "auto"
    encrypted: bool = True
    median_seconds: float | None = None
    min_seconds: float | None = None
    max_seconds: float | None = None
    bound_seconds: float | None = None  # see `bound`
    bound_share: float | None = None  # bound / median; 1 is perfect overlap without latency
    predicted_seconds: float | None = None  # by the planner, before the run
    prediction_error: float | None = None  # predicted / median - 1
    baseline: str | None = None
    speedup_over_baseline: float | None = None  # median of the rounds' ratios
    speedup_low: float | None = None  # 95 % confidence interval, bootstrap over rounds
    speedup_high: float | None = None
    bytes_sent: Bytes = None  # by all devices in one step, every hop
    raw_bytes: Bytes = None  # the same values as float32
    lz4_saved_bytes: Bytes = None
    plan: str | None = None  # strategy and devices, as planned
    rounds: int = 0
    steal_share: float | None = None
    foreign_share: float | None = None
    run_queue: int | None = None
    trusted: bool = True
    wrong: bool = False
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Strategy, wire format and other settings that distinguish the row."""
        parts = [self.strategy, self.wire]
        if self.lz4 != "auto":
            parts.append(f"lz4 {self.lz4}")
        if not self.encrypted and self.strategy not in ("local", "gloo-tp"):
            parts.append("plain")
        return " ".join(parts)

    @property
    def setting(self) -> str:
        """Description of the setting, equal for rows that can be compared."""
        rate = "links as they are" if self.mbit is None else f"{self.mbit:.0f} Mbit/s"
        if self.paper_mbit is not None:
            rate += f" (the paper's {self.paper_mbit:.0f})"
        return (
            f"{self.scenario}, {self.devices} {'device' if self.devices == 1 else 'devices'}, {self.model} "
            f"{self.layers} layers, {self.seq_len} tokens, {rate}"
        )


_HEADINGS = ("strategy", "median", "min..max", "bound", "predicted", "speed-up", "sent", "lz4 saved", "notes")
_ONLY_WIDE = ("min..max", "bound", "lz4 saved")
_WIDE = 140  # terminal columns needed for all headings


def footnotes(rows: Sequence[Row]) -> list[str]:
    """The distinct notes of a table's rows, in order; rows refer to them by number, from 1."""
    return list(dict.fromkeys(note for row in rows for note in row.notes))


def cells(row: Row, numbered: Sequence[str]) -> tuple[str, ...]:
    """The cells of one table line."""
    marks = [*(["WRONG"] if row.wrong else []), *([] if row.trusted else ["untrusted"])]
    remarks = " ".join([*marks, *(str(numbered.index(note) + 1) for note in row.notes)])
    if row.median_seconds is None:
        return (row.label, *["-"] * 7, remarks)
    predicted = "-"
    if row.predicted_seconds is not None and row.prediction_error is not None:
        predicted = f"{format_seconds(row.predicted_seconds)} ({row.prediction_error:+.0%})"
    speedup = "-"
    if row.speedup_over_baseline is not None:
        speedup = f"{row.speedup_over_baseline:.2f} [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
    return (
        row.label,
        format_seconds(row.median_seconds),
        f"{format_seconds(row.min_seconds or 0)}..{format_seconds(row.max_seconds or 0)}",
        "-" if row.bound_seconds is None else f"{format_seconds(row.bound_seconds)} ({row.bound_share:.0%})",
        predicted,
        speedup,
        "-" if not row.bytes_sent else format_bytes(row.bytes_sent),
        "-" if not row.lz4_saved_bytes else format_bytes(row.lz4_saved_bytes),
        remarks,
    )


def rich_table(rows: Sequence[Row], width: int) -> Table:
    """A table of one setting; on a narrow screen without the less important columns."""
    shown = [index for index, heading in enumerate(_HEADINGS) if width >= _WIDE or heading not in _ONLY_WIDE]
    table = Table(title=rows[0].setting, title_justify="left", show_edge=False)
    for index in shown:
        table.add_column(_HEADINGS[index], justify="left" if index in (0, len(_HEADINGS) - 1) else "right")
    numbered = footnotes(rows)
    for row in rows:
        style = "red" if row.wrong else "" if row.trusted else "yellow"
        found = cells(row, numbered)
        table.add_row(*(found[index] for index in shown), style=style)
    return table


def markdown(rows: Sequence[Row], summary: Sequence[str] = ()) -> str:
    """Markdown: the summary lines, then one table per setting."""
    lines = [*(f"- {line}" for line in summary), *([""] if summary else [])]
    for group in by_setting(rows):
        numbered = footnotes(group)
        lines += [f"**{group[0].setting}**", "", _line(_HEADINGS), _line(["---"] * len(_HEADINGS))]
        lines += [_line(cells(row, numbered)) for row in group]
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(numbered, 1)), ""]
    return "\n".join(lines)


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(part.replace("|", "/") for part in parts) + " |"


def by_setting(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by setting, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return list(groups.values())


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([row.model_dump(mode="json") for row in rows], indent=1) + "\n"


def check_writable(setting: str, path: Path | None) -> None:
    """Raise BadSetting if a file cannot be written. Call it before measuring."""
    if path is None:
        return
    if path.is_dir() or not path.resolve().parent.is_dir():
        reason = "it is a directory" if path.is_dir() else f"there is no directory {path.resolve().parent}"
        raise BadSetting(setting=setting, reason=reason)
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise BadSetting(setting=setting, reason=str(error)) from None


def check_files(json: Path | None, markdown: Path | None) -> None:
    """Check the output files that all commands have. Raises BadSetting."""
    check_writable("--json", json)
    check_writable("--markdown", markdown)
