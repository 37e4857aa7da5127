"""Rows of the strategies' experiments, one per strategy and setting, and their table cells. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from hearth.plan.common import ValueFormatName
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.plans import Entry, Lz4, Name
from tools.bench.results import Record
from tools.bench.stats import Ratio


class Row(Record):
    """One strategy in one setting. Without `seconds`, it was not run; `notes` give the reason."""

    scenario: str
    devices: int = Field(ge=1)  # available to the strategy
    model: str
    layers: int = Field(ge=1)  # number of layers run
    hidden_size: int
    seq_len: int = Field(ge=1)
    mbit: float | None  # real rate of every link; None: the links differ
    paper_mbit: float | None = None  # corresponding rate in the paper, at the same ratio of compute to traffic
    strategy: Name
    wire: ValueFormatName
    lz4: Lz4 = "auto"
    encrypt: bool = True
    seconds: tuple[float, ...] = ()  # of one step, by round
    bound_seconds: float | None = None  # see `bound`; median of the rounds
    bound_share: Ratio | None = None  # the bound's share of the step's time, in the same rounds
    predicted_seconds: float | None = None  # by the planner, before the run, from the profile as it was measured
    rescaled_seconds: float | None = None  # of the same plan, from that profile scaled by steps of one device
    baseline: str | None = None
    speedup: Ratio | None = None  # over the baseline, in the same rounds
    sent_bytes: int = 0  # by all devices in one step, every hop
    raw_bytes: int = 0  # the same values as float32
    lz4_saved_bytes: int = 0
    plan: str | None = None  # strategy and devices, as planned
    trusted: bool = True
    wrong: bool = False
    notes: tuple[str, ...] = ()

    @property
    def median_seconds(self) -> float:
        """Raises statistics.StatisticsError if it was not run."""
        return statistics.median(self.seconds)

    @property
    def prediction_error(self) -> float | None:
        """predicted / median - 1."""
        return self._error(self.predicted_seconds)

    @property
    def rescaled_error(self) -> float | None:
        """The same for the rescaled prediction."""
        return self._error(self.rescaled_seconds)

    def _error(self, seconds: float | None) -> float | None:
        return seconds / self.median_seconds - 1 if seconds and self.seconds else None

    @property
    def label(self) -> str:
        """Strategy, wire format and other settings that distinguish the row."""
        return Entry(self.strategy, self.wire, self.lz4, self.encrypt).label

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


COLUMNS = (
    "strategy", "median", "min..max", "bound", "predicted", "rescaled", "speed-up", "sent", "lz4 saved", "notes",
)  # fmt: skip


def footnotes(rows: Sequence[Row]) -> list[str]:
    """The distinct notes of a table's rows, in order; rows refer to them by number, from 1."""
    return list(dict.fromkeys(note for row in rows for note in row.notes))


def cells(row: Row, numbered: Sequence[str]) -> tuple[str, ...]:
    """The cells of one table line."""
    marks = [*(["WRONG"] if row.wrong else []), *([] if row.trusted else ["untrusted"])]
    remarks = " ".join([*marks, *(str(numbered.index(note) + 1) for note in row.notes)])
    if not row.seconds:
        return (row.label, *["-"] * (len(COLUMNS) - 2), remarks)
    median, bound, speedup = row.median_seconds, "-", "-"
    if row.bound_share is not None:
        share, low, high = row.bound_share
        bound = f"{format_seconds(row.bound_seconds or 0.0)} ({share:.0%} [{low:.0%}, {high:.0%}])"
    elif row.bound_seconds is not None:
        bound = f"{format_seconds(row.bound_seconds)} ({row.bound_seconds / median:.0%})"
    predicted = _prediction(row.predicted_seconds, row.prediction_error)
    rescaled = _prediction(row.rescaled_seconds, row.rescaled_error)
    if row.speedup is not None:
        speedup = f"{row.speedup.median:.2f} {row.speedup.interval}"
    between = f"{format_seconds(min(row.seconds))}..{format_seconds(max(row.seconds))}"
    sent, saved = (format_bytes(count) if count else "-" for count in (row.sent_bytes, row.lz4_saved_bytes))
    return row.label, format_seconds(median), between, bound, predicted, rescaled, speedup, sent, saved, remarks


def _prediction(seconds: float | None, error: float | None) -> str:
    return "-" if seconds is None else f"{format_seconds(seconds)} ({error:+.0%})"


def by_setting(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by setting, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return list(groups.values())
