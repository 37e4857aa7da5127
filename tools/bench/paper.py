"""The Galaxy paper's tables and figures, and Hearth's sweeps, as lists of settings; summaries of their rows. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hearth.plan.value_formats import Values
from tools.bench.plans import Entry, Lz4, Name, baseline_of, codec_baseline, entries
from tools.bench.rows import Row, by_setting
from tools.bench.shapes import Shape
from tools.bench.stats import percentile

ENVIRONMENTS = {letter: f"galaxy-{letter}" for letter in "abcdef"}
BANDWIDTHS = (25.0, 50.0, 75.0, 100.0, 125.0, 250.0, 500.0)  # Mbit/s of the paper
SCALING_MBIT = 1000.0  # of the paper
WEAK_ROWS, STRONG_ROWS = 96, 384  # per device in Figure 10, in all in Figure 11
SWEEP_MBIT = (20.0, 50.0, 125.0, 250.0, 500.0)  # real
SWEEP_LENGTHS = (64, 284)  # tokens
SWEEP_MODELS = ("distilbert", "bert-large", "gpt2-large")
LZ4_MODES: tuple[Lz4, ...] = ("off", "auto", "on")
CODEC_MBIT = (20.0, 1000.0)  # real
COMPARED: tuple[Name, ...] = ("gloo-tp", "megatron-tp", "sp", "hmp-no-overlap", "hmp", "auto")


@dataclass(frozen=True)
class Wanted:
    """A setting to measure. At most one of the two rates is given; if neither, the scenario's own rates are used."""

    shape: Shape
    seq_len: int
    entries: tuple[Entry, ...]
    baseline: str | None = "gloo-tp"  # None: the same without lz4
    num_devices: int | None = None  # None: all
    mbit: float | None = None
    paper_mbit: float | None = None

    def compared_with(self) -> Callable[[Entry, Sequence[Entry]], Entry | None]:
        if self.baseline is None:
            return codec_baseline
        name = self.baseline
        return lambda entry, measured: baseline_of(entry, measured, name)


def galaxy(
    shapes: Sequence[Shape], lengths: Sequence[int], rates: Sequence[float], chosen: tuple[Entry, ...], baseline: str
) -> list[Wanted]:
    return [
        Wanted(shape, seq_len, chosen, baseline, mbit=rate)
        for shape in shapes
        for seq_len in lengths
        for rate in (rates or (None,))
    ]


def table4(shapes: Sequence[Shape], seq_len: int) -> list[Wanted]:
    """Every model at the scenario's link rates; also Figure 9, with other environments."""
    return [Wanted(shape, seq_len, entries(COMPARED, ["exact"])) for shape in shapes]


def fig8(shapes: Sequence[Shape], seq_len: int) -> list[Wanted]:
    compared = entries(COMPARED, ["exact"])
    return [Wanted(shape, seq_len, compared, paper_mbit=rate) for shape in shapes for rate in BANDWIDTHS]


def scaling(shapes: Sequence[Shape], max_devices: int, rows_of: Callable[[int], int]) -> list[Wanted]:
    """Figures 10 and 11: one to all devices. `rows_of`: number of rows for a number of devices."""
    return [
        Wanted(shape, rows_of(count), entries(["local"] if count == 1 else ["hmp"], ["exact"]), "local", count,
               paper_mbit=SCALING_MBIT)
        for shape in shapes
        for count in range(1, max_devices + 1)
    ]  # fmt: skip


def sweep(shapes: Sequence[Shape], max_devices: int, lengths: Sequence[int], rates: Sequence[float]) -> list[Wanted]:
    """All combinations of models, lengths, rates and numbers of devices; one device needs only one rate."""
    chosen = entries(["local", "megatron-tp", "sp", "hmp", "auto"], ["exact"])
    return [
        Wanted(shape, seq_len, chosen, "local", count, mbit=rate)
        for shape in shapes
        for seq_len in lengths
        for count in range(1, max_devices + 1)
        for rate in (rates if count > 1 else rates[:1])
    ]


