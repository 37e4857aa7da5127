"""Rows of the strategies' experiments, one per strategy and setting, and their table cells. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field

from hearth.plan.common import ValueFormatName
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.plans import Entry, Lz4, Name
from tools.bench.results import Record, Table
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


def table_of(rows: Sequence[Row]) -> Table:
    """The table of one setting. Its notes are numbered, and rows refer to them by number."""
    notes = list(dict.fromkeys(note for row in rows for note in row.notes))

    def marks(row: Row) -> str:
        words = [*(["WRONG"] if row.wrong else []), *([] if row.trusted else ["untrusted"])]
        return " ".join([*words, *(str(notes.index(note) + 1) for note in row.notes)])

    return Table.of_columns(rows[0].setting, {**_COLUMNS, "notes": marks}, rows, notes)


def _if_run(cell: Callable[[Row], object]) -> Callable[[Row], object]:
    """A dash where the row was not run, or has nothing to show."""
    return lambda row: (cell(row) or "-") if row.seconds else "-"


def _bound(row: Row) -> str:
    if row.bound_seconds is None:
        return ""
    share = f"{row.bound_seconds / row.median_seconds:.0%}"
    if row.bound_share is not None:
        share = "{:.0%} [{:.0%}, {:.0%}]".format(*row.bound_share)
    return f"{format_seconds(row.bound_seconds)} ({share})"


def _prediction(seconds: float | None, error: float | None) -> str:
    return "" if seconds is None else f"{format_seconds(seconds)} ({error:+.0%})"


_COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "strategy": lambda row: row.label,
    "median": _if_run(lambda row: format_seconds(row.median_seconds)),
    "min..max": _if_run(lambda row: f"{format_seconds(min(row.seconds))}..{format_seconds(max(row.seconds))}"),
    "bound": _if_run(_bound),
    "predicted": _if_run(lambda row: _prediction(row.predicted_seconds, row.prediction_error)),
    "rescaled": _if_run(lambda row: _prediction(row.rescaled_seconds, row.rescaled_error)),
    "speed-up": _if_run(lambda row: row.speedup),
    "sent": _if_run(lambda row: row.sent_bytes and format_bytes(row.sent_bytes)),
    "lz4 saved": _if_run(lambda row: row.lz4_saved_bytes and format_bytes(row.lz4_saved_bytes)),
}


def by_setting(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by setting, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return list(groups.values())
