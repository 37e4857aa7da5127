"""Strategies to measure: entries, the plan that the real planner makes for each, the measured rows, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from pydantic import Field

from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import PlanRequest, build_plan, on_subset
from hearth.plan.common import ValueFormatName, WireFormat
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.results import Record, Table
from tools.bench.stats import Ratio

Name = Literal[
    "local", "gloo-tp", "gloo-tp-packed", "megatron-tp", "sp", "hmp-no-overlap", "hmp", "galaxy", "exact", "auto"
]
# torch.distributed's AllReduce, with torch's matrices, and with Hearth's packed ones:
GLOO = ("gloo-tp", "gloo-tp-packed")
Lz4 = Literal["auto", "on", "off"]
_PLENTY_BYTES = 1 << 40  # memory budget of a device without a limit
GLOO_WIRES = ("exact", "fp16")


@dataclass(frozen=True)
class Entry:
    """One strategy with its wire settings, to be measured."""

    strategy: Name
    wire: ValueFormatName = "exact"
    lz4: Lz4 = "auto"
    encrypt: bool = True

    @property
    def key(self) -> str:
        return f"{self.strategy}-{self.wire}-{self.lz4}-{'encrypted' if self.encrypt else 'plain'}"

    @property
    def is_packed(self) -> bool:
        """Whether gloo's baseline multiplies with Hearth's packed matrices."""
        return self.strategy == "gloo-tp-packed"

    @property
    def label(self) -> str:
        """Strategy, wire format and what else differs from the usual."""
        lz4 = "" if self.lz4 == "auto" else f" lz4 {self.lz4}"
        plain = "" if self.encrypt or self.strategy in ("local", *GLOO) else " plain"
        return f"{self.strategy} {self.wire}{lz4}{plain}"


REFERENCE = Entry("local", encrypt=False)


def entries(
    strategies: Iterable[Name], wires: Iterable[ValueFormatName], lz4: Iterable[Lz4] = ("auto",), plain: bool = False
) -> tuple[Entry, ...]:
    """Every strategy in every wire format that it supports. `plain`: also hmp without encryption."""
    found = []
    for strategy, wire, mode in product(strategies, wires, lz4):
        if strategy == "local":
            found.append(REFERENCE)
        elif strategy not in GLOO or wire in GLOO_WIRES:
            found.append(Entry(strategy, wire, mode, encrypt=strategy not in GLOO))
        if plain and strategy == "hmp":
            found.append(Entry(strategy, wire, mode, encrypt=False))
    return tuple(dict.fromkeys(found))


def baseline_of(entry: Entry, measured: Sequence[Entry], baseline: Name | Literal["lz4 off"]) -> Entry | None:
    """The entry to compare with: the baseline in the same wire format if it supports that, else in exact.

    With `lz4 off`: the same entry without lz4, if it is measured.
    """
    if baseline == "lz4 off":
        off = Entry(entry.strategy, entry.wire, "off", entry.encrypt)
        return off if off in measured else None
    candidates = [other for other in measured if other.strategy == baseline and (other.encrypt or baseline != "hmp")]
    candidates = [other for other in candidates if other.lz4 in (entry.lz4, "auto")]
    same_wire = [other for other in candidates if other.wire == entry.wire]
    return next(iter(same_wire or [other for other in candidates if other.wire == "exact"]), None)


def plan_for(entry: Entry, spec: ModelSpec, cluster: ClusterProfile, seq_len: int) -> TransformerPlan:
    """The plan that the coordinator would make. Raises ModelDoesNotFit."""
    request = _request(entry, spec, cluster, seq_len)
    plan = plan_transformer(request).plan
    return with_body(request, plan, overlap=False) if entry.strategy == "hmp-no-overlap" else plan


def predicted_again(
    entry: Entry, plan: TransformerPlan, spec: ModelSpec, cluster: ClusterProfile, seq_len: int
) -> float:
    """Seconds of a step of this plan, by another profile than the one that it was made of."""
    return with_body(_request(entry, spec, cluster, seq_len), plan).predicted.latency_seconds


def _request(entry: Entry, spec: ModelSpec, cluster: ClusterProfile, seq_len: int) -> PlanRequest:
    strategy = "hmp" if entry.strategy == "hmp-no-overlap" else entry.strategy
    return PlanRequest(spec, cluster, seq_len, WireFormat(values=entry.wire, lz4=entry.lz4), strategy)


def with_body(request: PlanRequest, plan: TransformerPlan, **changes: Any) -> TransformerPlan:
    """The plan of this request with changes of its body, for the same devices, and predicted again."""
    ranks = on_subset(request, tuple(device.device_id for device in plan.devices))
    return build_plan(ranks, plan.body.model_copy(update=changes), plan.planner)


def reference_plan(spec: ModelSpec, cluster: ClusterProfile, seq_len: int) -> TransformerPlan:
    """The plan on one device without memory limits, whose output is the reference."""
    unlimited = tuple(device.model_copy(update={"budget_bytes": _PLENTY_BYTES}) for device in cluster.devices)
    return plan_for(REFERENCE, spec, cluster.model_copy(update={"devices": unlimited}), seq_len)


def describe(plan: TransformerPlan) -> str:
    """Strategy and devices of a plan, in a few words."""
    names = ", ".join(device.name for device in plan.devices)
    modes = sorted({mode.model_dump_json() for mode in plan.body.modes})
    kinds = f" ({len(modes)} kinds of layers)" if len(modes) > 1 else ""
    return f"{plan.body.strategy} on {names}{kinds}"


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
    if row.bound_seconds is None or row.bound_share is None:
        return ""
    return "{} ({:.0%} [{:.0%}, {:.0%}])".format(format_seconds(row.bound_seconds), *row.bound_share)


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
}


def by_setting(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by setting, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return list(groups.values())