def codec(shape: Shape, seq_len: int, wires: Sequence[Values], rates: Sequence[float]) -> list[Wanted]:
    chosen = tuple(Entry("hmp", wire, lz4) for wire in wires for lz4 in LZ4_MODES)
    return [Wanted(shape, seq_len, chosen, None, mbit=rate) for rate in rates]


# ---- what the rows say together -------------------------------------------------------------------------------------


def say_prediction(rows: Sequence[Row]) -> list[str]:
    errors = [abs(row.prediction_error) for row in rows if row.prediction_error is not None]
    if not errors:
        return []
    return [
        f"prediction error over {len(errors)} runs: median {statistics.median(errors):.1%}, "
        f"90th percentile {percentile(errors, 0.9):.1%}"
    ]


def say_auto(rows: Sequence[Row]) -> list[str]:
    """Compare auto with the best single device, and with the best strategy measured in the same setting."""
    gains, regrets = [], []
    for group in by_setting(rows):
        medians = {row.strategy: row.median_seconds for row in group if row.median_seconds and row.wire == "exact"}
        auto = medians.pop("auto", None)
        if not auto or not medians:
            continue
        regrets.append(auto / min(medians.values()))
        if "local" in medians:
            gains.append(medians["local"] / auto)
    said = []
    if gains:
        said.append(
            f"auto against the best single device, {len(gains)} settings: median {statistics.median(gains):.2f} times as "
            f"fast, worst {min(gains):.2f}, best {max(gains):.2f}"
        )
    if regrets:
        said.append(
            f"auto against the best strategy that was measured: median {statistics.median(regrets):.2f} of its time, "
            f"90th percentile {percentile(regrets, 0.9):.2f}, worst {max(regrets):.2f}"
        )
    return said


def say_speedup(rows: Sequence[Row]) -> list[str]:
    """Speed-up of hmp and auto over the baseline, for each setting."""
    return [
        f"{row.setting}: {row.label} is {row.speedup_over_baseline:.2f} times as fast as {row.baseline} "
        f"[{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
        for row in rows
        if row.strategy in ("hmp", "auto") and row.speedup_over_baseline is not None and row.label != row.baseline
    ]


def layer_flops(row: Row, hidden: int) -> float:
    """FLOPs of one encoder layer with an MLP of four times the hidden size: projections, MLP, attention."""
    return 24.0 * row.seq_len * hidden**2 + 4.0 * row.seq_len**2 * hidden


def scaling_of(rows: Sequence[Row], hidden_of: Callable[[str], int]) -> dict[str, list[tuple[int, float, float]]]:
    """By model: number of devices, speed-up in work per second over one device, fraction of linear speed-up."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        if row.median_seconds is not None:
            by_model.setdefault(row.model, []).append(row)
    for model, group in by_model.items():
        rates = {row.devices: layer_flops(row, hidden_of(model)) / (row.median_seconds or 1.0) for row in group}
        if 1 in rates:
            found[model] = [(count, rate / rates[1], rate / rates[1] / count) for count, rate in sorted(rates.items())]
    return found


def say_scaling(rows: Sequence[Row], hidden_of: Callable[[str], int]) -> list[str]:
    return [
        f"{model}: " + ", ".join(f"{count} devices {speedup:.2f}x ({share:.0%} of linear)"
                                 for count, speedup, share in points if count > 1)
        for model, points in scaling_of(rows, hidden_of).items()
    ]  # fmt: skip


def say_codec(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.mbit or 0:.0f} Mbit/s, {row.wire}: lz4 {row.lz4} is {row.speedup_over_baseline:.3f} times as fast as off "
        f"[{row.speedup_low:.3f}, {row.speedup_high:.3f}]"
        for row in rows
        if row.lz4 != "off" and row.speedup_over_baseline is not None
    ]
